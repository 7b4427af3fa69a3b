#include "kernels/cuda/forward.h"

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <climits>
#include <sstream>

#include "kernels/cuda/check.h"
#include "kernels/cuda/forward_kernels.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/schedule.h"
#include "kernels/softmax_state.h"
#include "kernels/workspace.h"
#include "plan/phase.h"

namespace annulus::cuda {
namespace {

class Range {  // in the profiler's time line
 public:
  explicit Range(const char* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

// A tiled kernel with its schedule on the device.
struct Tiled {
  std::string name;
  int blocks;  // that the device holds at a time
  Schedule schedule;
  DeviceBuffer stretches, classes, anchors;

  Tiled(std::string name_, int blocks_, Schedule schedule_)
      : name(std::move(name_)),
        blocks(blocks_),
        schedule(std::move(schedule_)),
        stretches(to_device(schedule.stretches)),
        classes(to_device(schedule.classes)),
        anchors(to_device(schedule.anchors)) {
    schedule.tiling.classes = reinterpret_cast<const std::int32_t*>(classes.data());
    schedule.tiling.anchors = reinterpret_cast<const std::int32_t*>(anchors.data());
  }
};

// The workspace: what is zeroed before a launch lies together in front.
struct Memory {
  Control* control = nullptr;
  unsigned* sets = nullptr;
  float2* state_sums = nullptr;
  std::int64_t zeroed_bytes = 0;
  float* state_values = nullptr;

  Memory(Carver& carver, const Schedule& schedule, std::int64_t head_dim) {
    control = carver.take<Control>("control", 1);
    sets = carver.take<unsigned>("control", schedule.set_count);
    state_sums = carver.take<float2>("state", schedule.state_rows);
    zeroed_bytes = carver.used_bytes();
    state_values = carver.take<float>("state", schedule.state_rows * head_dim);
  }
};

std::string list_of_kernels() {
  std::string text;
  for (const KernelChoice& kernel : kKernels) text += std::string(text.empty() ? "" : ", ") + kernel.name;
  return text;
}

}  // namespace

DeviceInfo device_info() {
  int device = 0;
  check(cudaGetDevice(&device), "find a CUDA device");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "ask the device for its properties");
  DeviceInfo info;
  info.name = properties.name;
  for (const char byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    info.id += kDigits[static_cast<unsigned char>(byte) / 16];
    info.id += kDigits[static_cast<unsigned char>(byte) % 16];
  }
  info.compute_capability = 10 * properties.major + properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "ask the device for its memory");
  info.memory_bytes = static_cast<std::int64_t>(total);
  info.free_bytes = static_cast<std::int64_t>(free);
  check(cudaDriverGetVersion(&info.driver_version), "ask for the driver's version");
  return info;
}

struct Forward::Impl {
  Problem problem;
  DeviceInfo device;
  std::vector<Tiled> tiled;  // best first; the row kernel takes what they do not
  DeviceBuffer documents, segments, dilations, classes;
  int document_count = 0;

  Impl(const Problem& given, const Plan& plan, const ForwardOptions& options) : problem(given), device(device_info()) {
    check_options(options);
    const auto wanted = [&](const char* kernel) { return options.kernel == "auto" || options.kernel == kernel; };
    if (wanted("sm90") && sm90::takes(problem, device))
      add("sm90", sm90::prepare(problem), sm90::tile_shape(problem), sm90::arrivals(problem), plan, options);
    if (wanted("mma") && mma::takes(problem, device))
      add("mma", mma::prepare(problem, device), mma::tile_shape(problem, device), 1, plan, options);
    if (options.kernel != "auto" && options.kernel != "rows" && tiled.empty())
      throw Unsupported("the kernel `" + options.kernel + "` must fit the problem and the device; got head size " +
                        std::to_string(problem.head_dim) + ", " + std::string(name(problem.dtype)) + ", sm_" +
                        std::to_string(device.compute_capability) + ": leave the choice to auto");
    rows::prepare(problem.dtype);
    put_rows(plan);
  }

  void check_options(const ForwardOptions& options) const {
    const bool known = options.kernel == "auto" || std::ranges::any_of(kKernels, [&](const KernelChoice& kernel) {
                         return options.kernel == kernel.name;
                       });
    if (!known)
      throw InvalidArgument("a CUDA kernel is one of " + list_of_kernels() + "; got '" + options.kernel +
                            "': choose one of them, or auto");
    if (problem.head_dim > kMaxHeadDim)
      throw Unsupported("the GPU does head sizes from 1 to " + std::to_string(kMaxHeadDim) + "; got " +
                        std::to_string(problem.head_dim) + ": split the heads");
    if (problem.heads > INT_MAX)
      throw Unsupported("the GPU does up to 2^31 - 1 heads; got " + std::to_string(problem.heads) +
                        ": split the batch of heads");
  }

  void add(const char* kernel, int blocks, TileShape shape, int arrivals, const Plan& plan,
           const ForwardOptions& options) {
    ScheduleRules rules;
    rules.shape = shape;
    rules.arrivals = arrivals;
    rules.forced_sweeps = options.sweeps;
    rules.folds = kernel == std::string_view("sm90");
    tiled.emplace_back(kernel, blocks * device.multiprocessors, make_schedule(problem, plan, rules));
  }

  // Tables of the row kernel, which has the problem's own numbers.
  void put_rows(const Plan& plan) {
    std::vector<std::int64_t> bounds, w, r, taken;
    for (const Span& span : plan.spans) bounds.push_back(span.begin);
    bounds.push_back(problem.tokens);
    document_count = static_cast<int>(plan.spans.size());
    for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
      w.push_back(problem.pattern.branches[b].segment);
      r.push_back(problem.pattern.branches[b].dilation);
      for (std::int64_t head = 0; head < problem.heads; ++head) {
        const Classes classes_of_head = classes_of(problem, static_cast<int>(b), head);
        const bool every = problem.pattern.phase == Phase::every;
        taken.push_back(classes_of_head.count == 0 ? kNoClass : every ? kEveryClass : classes_of_head.first);
      }
    }
    documents = to_device(bounds);
    segments = to_device(w);
    dilations = to_device(r);
    classes = to_device(taken);
  }

  Launch common_launch(const ForwardArgs& args) const {
    Launch launch;
    launch.q = args.q.data;
    launch.k = args.k.data;
    launch.v = args.v.data;
    launch.out = args.out.data;
    launch.lse = args.lse.empty() ? nullptr : args.lse.data();
    launch.q_stride = strides_of(args.q);
    launch.k_stride = strides_of(args.k);
    launch.v_stride = strides_of(args.v);
    launch.out_stride = strides_of(args.out);
    launch.tokens = problem.tokens;
    launch.heads = static_cast<int>(problem.heads);
    launch.sharers = static_cast<int>(problem.heads / problem.kv_heads);
    launch.head_dim = static_cast<int>(problem.head_dim);
    launch.scale_log2 = scale_log2(problem);
    launch.output_scale = static_cast<float>(problem.pattern.output_scale);
    return launch;
  }

  LaunchShape launch_shape() const {
    LaunchShape shape;
    shape.dtype = problem.dtype;
    shape.batch = problem.batch;
    shape.kv_heads = problem.kv_heads;
    return shape;
  }

  void run_rows(const Launch& launch, bool only_non_finite, cudaStream_t stream) const {
    RowLaunch row_launch;
    row_launch.common = launch;
    row_launch.documents = reinterpret_cast<const std::int64_t*>(documents.data());
    row_launch.document_count = document_count;
    row_launch.batch = problem.batch;
    row_launch.only_non_finite = only_non_finite;
    row_launch.branch_count = static_cast<int>(problem.pattern.branches.size());
    row_launch.segments = reinterpret_cast<const std::int64_t*>(segments.data());
    row_launch.dilations = reinterpret_cast<const std::int64_t*>(dilations.data());
    row_launch.classes = reinterpret_cast<const std::int64_t*>(classes.data());
    row_launch.causal = problem.causal;
    row_launch.padded = problem.pattern.pad_like_torchscale && !problem.causal;
    rows::launch(row_launch, problem.dtype, device.multiprocessors, stream);
  }

  void run(const ForwardArgs& args, cudaStream_t stream) const {
    if (problem.batch == 0 || problem.tokens == 0) return;
    const Range range("annulus forward");
    Launch launch = common_launch(args);
    LaunchShape shape = launch_shape();
    for (const Tiled& choice : tiled) {
      const bool hopper = choice.name == "sm90";
      if (hopper && !sm90::can_address(launch, shape)) continue;
      Carver carver(args.workspace.data());
      const Memory memory(carver, choice.schedule, problem.head_dim);
      if (args.workspace.size() < static_cast<std::size_t>(carver.used_bytes()))
        throw InvalidArgument("workspace must have " + std::to_string(carver.used_bytes()) + " bytes; got " +
                              std::to_string(args.workspace.size()) + ": ask Forward::workspace for its size");
      launch.tiling = choice.schedule.tiling;
      launch.stretches = reinterpret_cast<const Stretch*>(choice.stretches.data());
      launch.stretch_count = static_cast<int>(choice.schedule.stretches.size());
      launch.tile_count = choice.schedule.tile_count;
      launch.control = memory.control;
      launch.sets = memory.sets;
      launch.state_sums = memory.state_sums;
      launch.state_values = memory.state_values;
      shape.sweeps = choice.schedule.sweep_count;
      shape.blocks = choice.blocks;
      check(cudaMemsetAsync(memory.control, 0, static_cast<std::size_t>(memory.zeroed_bytes), stream),
            "clear the counters");
      hopper ? sm90::launch(launch, shape, stream) : mma::launch(launch, shape, stream);
      return run_rows(launch, true, stream);
    }
    run_rows(launch, false, stream);
  }
};

Forward::Forward(const Problem& problem, const Plan& plan, const ForwardOptions& options)
    : impl_(std::make_unique<Impl>(problem, plan, options)) {}
Forward::~Forward() = default;
Forward::Forward(Forward&&) noexcept = default;
Forward& Forward::operator=(Forward&&) noexcept = default;

void Forward::run(const ForwardArgs& args, StreamHandle stream) const { impl_->run(args, stream); }

std::vector<MemoryComponent> Forward::workspace() const {
  std::vector<MemoryComponent> largest;  // of the kernels that may run
  for (const Tiled& choice : impl_->tiled) {
    Carver carver;
    Memory(carver, choice.schedule, impl_->problem.head_dim);
    if (total_bytes(carver.components()) > total_bytes(largest)) largest = carver.components();
  }
  return largest;
}

std::string Forward::kernel() const { return impl_->tiled.empty() ? "rows" : impl_->tiled.front().name; }

std::string Forward::explain() const {
  std::ostringstream text;
  text << "kernel " << kernel();
  if (impl_->tiled.empty()) return text.str() + "\n";
  const Schedule& schedule = impl_->tiled.front().schedule;
  text << ", " << schedule.tile_count << " tiles of " << schedule.tiling.shape.query_rows << " queries, "
       << schedule.tiling.shape.key_rows << " keys a block\n";
  for (int i = 0; i < schedule.sweep_count; ++i) {
    const Sweep& sweep = schedule.tiling.sweeps[i];
    text << "sweep " << i << ": branches";
    for (int b = 0; b < sweep.branch_count; ++b)
      text << " " << schedule.branch_order[static_cast<std::size_t>(sweep.first_branch + b)];
    text << ", queries at stride " << sweep.stride << " in cells of " << sweep.cell
         << (sweep.continues ? ", continues" : "") << (sweep.is_last ? ", writes results" : ", hands state on") << "\n";
  }
  return text.str();
}

}  // namespace annulus::cuda
