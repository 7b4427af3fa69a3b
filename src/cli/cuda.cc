#include "cli/cuda.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <nlohmann/json.hpp>

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

Json no_traffic() { return {{"sent_bytes", 0}, {"plan_bytes", 0}, {"minimum_bytes", 0}, {"ring_bytes", 0}}; }

// Only dq can differ from run to run: where tiles add to it as they come.
bool adds_dq_up(const std::string& kernel, bool deterministic) { return kernel == "sm90" && !deterministic; }

Json problem_on_cuda(const CommandOptions& options, const Problem& problem, const std::string& kernel, int ranks = 1) {
  const bool in_order = options.problem.deterministic || options.problem.reproducible;
  Json json = problem_json(options, problem, ranks);
  json["deterministic"] = !options.problem.backward || !adds_dq_up(kernel, in_order);
  return json;
}

constexpr double flop_per_pair_and_element(Pass pass) { return pass == Pass::forward ? 4 : 10; }
const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

// The passes that lead to `last`, in order.
std::vector<Pass> passes_to(Pass last) {
  return last == Pass::forward ? std::vector{Pass::forward} : std::vector{Pass::forward, Pass::backward};
}

// A problem with its tensors on the device, for the passes up to one.
class GpuWork {
 public:
  // Throws OutOfMemory before anything is allocated where the problem does not fit.
  GpuWork(const Gpu& gpu, const Problem& problem, const std::string& kernel, Pass last, bool deterministic)
      : gpu_(gpu), attention_(problem, gpu.options(kernel, deterministic)), last_(last) {
    const std::int64_t free = gpu.info().free_bytes;
    const std::int64_t needed = total_bytes(parts());
    if (needed > free)
      throw OutOfMemory("a problem must fit into the GPU's memory; it needs " + std::to_string(needed) + " bytes and " +
                        std::to_string(free) + " are free: give smaller sizes or use several devices");
    for (const MemoryComponent& part : attention_.memory(last))
      if (is_tensor(part.name))
        tensors_[part.name] = gpu.backend().allocate(gpu.index(), static_cast<std::size_t>(part.bytes));
    for (const Pass pass : passes_to(last))
      workspace_bytes_ = std::max(workspace_bytes_, attention_.workspace_bytes(pass));
    workspace_ = gpu.backend().allocate(gpu.index(), workspace_bytes_);
  }

  const Attention& attention() const { return attention_; }
  std::string kernel() const { return attention_.instruction_set(); }

  void put_inputs(const Workload& work) {
    for (const std::string& name : input_names(last_)) tensors_.at(name)->put(work.data(name));
  }
  void bring_back(Workload& work) const {
    for (const std::string& name : result_names(last_)) tensors_.at(name)->get(work.result(name));
  }

  double run(Pass pass) {  // seconds, by the device's own clock
    return gpu_.backend().time(gpu_.index(), [&](void* stream) {
      if (pass == Pass::forward) {
        ForwardArgs args;
        args.q = view("q");
        args.k = view("k");
        args.v = view("v");
        args.out = view("out");
        args.lse = lse();
        args.workspace = workspace();
        args.stream = stream;
        return attention_.forward(args);
      }
      BackwardArgs args;
      args.q = view("q");
      args.k = view("k");
      args.v = view("v");
      args.out = view("out");
      args.lse = lse();
      args.dout = view("dout");
      args.dq = view("dq");
      args.dk = view("dk");
      args.dv = view("dv");
      args.workspace = workspace();
      args.stream = stream;
      attention_.backward(args);
    });
  }

  Json memory() const {
    Json components = Json::object();
    for (const MemoryComponent& part : parts())
      components[part.name] = components.value(part.name, std::int64_t{0}) + part.bytes;
    const std::int64_t bytes = total_bytes(parts());
    return {{"peak_bytes", bytes}, {"plan_bytes", bytes}, {"components", components}};
  }
  std::string memory_line() const {
    return "memory   " + format_bytes(total_bytes(parts())) + " in tensors and workspace on the device\n";
  }

 private:
  // Tensors of all passes, and the larger workspace.
  std::vector<MemoryComponent> parts() const {
    std::vector<MemoryComponent> all = attention_.memory(last_);
    if (attention_.workspace_bytes(Pass::forward) <= attention_.workspace_bytes(last_)) return all;
    std::erase_if(all, [](const MemoryComponent& part) { return !is_tensor(part.name); });
    for (const MemoryComponent& part : attention_.memory(Pass::forward))
      if (!is_tensor(part.name)) all.push_back(part);
    return all;
  }

  TensorView view(const std::string& name) const {
    const Problem& problem = attention_.problem();
    const std::int64_t heads = is_key_side(name) ? problem.kv_heads : problem.heads;
    const std::array<std::int64_t, 4> shape{problem.batch, problem.tokens, heads, problem.head_dim};
    return TensorView(tensors_.at(name)->data(), problem.dtype, shape);
  }
  std::span<float> lse() const {
    const Problem& problem = attention_.problem();
    return {static_cast<float*>(tensors_.at("lse")->data()),
            static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens)};
  }
  std::span<std::byte> workspace() const { return {static_cast<std::byte*>(workspace_->data()), workspace_bytes_}; }

  const Gpu& gpu_;
  Attention attention_;
  Pass last_;
  std::map<std::string, std::unique_ptr<cuda::DeviceMemory>> tensors_;
  std::size_t workspace_bytes_ = 0;
  std::unique_ptr<cuda::DeviceMemory> workspace_;
};

Json checksums(const Workload& work, Pass last, int threads) {
  Json sums = Json::object();
  for (const std::string& name : result_names(last))
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
std::vector<std::unique_ptr<GpuWork>> kernels_for(const Gpu& gpu, const Problem& problem, const std::string& wanted,
                                                  bool deterministic) {
  std::vector<std::unique_ptr<GpuWork>> found;
  const auto add = [&](const std::string& kernel) {
    found.push_back(std::make_unique<GpuWork>(gpu, problem, kernel, Pass::backward, deterministic));
  };
  if (wanted != "auto") {
    add(wanted);
    return found;
  }
  for (const cuda::KernelChoice& kernel : cuda::kKernels) {
    try {
      add(kernel.name);
    } catch (const Unsupported&) {  // another one takes it
    }
  }
  return found;
}

}  // namespace

Gpu::Gpu(const MachineOptions& options)
    : backend_(cuda::load_backend()),
      index_(parse_device(options.device).index.value_or(0)),
      threads_(make_machine(options).threads) {
  if (threads_ == 0) threads_ = usable_cores();
  (void)info();  // is it there?
}

Options Gpu::options(const std::string& kernel, bool deterministic) const {
  return {.threads = 0,
          .instruction_set = kernel,
          .device = "cuda:" + std::to_string(index_),
          .deterministic = deterministic};
}

Json cuda_environment(const Gpu& gpu, const std::string& kernel, const Launch& launch) {
  const cuda::DeviceInfo device = gpu.info();
  Json environment = environment_json(instruction_sets().front(), gpu.threads(), launch);
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

int threads_of(const RankAttention& attention, const Rank& rank) {
  return rank.on_gpu() ? rank.default_threads() : attention.threads();
}

Json problem_of(const CommandOptions& options, const RankAttention& attention, const Rank& rank) {
  const int ranks = rank.transport.size();
  if (!rank.on_gpu()) return problem_json(options, attention.problem(), ranks);
  return problem_on_cuda(options, attention.problem(), std::string(attention.instruction_set()), ranks);
}

Json environment_of(const RankAttention& attention, const Launch& launch, const Rank& rank) {
  if (!rank.on_gpu()) return environment_json(attention.instruction_set(), attention.threads(), launch);
  const cuda::DeviceInfo device = cuda::load_backend().info(*parse_device(rank.device).index);
  Json environment = environment_json(instruction_sets().front(), rank.default_threads(), launch);
  environment["device"] = "cuda";
  environment["gpu"] = device.name;
  environment["compute_capability"] = device.compute_capability;
  environment["kernel"] = attention.instruction_set();
  environment["payload"] = rank.transport.name();
  return environment;
}

std::string describe_machine(const RankAttention& attention, const Rank& rank) {
  if (!rank.on_gpu()) return describe(attention.problem(), attention.instruction_set(), attention.threads());
  const std::string both = describe(attention.problem(), "", 1);  // the machine, the problem
  return "annulus " + version() + " on " + cuda::load_backend().info(*parse_device(rank.device).index).name +
         ", kernel " + attention.instruction_set() +
         (rank.transport.size() > 1 ? ", payload by " + std::string(rank.transport.name()) : "") +
         both.substr(both.find('\n'));
}

Peak peak_of_gpu(const std::string& device, DType dtype) {
  return cuda::load_backend().measure_peak(*parse_device(device).index, dtype);
}

int run_on_cuda(const CommandOptions& options, const Launch& launch, const FileOptions& files) {
  const Pass last = options.problem.backward ? Pass::backward : Pass::forward;
  InputFiles inputs(files, options.problem);
  const Problem problem = make_problem(options.problem, inputs.given() ? inputs.sizes() : typed_sizes(options));
  const std::uint64_t seed = make_seed(options.problem);
  const Gpu gpu(options.machine);
  GpuWork gpu_work(gpu, problem, options.machine.kernel, last, options.problem.deterministic);
  check_outputs(files, report_paths(options), last);
  const int threads = gpu.threads();
  Workload work(problem);
  std::map<Pass, double> seconds;
  std::vector<std::string> written;
  {
    Progress progress(options.report.quiet, 2 + static_cast<std::int64_t>(passes_to(last).size()));
    progress.step(inputs.given() ? "map inputs" : "draw inputs");
    if (inputs.given())
      inputs.lend(work, last);
    else
      work.draw(seed, threads, last);
    for (const Pass pass : passes_to(last)) work.hold_results(pass);
    gpu_work.put_inputs(work);
    for (const Pass pass : passes_to(last)) {
      progress.step(name_of(pass));
      seconds[pass] = gpu_work.run(pass);
    }
    gpu_work.bring_back(work);
    progress.step("write results");
    const Holdings holdings = holdings_of(make_rank_setup(options, problem, launch), problem);
    run_ranks(launch, {}, [&](Rank& rank) {
      written = write_outputs(files, rank, holdings, work, last, inputs.without_batch());
      return kRight;
    });
  }
  const Json sums = checksums(work, last, threads);
  double total = 0;
  Json report = {{"problem", problem_on_cuda(options, problem, gpu_work.kernel())},
                 {"environment", cuda_environment(gpu, gpu_work.kernel())},
                 {"memory", gpu_work.memory()},
                 {"traffic", no_traffic()},
                 {"checksum", sums}};
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(gpu, problem, gpu_work.kernel()) << gpu_work.attention().explain();
  for (const auto& [pass, time] : seconds) {
    out << (pass == Pass::forward ? "forward  " : "backward ") << duration_text(time) << "\n";
    report[std::string(name_of(pass)) + "_seconds"] = time;
    total += time;
  }
  report["seconds"] = total;
  for (const auto& [tensor, sum] : sums.items())
    out << (tensor == sums.begin().key() ? "checksum " : "         ") << tensor << " " << sum.get<std::string>()
        << "\n";
  out << gpu_work.memory_line();
  for (const std::string& path : written) out << "wrote    " << path << "\n";
  write_report(options.report, report);
  return kRight;
}

std::vector<VerifyCheck> verify_on_cuda(const Gpu& gpu, const Problem& problem, const VerifyOnGpu& how,
                                        const std::function<void(const std::string&)>& step) {
  std::vector<VerifyCheck> checks;
  Workload work(problem);
  work.draw(how.seed, gpu.threads(), Pass::backward);
  const reference::Inputs inputs{.q = as_doubles(work, "q"),
                                 .k = as_doubles(work, "k"),
                                 .v = as_doubles(work, "v"),
                                 .dout = as_doubles(work, "dout")};
  step("fp64 reference");
  const reference::Result exact = reference::exact(problem, inputs, gpu.threads());
  step("textbook in " + std::string(name(problem.dtype)));
  const reference::Result textbook = reference::textbook(problem, inputs, gpu.threads());
  for (const Pass pass : passes_to(Pass::backward)) work.hold_results(pass);
  step("kernels");
  for (const auto& gpu_work : kernels_for(gpu, problem, how.kernel, how.deterministic)) {
    const std::string kernel = gpu_work->kernel();
    const auto compute = [&] {
      for (const Pass pass : passes_to(Pass::backward)) gpu_work->run(pass);
      gpu_work->bring_back(work);
      return checksums(work, Pass::backward, gpu.threads());
    };
    gpu_work->put_inputs(work);
    const Json first = compute();
    const reference::Result result{.out = as_doubles(work, "out"),
                                   .lse = as_doubles(work, "lse"),
                                   .dq = as_doubles(work, "dq"),
                                   .dk = as_doubles(work, "dk"),
                                   .dv = as_doubles(work, "dv")};
    for (const reference::Check& check : reference::compare(problem, result, exact, textbook))
      checks.push_back({kernel + " against fp64", check.tensor, check.max_error, check.bound, check.passed});
    const Json again = compute();
    for (const std::string& tensor : result_names(Pass::backward)) {
      if (tensor == "dq" && adds_dq_up(kernel, how.deterministic)) continue;
      const bool same = first[tensor] == again[tensor];
      checks.push_back({kernel + " run again", tensor, same ? 0.0 : 1.0, 0, same});
    }
  }
  return checks;
}

int bench_on_cuda(const CommandOptions& options, const CudaTimes& times) {
  const Pass last = options.problem.backward ? Pass::backward : Pass::forward;
  const Problem problem = make_problem(options.problem, typed_sizes(options));
  const std::uint64_t seed = make_seed(options.problem);
  const Gpu gpu(options.machine);
  GpuWork gpu_work(gpu, problem, options.machine.kernel, last, options.problem.deterministic);
  check_reports(report_paths(options));
  std::vector<Measurement> measurements;
  Peak peak;
  {
    const auto passes = static_cast<std::int64_t>(passes_to(last).size());
    Progress progress(options.report.quiet, 1 + passes * (times.warmup + times.repeats));
    const auto observe_peak = [&] {
      const Peak found = gpu.backend().measure_peak(gpu.index(), problem.dtype);
      if (found.flop_per_s > peak.flop_per_s) peak = found;
    };
    progress.step("draw inputs");
    Workload work(problem);
    work.draw(seed, gpu.threads(), last);
    gpu_work.put_inputs(work);
    for (const Pass pass : passes_to(last)) {
      const std::string what = name_of(pass);
      Measurement measurement{
          what, flop_per_pair_and_element(pass) * static_cast<double>(problem.head_dim) * count_pairs(problem), {}};
      for (std::int64_t i = 0; i < times.warmup; ++i) {
        progress.step(what + ", warm-up " + std::to_string(i + 1));
        gpu_work.run(pass);
      }
      double total = 0, total_at_peak = 0;
      for (std::int64_t i = 0; i < kMaxRounds && (i < times.repeats || total < times.min_seconds); ++i) {
        if (i < times.repeats) progress.step(what + ", round " + std::to_string(i + 1));
        if (i < times.repeats || total - total_at_peak > kPeakEvery) {  // as bench.cc does for several ranks
          observe_peak();
          total_at_peak = total;
        }
        measurement.seconds.push_back(gpu_work.run(pass));
        total += measurement.seconds.back();
      }
      std::ranges::sort(measurement.seconds);
      measurements.push_back(std::move(measurement));
    }
    observe_peak();
  }
  Json report = {{"problem", problem_on_cuda(options, problem, gpu_work.kernel())},
                 {"environment", cuda_environment(gpu, gpu_work.kernel())},
                 {"peak_instruction", peak.instruction},
                 {"traffic", no_traffic()},
                 {"memory", gpu_work.memory()},
                 {"communication", {{"exposed_fraction", 0.0}}}};
  std::vector<std::vector<std::string>> table = {{"", "median", "best", "worst", "rounds", "TFLOP/s", "of peak"}};
  for (const Measurement& measurement : measurements) {
    check_plausible(measurement, peak);
    const double rate = measurement.rate(measurement.median());
    table.push_back({measurement.pass, duration_text(measurement.median()), duration_text(measurement.best()),
                     duration_text(measurement.worst()), std::to_string(measurement.seconds.size()),
                     number_text(rate / 1e12, 4), number_text(100 * rate / peak.flop_per_s) + " %"});
    report[measurement.pass] = {{"ms",
                                 {{"median", measurement.median() * 1e3},
                                  {"best", measurement.best() * 1e3},
                                  {"worst", measurement.worst() * 1e3}}},
                                {"rounds", measurement.seconds.size()},
                                {"flop", measurement.flop},
                                {"flop_per_s", rate},
                                {"peak_flop_per_s", peak.flop_per_s},
                                {"peak_fraction", rate / peak.flop_per_s}};
  }
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(gpu, problem, gpu_work.kernel()) << gpu_work.attention().explain() << table_text(table);
  out << "peak     " << number_text(peak.flop_per_s / 1e12, 4) << " TFLOP/s, " << peak.instruction
      << ", measured between the rounds\n";
  out << gpu_work.memory_line();
  write_report(options.report, report);
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

bool has_nccl() {
  try {
    const Gpu gpu({});
    return gpu.backend().nccl_links(gpu.index()).trouble.empty();
  } catch (const DeviceError&) {
    return false;
  }
}

}  // namespace annulus::cli
