#include "cli/cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <iostream>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/measurement.h"
#include "cli/progress.h"
#include "cli/verification.h"
#include "kernels/thread_pool.h"
#include "numeric/half.h"
#include "numeric/size.h"
#include "reference/reference.h"

namespace annulus::cli {
namespace {

constexpr const char* kLibrary = "libannulus_cuda.so";
constexpr std::int64_t kMaxRounds = 1'000'000;

Json no_traffic() { return {{"sent_bytes", 0}, {"plan_bytes", 0}, {"minimum_bytes", 0}, {"ring_bytes", 0}}; }

void refuse_backward(const CommandOptions& options, const Launch& launch) {
  check_cuda_launch(launch);
  if (options.problem.backward)
    throw Unsupported("--device cuda computes forward; got --backward: leave it out, or use --device cpu");
}

// Results of the device in host memory of the workload.
void bring_back(cuda::DeviceForward& forward, Workload& work) {
  for (const std::string& name : result_names(Pass::forward)) forward.get(name, work.result(name));
}

void put_inputs(cuda::DeviceForward& forward, const Workload& work) {
  for (const std::string& name : input_names(Pass::forward)) forward.put(name, work.data(name));
}

Json memory_on(const cuda::DeviceForward& forward) {
  Json components = Json::object();
  for (const MemoryComponent& part : forward.memory())
    components[part.name] = components.value(part.name, std::int64_t{0}) + part.bytes;
  const std::int64_t bytes = total_bytes(forward.memory());
  return {{"peak_bytes", bytes}, {"plan_bytes", bytes}, {"components", components}};
}

std::string memory_line(const cuda::DeviceForward& forward) {
  return "memory   " + format_bytes(total_bytes(forward.memory())) + " in tensors and workspace on the device\n";
}

Json checksums(const Workload& work, int threads) {
  Json sums = Json::object();
  for (const std::string& name : result_names(Pass::forward))
    sums[name] = checksum_text(checksum(work.data(name), size_of(work.dtype(name)), work.elements(name), threads));
  return sums;
}

template <class T>
std::vector<double> widen(const void* data, std::int64_t count) {
  const auto* elements = static_cast<const T*>(data);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(to_float(elements[i]));
  return values;
}

std::vector<double> as_doubles(const Workload& work, const std::string& name) {
  if (work.dtype(name) == DType::bf16) return widen<BFloat16>(work.data(name), work.elements(name));
  if (work.dtype(name) == DType::fp16) return widen<Float16>(work.data(name), work.elements(name));
  return widen<float>(work.data(name), work.elements(name));
}

// All kernels that take the problem, or the one that was asked for.
std::vector<std::unique_ptr<cuda::DeviceForward>> kernels_for(const cuda::Backend& backend, const Problem& problem,
                                                              const std::string& wanted) {
  std::vector<std::unique_ptr<cuda::DeviceForward>> found;
  if (wanted != "auto") {
    found.push_back(backend.forward(problem, wanted));
    return found;
  }
  for (const cuda::KernelChoice& kernel : cuda::kKernels) {
    try {
      found.push_back(backend.forward(problem, kernel.name));
    } catch (const Unsupported&) {  // another one takes it
    }
  }
  return found;
}

}  // namespace

Json cuda_environment(const cuda::Backend& backend, const std::string& kernel) {
  const cuda::DeviceInfo device = backend.device();
  Json environment = environment_json(instruction_sets().front(), usable_cores());
  environment["device"] = "cuda";
  environment["gpu"] = device.name;
  environment["compute_capability"] = device.compute_capability;
  environment["kernel"] = kernel;
  return environment;
}

std::string describe_on_cuda(const cuda::Backend& backend, const Problem& problem, const std::string& kernel) {
  const std::string both = describe(problem, "", 1);  // the machine, the problem
  return "annulus " + version() + " on " + backend.device().name + ", kernel " + kernel + both.substr(both.find('\n'));
}

std::unique_ptr<cuda::Backend> load_cuda() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);  // stays loaded
  if (library == nullptr)
    throw DeviceError(std::string("--device cuda needs the CUDA backend; got no ") + kLibrary +
                      " beside this tool: build with ANNULUS_CUDA=ON where nvcc is, or use --device cpu");
  const auto make = reinterpret_cast<cuda::MakeBackend>(dlsym(library, cuda::kMakeBackend));
  if (make == nullptr)
    throw DeviceError(std::string("the CUDA backend must be of this version; got a ") + kLibrary + " without " +
                      cuda::kMakeBackend + ": install tool and library together");
  return std::unique_ptr<cuda::Backend>(make());
}

int run_on_cuda(const CommandOptions& options, const Launch& launch, const FileOptions& files) {
  refuse_backward(options, launch);
  InputFiles inputs(files, options.problem);
  const Problem problem = make_problem(options.problem, inputs.given() ? inputs.sizes() : typed_sizes(options.problem));
  const std::uint64_t seed = make_seed(options.problem);
  const std::unique_ptr<cuda::Backend> backend = load_cuda();
  const std::unique_ptr<cuda::DeviceForward> forward = backend->forward(problem, options.machine.kernel);
  check_outputs(files, report_paths(options), Pass::forward);
  const int threads = usable_cores();
  Workload work(problem);
  double seconds = 0;
  std::vector<std::string> written;
  {
    Progress progress(options.report.quiet, 3);
    progress.step(inputs.given() ? "map inputs" : "draw inputs");
    if (inputs.given())
      inputs.lend(work, Pass::forward);
    else
      work.draw(seed, threads, Pass::forward);
    work.hold_results(Pass::forward);
    put_inputs(*forward, work);
    progress.step("forward");
    seconds = forward->run();
    bring_back(*forward, work);
    progress.step("write results");
    const Holdings holdings = holdings_of(make_rank_setup(options, problem, 1), problem);
    run_ranks(launch, make_group_options(options.ranks, 64), [&](Rank& rank) {
      written = write_outputs(files, rank, holdings, work, Pass::forward, inputs.without_batch());
      return kRight;
    });
  }
  const Json sums = checksums(work, threads);
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(*backend, problem, forward->kernel()) << forward->explain();
  out << "forward  " << duration_text(seconds) << "\n";
  for (const auto& [tensor, sum] : sums.items())
    out << (tensor == "out" ? "checksum " : "         ") << tensor << " " << sum.get<std::string>() << "\n";
  out << memory_line(*forward);
  for (const std::string& path : written) out << "wrote    " << path << "\n";
  write_report(options.report, {{"problem", problem_json(options, problem, 1)},
                                {"environment", cuda_environment(*backend, forward->kernel())},
                                {"seconds", seconds},
                                {"forward_seconds", seconds},
                                {"memory", memory_on(*forward)},
                                {"traffic", no_traffic()},
                                {"checksum", sums}});
  return kRight;
}

std::vector<VerifyCheck> verify_on_cuda(const cuda::Backend& backend, const Problem& problem, const std::string& kernel,
                                        std::uint64_t seed, const std::function<void(const std::string&)>& step) {
  std::vector<VerifyCheck> checks;
  Workload work(problem);
  work.draw(seed, usable_cores(), Pass::forward);
  const reference::Inputs inputs{
      .q = as_doubles(work, "q"), .k = as_doubles(work, "k"), .v = as_doubles(work, "v"), .dout = {}};
  step("fp64 reference");
  const reference::Result exact = reference::exact(problem, inputs);
  step("textbook in " + std::string(name(problem.dtype)));
  const reference::Result textbook = reference::textbook(problem, inputs);
  work.hold_results(Pass::forward);
  step("kernels");
  for (const auto& forward : kernels_for(backend, problem, kernel)) {
    const auto compute = [&] {
      forward->run();
      bring_back(*forward, work);
      return checksums(work, usable_cores());
    };
    put_inputs(*forward, work);
    const Json first = compute();
    const reference::Result result{
        .out = as_doubles(work, "out"), .lse = as_doubles(work, "lse"), .dq = {}, .dk = {}, .dv = {}};
    for (const reference::Check& check : reference::compare(problem, result, exact, textbook))
      checks.push_back({forward->kernel() + " against fp64", check.tensor, check.max_error, check.bound, check.passed});
    const Json again = compute();
    for (const std::string& tensor : result_names(Pass::forward)) {
      const bool same = first[tensor] == again[tensor];
      checks.push_back({forward->kernel() + " run again", tensor, same ? 0.0 : 1.0, 0, same});
    }
  }
  return checks;
}

void check_cuda_launch(const Launch& launch) {
  if (launch.ranks > 1)
    throw Unsupported("--device cuda computes on one rank; got " + std::to_string(launch.ranks) +
                      ": leave out --ranks, or use --device cpu");
}

int bench_on_cuda(const CommandOptions& options, const Launch& launch, const CudaTimes& times) {
  refuse_backward(options, launch);
  const Problem problem = make_problem(options.problem, typed_sizes(options.problem));
  const std::uint64_t seed = make_seed(options.problem);
  const std::unique_ptr<cuda::Backend> backend = load_cuda();
  const std::unique_ptr<cuda::DeviceForward> forward = backend->forward(problem, options.machine.kernel);
  check_reports(report_paths(options));
  Measurement measurement{"forward", 4 * static_cast<double>(problem.head_dim) * count_pairs(problem), {}};
  {
    Progress progress(options.report.quiet, 1 + times.warmup + times.repeats);
    progress.step("draw inputs");
    Workload work(problem);
    work.draw(seed, usable_cores(), Pass::forward);
    put_inputs(*forward, work);
    for (std::int64_t i = 0; i < times.warmup; ++i) {
      progress.step("forward, warm-up " + std::to_string(i + 1));
      forward->run();
    }
    double total = 0;
    for (std::int64_t i = 0; i < kMaxRounds && (i < times.repeats || total < times.min_seconds); ++i) {
      if (i < times.repeats) progress.step("forward, round " + std::to_string(i + 1));
      measurement.seconds.push_back(forward->run());
      total += measurement.seconds.back();
    }
  }
  std::ranges::sort(measurement.seconds);
  const cuda::NominalPeak nominal = backend->peak(problem);
  check_plausible(measurement, {nominal.flop_per_s, nominal.what});
  const double rate = measurement.rate(measurement.median());
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(*backend, problem, forward->kernel()) << forward->explain();
  out << table_text({{"", "median", "best", "worst", "rounds", "TFLOP/s", "of peak"},
                     {"forward", duration_text(measurement.median()), duration_text(measurement.best()),
                      duration_text(measurement.worst()), std::to_string(measurement.seconds.size()),
                      number_text(rate / 1e12, 4), number_text(100 * rate / nominal.flop_per_s) + " %"}});
  out << "peak     " << number_text(nominal.flop_per_s / 1e12, 4) << " TFLOP/s, " << nominal.what << ", nominal\n";
  out << memory_line(*forward);
  write_report(options.report, {{"problem", problem_json(options, problem, 1)},
                                {"environment", cuda_environment(*backend, forward->kernel())},
                                {"forward",
                                 {{"ms",
                                   {{"median", measurement.median() * 1e3},
                                    {"best", measurement.best() * 1e3},
                                    {"worst", measurement.worst() * 1e3}}},
                                  {"rounds", measurement.seconds.size()},
                                  {"flop", measurement.flop},
                                  {"flop_per_s", rate},
                                  {"peak_flop_per_s", nominal.flop_per_s},
                                  {"peak_fraction", rate / nominal.flop_per_s}}},
                                {"peak_instruction", nominal.what},
                                {"traffic", no_traffic()},
                                {"memory", memory_on(*forward)},
                                {"communication", {{"exposed_fraction", 0.0}}}});
  return kRight;
}

std::string cuda_text() {
  try {
    const cuda::DeviceInfo device = load_cuda()->device();
    std::string text = "gpu               " + device.name + ", sm_" + std::to_string(device.compute_capability) + ", " +
                       std::to_string(device.multiprocessors) + " multiprocessors, " + format_bytes(device.free_bytes) +
                       " of " + format_bytes(device.memory_bytes) + " free\n";
    for (const cuda::KernelChoice& kernel : cuda::kKernels)
      text += "  kernel " + std::string(kernel.name) + "  " + kernel.takes + ": " + kernel.why + "\n";
    return text;
  } catch (const DeviceError& error) {
    return std::string("gpu               none: ") + error.what() + "\n";
  }
}

Json cuda_json() {
  try {
    const cuda::DeviceInfo device = load_cuda()->device();
    Json kernels = Json::array();
    for (const cuda::KernelChoice& kernel : cuda::kKernels)
      kernels.push_back({{"name", kernel.name}, {"takes", kernel.takes}, {"why", kernel.why}});
    return {{"name", device.name},
            {"compute_capability", device.compute_capability},
            {"multiprocessors", device.multiprocessors},
            {"memory_bytes", device.memory_bytes},
            {"free_bytes", device.free_bytes},
            {"driver_version", device.driver_version},
            {"kernels", kernels}};
  } catch (const DeviceError&) {
    return nullptr;
  }
}

}  // namespace annulus::cli
