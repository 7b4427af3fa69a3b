#include "cli/cuda.h"

#include <algorithm>
#include <array>
#include <iostream>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/measurement.h"
#include "cli/progress.h"
#include "cli/verification.h"
#include "kernels/device.h"
#include "kernels/thread_pool.h"
#include "numeric/half.h"
#include "numeric/size.h"
#include "reference/reference.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kMaxRounds = 1'000'000;

Json no_traffic() { return {{"sent_bytes", 0}, {"plan_bytes", 0}, {"minimum_bytes", 0}, {"ring_bytes", 0}}; }

void refuse_backward(const CommandOptions& options, const Launch& launch) {
  check_cuda_launch(launch);
  if (options.problem.backward)
    throw Unsupported("--device cuda computes forward; got --backward: leave it out, or use --device cpu");
}

// A problem with its tensors on the device.
class GpuForward {
 public:
  // Throws OutOfMemory before anything is allocated where the problem does not fit.
  GpuForward(const Gpu& gpu, const Problem& problem, const std::string& kernel)
      : gpu_(gpu), attention_(problem, gpu.options(kernel)) {
    const std::int64_t free = gpu.info().free_bytes;
    const std::int64_t needed = total_bytes(attention_.memory(Pass::forward));
    if (needed > free)
      throw OutOfMemory("a problem must fit into the GPU's memory; it needs " + std::to_string(needed) + " bytes and " +
                        std::to_string(free) + " are free: give smaller sizes or use several devices");
    for (const char* name : {"q", "k", "v", "out", "lse"})
      for (const MemoryComponent& part : attention_.memory(Pass::forward))
        if (part.name == name)
          tensors_[name] = gpu.backend().allocate(gpu.index(), static_cast<std::size_t>(part.bytes));
    workspace_bytes_ = attention_.workspace_bytes(Pass::forward);
    workspace_ = gpu.backend().allocate(gpu.index(), workspace_bytes_);
  }

  const Attention& attention() const { return attention_; }
  std::string kernel() const { return attention_.instruction_set(); }

  void put_inputs(const Workload& work) {
    for (const std::string& name : input_names(Pass::forward)) tensors_.at(name)->put(work.data(name));
  }
  void bring_back(Workload& work) const {
    for (const std::string& name : result_names(Pass::forward)) tensors_.at(name)->get(work.result(name));
  }

  double run() {  // seconds, by the device's own clock
    const Problem& problem = attention_.problem();
    const auto view = [&](const char* name, std::int64_t heads) {
      const std::array<std::int64_t, 4> shape{problem.batch, problem.tokens, heads, problem.head_dim};
      return TensorView(tensors_.at(name)->data(), problem.dtype, shape);
    };
    ForwardArgs args;
    args.q = view("q", problem.heads);
    args.k = view("k", problem.kv_heads);
    args.v = view("v", problem.kv_heads);
    args.out = view("out", problem.heads);
    args.lse = {static_cast<float*>(tensors_.at("lse")->data()),
                static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens)};
    args.workspace = {static_cast<std::byte*>(workspace_->data()), workspace_bytes_};
    return gpu_.backend().time(gpu_.index(), [&](void* stream) {
      args.stream = stream;
      attention_.forward(args);
    });
  }

  Json memory() const {
    Json components = Json::object();
    for (const MemoryComponent& part : attention_.memory(Pass::forward))
      components[part.name] = components.value(part.name, std::int64_t{0}) + part.bytes;
    const std::int64_t bytes = total_bytes(attention_.memory(Pass::forward));
    return {{"peak_bytes", bytes}, {"plan_bytes", bytes}, {"components", components}};
  }
  std::string memory_line() const {
    return "memory   " + format_bytes(total_bytes(attention_.memory(Pass::forward))) +
           " in tensors and workspace on the device\n";
  }

 private:
  const Gpu& gpu_;
  Attention attention_;
  std::map<std::string, std::unique_ptr<cuda::DeviceMemory>> tensors_;
  std::size_t workspace_bytes_ = 0;
  std::unique_ptr<cuda::DeviceMemory> workspace_;
};

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
std::vector<std::unique_ptr<GpuForward>> kernels_for(const Gpu& gpu, const Problem& problem,
                                                     const std::string& wanted) {
  std::vector<std::unique_ptr<GpuForward>> found;
  if (wanted != "auto") {
    found.push_back(std::make_unique<GpuForward>(gpu, problem, wanted));
    return found;
  }
  for (const cuda::KernelChoice& kernel : cuda::kKernels) {
    try {
      found.push_back(std::make_unique<GpuForward>(gpu, problem, kernel.name));
    } catch (const Unsupported&) {  // another one takes it
    }
  }
  return found;
}

}  // namespace

Gpu::Gpu(const MachineOptions& options)
    : backend_(cuda::load_backend()), index_(parse_device(options.device).index.value_or(0)) {
  (void)info();  // is it there?
}

Options Gpu::options(const std::string& kernel) const {
  return {.threads = 0, .instruction_set = kernel, .device = "cuda:" + std::to_string(index_)};
}

Json cuda_environment(const Gpu& gpu, const std::string& kernel) {
  const cuda::DeviceInfo device = gpu.info();
  Json environment = environment_json(instruction_sets().front(), usable_cores());
  environment["device"] = "cuda";
  environment["gpu"] = device.name;
  environment["compute_capability"] = device.compute_capability;
  environment["kernel"] = kernel;
  return environment;
}

std::string describe_on_cuda(const Gpu& gpu, const Problem& problem, const std::string& kernel) {
  const std::string both = describe(problem, "", 1);  // the machine, the problem
  return "annulus " + version() + " on " + gpu.info().name + ", kernel " + kernel + both.substr(both.find('\n'));
}

int run_on_cuda(const CommandOptions& options, const Launch& launch, const FileOptions& files) {
  refuse_backward(options, launch);
  InputFiles inputs(files, options.problem);
  const Problem problem = make_problem(options.problem, inputs.given() ? inputs.sizes() : typed_sizes(options));
  const std::uint64_t seed = make_seed(options.problem);
  const Gpu gpu(options.machine);
  GpuForward forward(gpu, problem, options.machine.kernel);
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
    forward.put_inputs(work);
    progress.step("forward");
    seconds = forward.run();
    forward.bring_back(work);
    progress.step("write results");
    const Holdings holdings = holdings_of(make_rank_setup(options, problem, 1), problem);
    run_ranks(launch, make_group_options(options.ranks, 64), [&](Rank& rank) {
      written = write_outputs(files, rank, holdings, work, Pass::forward, inputs.without_batch());
      return kRight;
    });
  }
  const Json sums = checksums(work, threads);
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(gpu, problem, forward.kernel()) << forward.attention().explain();
  out << "forward  " << duration_text(seconds) << "\n";
  for (const auto& [tensor, sum] : sums.items())
    out << (tensor == "out" ? "checksum " : "         ") << tensor << " " << sum.get<std::string>() << "\n";
  out << forward.memory_line();
  for (const std::string& path : written) out << "wrote    " << path << "\n";
  write_report(options.report, {{"problem", problem_json(options, problem, 1)},
                                {"environment", cuda_environment(gpu, forward.kernel())},
                                {"seconds", seconds},
                                {"forward_seconds", seconds},
                                {"memory", forward.memory()},
                                {"traffic", no_traffic()},
                                {"checksum", sums}});
  return kRight;
}

std::vector<VerifyCheck> verify_on_cuda(const Gpu& gpu, const Problem& problem, const std::string& kernel,
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
  for (const auto& forward : kernels_for(gpu, problem, kernel)) {
    const auto compute = [&] {
      forward->run();
      forward->bring_back(work);
      return checksums(work, usable_cores());
    };
    forward->put_inputs(work);
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
  const Problem problem = make_problem(options.problem, typed_sizes(options));
  const std::uint64_t seed = make_seed(options.problem);
  const Gpu gpu(options.machine);
  GpuForward forward(gpu, problem, options.machine.kernel);
  check_reports(report_paths(options));
  Measurement measurement{"forward", 4 * static_cast<double>(problem.head_dim) * count_pairs(problem), {}};
  Peak peak;
  {
    Progress progress(options.report.quiet, 3 + times.warmup + times.repeats);
    const auto measure_peak = [&] {  // before and after: the better one
      progress.step("peak");
      const Peak found = gpu.backend().measure_peak(gpu.index(), problem.dtype);
      if (found.flop_per_s > peak.flop_per_s) peak = found;
    };
    progress.step("draw inputs");
    Workload work(problem);
    work.draw(seed, usable_cores(), Pass::forward);
    forward.put_inputs(work);
    measure_peak();
    for (std::int64_t i = 0; i < times.warmup; ++i) {
      progress.step("forward, warm-up " + std::to_string(i + 1));
      forward.run();
    }
    double total = 0;
    for (std::int64_t i = 0; i < kMaxRounds && (i < times.repeats || total < times.min_seconds); ++i) {
      if (i < times.repeats) progress.step("forward, round " + std::to_string(i + 1));
      measurement.seconds.push_back(forward.run());
      total += measurement.seconds.back();
    }
    measure_peak();
  }
  std::ranges::sort(measurement.seconds);
  check_plausible(measurement, peak);
  const double rate = measurement.rate(measurement.median());
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(gpu, problem, forward.kernel()) << forward.attention().explain();
  out << table_text({{"", "median", "best", "worst", "rounds", "TFLOP/s", "of peak"},
                     {"forward", duration_text(measurement.median()), duration_text(measurement.best()),
                      duration_text(measurement.worst()), std::to_string(measurement.seconds.size()),
                      number_text(rate / 1e12, 4), number_text(100 * rate / peak.flop_per_s) + " %"}});
  out << "peak     " << number_text(peak.flop_per_s / 1e12, 4) << " TFLOP/s, " << peak.instruction
      << ", measured in this run\n";
  out << forward.memory_line();
  write_report(options.report, {{"problem", problem_json(options, problem, 1)},
                                {"environment", cuda_environment(gpu, forward.kernel())},
                                {"forward",
                                 {{"ms",
                                   {{"median", measurement.median() * 1e3},
                                    {"best", measurement.best() * 1e3},
                                    {"worst", measurement.worst() * 1e3}}},
                                  {"rounds", measurement.seconds.size()},
                                  {"flop", measurement.flop},
                                  {"flop_per_s", rate},
                                  {"peak_flop_per_s", peak.flop_per_s},
                                  {"peak_fraction", rate / peak.flop_per_s}}},
                                {"peak_instruction", peak.instruction},
                                {"traffic", no_traffic()},
                                {"memory", forward.memory()},
                                {"communication", {{"exposed_fraction", 0.0}}}});
  return kRight;
}

std::string cuda_text() {
  try {
    const cuda::DeviceInfo device = Gpu({}).info();
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
    const cuda::DeviceInfo device = Gpu({}).info();
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
