#include "kernels/cuda/fused_part.h"

#include <algorithm>

#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/key_schedule.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/sum_plan.h"

namespace annulus::cuda {
namespace {

const void* row_of(const ConstTensorView& view, std::int64_t row) {
  return static_cast<const std::byte*>(view.data) + row * view.stride[1] * size_of(view.dtype);
}

// A schedule with its tables on the device.
struct Tables {
  Schedule schedule;
  int blocks = 0;  // that the device holds at a time
  DeviceBuffer stretches, classes, anchors;

  Tables(Schedule given, int blocks_)
      : schedule(std::move(given)),
        blocks(blocks_),
        stretches(to_device(schedule.stretches)),
        classes(to_device(schedule.classes)),
        anchors(to_device(schedule.anchors)) {
    schedule.tiling.classes = reinterpret_cast<const std::int32_t*>(classes.data());
    schedule.tiling.anchors = reinterpret_cast<const std::int32_t*>(anchors.data());
  }

  void fill(Launch& launch) const {
    launch.tiling = schedule.tiling;
    launch.stretches = reinterpret_cast<const Stretch*>(stretches.data());
    launch.stretch_count = static_cast<int>(schedule.stretches.size());
    launch.tile_count = schedule.tile_count;
  }
};

void clear_counters(const FusedPart::Memory& memory, cudaStream_t stream) {
  check(cudaMemsetAsync(memory.control, 0, static_cast<std::size_t>(memory.counter_bytes), stream),
        "clear the counters");
}

}  // namespace

struct FusedPart::Impl {
  LocalPart part;
  std::int64_t rows;
  std::optional<Tables> queries, keys;

  Impl(const LocalPart& given, std::int64_t rows_, const DeviceInfo& device, bool with_backward)
      : part(given), rows(rows_) {
    ScheduleRules rules;
    rules.kept_rows = rows;
    rules.kept_first = part.first_row;
    rules.shape = sm90::tile_shape(part.problem);
    rules.arrivals = sm90::arrivals(part.problem);
    rules.folds = true;
    queries.emplace(make_schedule(part.problem, part.plan, rules),
                    sm90::prepare(part.problem) * device.multiprocessors);
    if (!with_backward || !sm90::takes_gradient(part.problem, device) || !has_sum_layout(part.problem)) return;
    rules.shape = sm90::gradient_tile_shape(part.problem);
    rules.arrivals = sm90::gradient_arrivals();
    rules.folds = part.problem.pattern.gradient == Gradient::exact;  // eq. 8 has a Delta for each branch
    keys.emplace(make_key_schedule(part.problem, part.plan, rules),
                 sm90::prepare_gradient(part.problem) * device.multiprocessors);
  }

  const Problem& problem() const { return part.problem; }
  bool has_all_rows() const { return problem().tokens == rows; }
  std::int64_t numbers() const { return problem().batch * problem().heads * problem().tokens; }
  std::int64_t delta_count() const {
    return problem().pattern.gradient == Gradient::detached ? static_cast<std::int64_t>(part.branches.size()) : 1;
  }

  std::int64_t sum_floats() const {
    return problem().batch * problem().heads * sum_layout(problem()).rows * problem().head_dim;
  }

  Launch common_launch(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v) const {
    Launch launch;
    launch.q = row_of(q, part.first_row);
    launch.k = row_of(k, part.first_row);
    launch.v = row_of(v, part.first_row);
    launch.q_stride = strides_of(q);
    launch.k_stride = strides_of(k);
    launch.v_stride = strides_of(v);
    launch.out = const_cast<void*>(launch.q);  // nothing is written there
    launch.out_stride = launch.q_stride;
    launch.tokens = problem().tokens;
    launch.heads = static_cast<int>(problem().heads);
    launch.sharers = static_cast<int>(problem().heads / problem().kv_heads);
    launch.head_dim = static_cast<int>(problem().head_dim);
    launch.scale_log2 = scale_log2(problem());
    return launch;
  }
  LaunchShape launch_shape(const Tables& tables) const {
    LaunchShape shape;
    shape.dtype = problem().dtype;
    shape.batch = problem().batch;
    shape.kv_heads = problem().kv_heads;
    shape.sweeps = tables.schedule.sweep_count;
    shape.blocks = tables.blocks;
    return shape;
  }

  // The part's rows of [batch, heads, rows].
  const float* own_numbers(const float* data, float* copy, cudaStream_t stream) const {
    if (has_all_rows()) return data;
    const std::int64_t batch = problem().batch, heads = problem().heads, tokens = problem().tokens;
    ops::copy({data + part.first_row, DType::fp32, {batch, heads, 1, tokens}, {heads * rows, rows, tokens, 1}},
              {copy, DType::fp32, {batch, heads, 1, tokens}}, stream);
    return copy;
  }
};

FusedPart::FusedPart(const LocalPart& part, std::int64_t rows, const DeviceInfo& device, bool with_backward)
    : impl_(std::make_unique<Impl>(part, rows, device, with_backward)) {}
FusedPart::~FusedPart() = default;

bool FusedPart::has_backward() const { return impl_->keys.has_value(); }
float FusedPart::log2_scale() const { return scale_log2(impl_->problem()); }

FusedPart::Memory FusedPart::carve(Pass pass, Carver& carver) const {
  const Impl& own = *impl_;
  Memory memory;
  if (pass == Pass::backward && !has_backward()) return memory;
  const std::int64_t before = carver.used_bytes();
  memory.control = carver.take<Control>("control", 1);
  memory.sets = carver.take<unsigned>("control", (pass == Pass::forward ? own.queries : own.keys)->schedule.set_count);
  memory.counter_bytes = carver.used_bytes() - before;
  if (pass == Pass::forward) return memory;
  memory.seen = carver.take<float2>("control", own.problem().batch * own.problem().kv_heads * own.rows);
  memory.dq_sums = carver.take<float>("dq sums", own.sum_floats());
  if (const std::int64_t copied = copied_numbers(own.problem()); copied > 0) {
    memory.lse_copy = carver.take<float>("delta", copied);
    memory.delta_copy = carver.take<float>("delta", copied);
  }
  if (own.has_all_rows()) return memory;
  memory.lse = carver.take<float>("delta", own.numbers());
  memory.delta = carver.take<float>("delta", own.numbers() * own.delta_count());
  return memory;
}

bool FusedPart::forward(const ForwardArgs& args, const ops::States& states, const Memory& memory,
                        cudaStream_t stream) const {
  const Impl& own = *impl_;
  Launch launch = own.common_launch(args.q, args.k, args.v);
  const LaunchShape shape = own.launch_shape(*own.queries);
  if (!sm90::can_address(launch, shape)) return false;
  own.queries->fill(launch);
  launch.control = memory.control;
  launch.sets = memory.sets;
  launch.state_sums = states.sums;
  launch.state_values = states.values;
  clear_counters(memory, stream);
  sm90::launch(launch, shape, stream);
  return true;
}

bool FusedPart::backward(const BackwardArgs& args, const Gradients& gradients, const Memory& memory,
                         cudaStream_t stream) const {
  const Impl& own = *impl_;
  const Problem& problem = own.problem();
  const auto& [dq, dk, dv] = gradients.sums;
  const std::int64_t width = 2 * problem.head_dim;
  const bool lie_together = static_cast<float*>(dv.data) == static_cast<float*>(dk.data) + problem.head_dim &&
                            dk.stride[1] == width && dk.stride == dv.stride &&
                            (problem.kv_heads == 1 || dk.stride[2] == own.rows * width) &&
                            (problem.batch == 1 || dk.stride[0] == problem.kv_heads * own.rows * width);
  GradientLaunch g;
  Launch& launch = g.common;
  launch = own.common_launch(args.q, args.k, args.v);
  g.dout = row_of(args.dout, own.part.first_row);
  g.dout_stride = strides_of(args.dout);
  g.dq = const_cast<void*>(launch.q);  // nothing is written there, nor to the next two
  g.dk = const_cast<void*>(launch.k);
  g.dv = const_cast<void*>(launch.v);
  g.dq_stride = launch.q_stride;
  g.dk_stride = launch.k_stride;
  g.dv_stride = launch.v_stride;
  g.causal = problem.causal;
  const LaunchShape shape = own.launch_shape(*own.keys);
  if (!lie_together || !sm90::can_address(g, shape)) return false;
  own.keys->fill(launch);
  g.lse = own.own_numbers(args.lse.data(), memory.lse, stream);
  // Delta of one for all branches, or of each of the part's.
  if (own.delta_count() == 1 && gradients.delta_stride == 0) {
    g.delta = const_cast<float*>(own.own_numbers(gradients.delta, memory.delta, stream));
  } else {
    g.delta = own.has_all_rows() ? const_cast<float*>(gradients.delta) : memory.delta;
    for (std::size_t i = 0; i < own.part.branches.size(); ++i)
      own.own_numbers(gradients.delta + own.part.branches[i] * gradients.delta_stride,
                      memory.delta + static_cast<std::int64_t>(i) * own.numbers(), stream);
    for (std::size_t i = 0; i < own.keys->schedule.branch_order.size(); ++i) {
      const int branch = own.keys->schedule.branch_order[i];
      g.delta_offset[i] = own.has_all_rows()
                              ? own.part.branches[static_cast<std::size_t>(branch)] * gradients.delta_stride
                              : branch * own.numbers();
    }
  }
  g.dq_sums = memory.dq_sums;
  g.sums = g.numbers = sum_layout(problem);
  if (g.sums.stride > 1) {  // then the part has one branch, and one Delta
    const std::int64_t heads = problem.batch * problem.heads;
    ops::reorder(g.lse, heads, problem.tokens, g.sums, memory.lse_copy, stream);
    ops::reorder(g.delta + g.delta_offset[0], heads, problem.tokens, g.sums, memory.delta_copy, stream);
    g.delta_offset[0] = 0;
  }
  place_numbers(g, memory.lse_copy, memory.delta_copy);
  launch.control = memory.control;
  launch.sets = own.keys->schedule.set_count > 0 ? memory.sets : nullptr;
  launch.state_sums = memory.seen;
  launch.state_values = static_cast<float*>(dk.data);
  clear_counters(memory, stream);
  const std::int64_t seen = problem.batch * problem.kv_heads * own.rows;
  check(cudaMemsetAsync(memory.seen, 0, static_cast<std::size_t>(seen) * sizeof(float2), stream), "clear the flags");
  check(cudaMemsetAsync(memory.dq_sums, 0, static_cast<std::size_t>(own.sum_floats()) * sizeof(float), stream),
        "clear the sums of dq");
  sm90::launch_gradient(g, shape, stream);
  TensorView to = dq;
  to.data = const_cast<void*>(row_of(dq, own.part.first_row));
  to.shape[1] = problem.tokens;
  ops::add_sums(memory.dq_sums, g.sums, to, stream);
  return true;
}

}  // namespace annulus::cuda
