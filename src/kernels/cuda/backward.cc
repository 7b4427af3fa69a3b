#include "kernels/cuda/backward.h"

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <climits>
#include <sstream>

#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/key_schedule.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/sum_plan.h"
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

// A launch over the tiles of one schedule, with its tables on the device.
struct Pass {
  mma::Part part;
  int branch = 0;  // of the problem, where a pass has one alone
  int sums = 0;    // that a row of state has, head_dim numbers each
  int blocks = 0;  // that the device holds at a time
  Schedule schedule;
  DeviceBuffer stretches, classes, anchors;
  SumPlan dq_sums;  // where it adds to dq
  DeviceBuffer region_table, region_order;

  Pass(mma::Part part_, int branch_, int sums_, int blocks_, Schedule schedule_)
      : part(part_),
        branch(branch_),
        sums(sums_),
        blocks(blocks_),
        schedule(std::move(schedule_)),
        stretches(to_device(schedule.stretches)),
        classes(to_device(schedule.classes)),
        anchors(to_device(schedule.anchors)) {
    schedule.tiling.classes = reinterpret_cast<const std::int32_t*>(classes.data());
    schedule.tiling.anchors = reinterpret_cast<const std::int32_t*>(anchors.data());
  }

  void add_to(SumPlan sums_of_dq) {
    dq_sums = std::move(sums_of_dq);
    region_table = to_device(dq_sums.table.regions);
    region_order = to_device(dq_sums.table.order);
    dq_sums.regions.table = reinterpret_cast<const Region*>(region_table.data());
    dq_sums.regions.order = reinterpret_cast<const int*>(region_order.data());
  }
};

// What one kernel does, in order.
struct Tiled {
  std::string name;
  bool adds_dq;              // into sums in fp32
  bool in_order;             // tile after tile; else as tiles come by
  std::vector<Pass> deltas;  // eq. 8: one a branch
  std::vector<Pass> passes;
};

std::string list_of_kernels() {
  std::string text;
  for (const KernelChoice& kernel : kBackwardKernels) text += std::string(text.empty() ? "" : ", ") + kernel.name;
  return text;
}

}  // namespace

struct Backward::Impl {
  Problem problem;
  DeviceInfo device;
  std::vector<Tiled> tiled;  // best first; the row kernel takes what they do not
  DeviceBuffer documents, segments, dilations, classes;
  int document_count = 0;

  Impl(const Problem& given, const Plan& plan, const BackwardOptions& options) : problem(given), device(device_info()) {
    check_options(options);
    const auto wanted = [&](const char* kernel) { return options.kernel == "auto" || options.kernel == kernel; };
    if (wanted("sm90") && sm90::takes_gradient(problem, device) && has_sum_layout(problem)) add_sm90(plan, options);
    if (wanted("mma") && mma::takes_gradient(problem, device)) add_mma(plan, options);
    if (options.kernel != "auto" && options.kernel != "rows" && tiled.empty())
      throw Unsupported("the kernel `" + options.kernel + "` must fit the problem and the device; got head size " +
                        std::to_string(problem.head_dim) + ", " + std::string(name(problem.dtype)) + ", sm_" +
                        std::to_string(device.compute_capability) + (options.deterministic ? ", deterministic" : "") +
                        ": leave the choice to auto");
    rows::prepare_gradient(problem.dtype);
    put_rows(plan);
  }

  void check_options(const BackwardOptions& options) const {
    const bool known = options.kernel == "auto" ||
                       std::ranges::any_of(kBackwardKernels,
                                           [&](const KernelChoice& kernel) { return options.kernel == kernel.name; });
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

  // ---- Planning

  bool detached() const { return has_branch_deltas(problem); }
  bool folds() const { return !detached(); }  // eq. 8 has a Delta for each branch
  std::int64_t delta_count() const {
    return detached() ? static_cast<std::int64_t>(problem.pattern.branches.size()) : 1;
  }
  std::int64_t rows() const { return problem.batch * problem.heads * problem.tokens; }

  ScheduleRules rules_for(TileShape shape, int arrivals, int sums, const BackwardOptions& options) const {
    ScheduleRules rules;
    rules.shape = shape;
    rules.arrivals = arrivals;
    // What the rows need anyway comes off, so that sums of dq and 256 MiB are all, as far as a quarter is left for
    // state.
    const std::int64_t numbers = rows() * delta_count() + 2 * copied_numbers(problem);
    rules.state_bytes = std::max(rules.state_bytes / 4, rules.state_bytes - 4 * numbers) / sums;
    rules.forced_sweeps = options.sweeps;
    return rules;
  }

  // Delta of each branch alone.
  std::vector<Pass> delta_passes() const {
    std::vector<Pass> passes;
    if (!detached()) return passes;
    const int blocks = mma::prepare_gradient(problem, mma::Part::deltas) * device.multiprocessors;
    for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
      Problem alone = problem;
      alone.pattern.branches = {problem.pattern.branches[b]};
      ScheduleRules rules;
      rules.shape = mma::gradient_tile_shape(problem);
      passes.emplace_back(mma::Part::deltas, static_cast<int>(b), 0, blocks,
                          make_schedule(alone, make_plan(alone), rules));
    }
    return passes;
  }

  // Tiles can take turns where all of a group meet the same blocks of queries: there is one branch. And where some head
  // takes every class of keys: the warp that takes turns would else be busy with zeros in rows that no branch covers.
  bool can_take_turns() const {
    return problem.pattern.branches.size() == 1 &&
           (problem.pattern.phase == Phase::every || sum_layout(problem).stride == 1 ||
            problem.heads != problem.kv_heads);
  }

  void add_sm90(const Plan& plan, const BackwardOptions& options) {
    const bool in_order = options.deterministic && can_take_turns();
    Tiled choice{"sm90", !options.deterministic || in_order, in_order, delta_passes(), {}};
    if (!choice.adds_dq) {
      ScheduleRules rules = rules_for(sm90::dq_tile_shape(problem), sm90::gradient_arrivals(), 1, options);
      rules.folds = folds();
      choice.passes.emplace_back(mma::Part::dq, 0, 1, sm90::prepare_dq(problem) * device.multiprocessors,
                                 make_schedule(problem, plan, rules));
    }
    ScheduleRules rules = rules_for(sm90::gradient_tile_shape(problem), sm90::gradient_arrivals(), 2, options);
    rules.folds = folds();
    rules.in_order = in_order;
    choice.passes.emplace_back(mma::Part::dk_dv, 0, 2, sm90::prepare_gradient(problem) * device.multiprocessors,
                               make_key_schedule(problem, plan, rules));
    Pass& last = choice.passes.back();
    if (choice.adds_dq)
      last.add_to(plan_sums(
          problem, plan, last.schedule,
          {.deterministic = options.deterministic, .blocks = last.blocks, .tiles_ahead = options.tiles_ahead}));
    tiled.push_back(std::move(choice));
  }

  void add_mma(const Plan& plan, const BackwardOptions& options) {
    Tiled choice{"mma", false, false, delta_passes(), {}};
    const auto add = [&](mma::Part part, int sums) {
      const ScheduleRules rules = rules_for(mma::gradient_tile_shape(problem), 1, sums, options);
      choice.passes.emplace_back(
          part, 0, sums, mma::prepare_gradient(problem, part) * device.multiprocessors,
          part == mma::Part::dq ? make_schedule(problem, plan, rules) : make_key_schedule(problem, plan, rules));
    };
    add(mma::Part::dq, 1);
    if (mma::has_room_for_both(problem)) {
      add(mma::Part::dk_dv, 2);
    } else {
      add(mma::Part::dk, 1);
      add(mma::Part::dv, 1);
    }
    tiled.push_back(std::move(choice));
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

  // ---- The workspace

  struct Memory {
    Control* control = nullptr;
    float* delta = nullptr;
    float* dq_sums = nullptr;
    unsigned* tiles_added = nullptr;
    float* lse_copy = nullptr;  // where the order of the sums is not that of the positions
    float* delta_copy = nullptr;
    unsigned* ended = nullptr;     // of the regions
    unsigned* rounded = nullptr;   // where they share slots
    std::byte* scratch = nullptr;  // of one pass after the other
  };
  // Sets and flags of state lie together in front: they are zeroed before a pass.
  struct Scratch {
    unsigned* sets = nullptr;
    float2* state_sums = nullptr;
    std::int64_t zeroed_bytes = 0;
    float* state_values = nullptr;
    std::int64_t bytes = 0;

    Scratch(std::byte* memory, const Pass& pass, std::int64_t head_dim) {
      Carver carver(memory);
      sets = carver.take<unsigned>("state", pass.schedule.set_count);
      state_sums = carver.take<float2>("state", pass.schedule.state_rows);
      zeroed_bytes = carver.used_bytes();
      state_values = carver.take<float>("state", pass.schedule.state_rows * head_dim * pass.sums);
      bytes = carver.used_bytes();
    }
  };

  Memory carve(Carver& carver, const Tiled* choice) const {
    Memory memory;
    memory.control = carver.take<Control>("control", 1);
    memory.delta = carver.take<float>("delta", rows() * delta_count());
    if (choice == nullptr) return memory;
    if (choice->adds_dq) {
      memory.lse_copy = carver.take<float>("delta", copied_numbers(problem));
      memory.delta_copy = carver.take<float>("delta", copied_numbers(problem));
      const SumPlan& sums = choice->passes.back().dq_sums;
      memory.dq_sums = carver.take<float>("dq sums", sums.rows * problem.head_dim);
      if (choice->in_order) memory.tiles_added = carver.take<unsigned>("dq sums", sums.rows);
      memory.ended = carver.take<unsigned>("control", sums.regions.count);
      if (sums.table.shares()) memory.rounded = carver.take<unsigned>("control", sums.regions.count);
    }
    std::int64_t most = 0;
    for (const std::vector<Pass>* passes : {&choice->deltas, &choice->passes})
      for (const Pass& pass : *passes) most = std::max(most, Scratch(nullptr, pass, problem.head_dim).bytes);
    memory.scratch = carver.take<std::byte>("state", most);
    return memory;
  }

  // ---- Running

  GradientLaunch common_launch(const BackwardArgs& args) const {
    GradientLaunch g;
    Launch& launch = g.common;
    launch.q = args.q.data;
    launch.k = args.k.data;
    launch.v = args.v.data;
    launch.q_stride = strides_of(args.q);
    launch.k_stride = strides_of(args.k);
    launch.v_stride = strides_of(args.v);
    launch.tokens = problem.tokens;
    launch.heads = static_cast<int>(problem.heads);
    launch.sharers = static_cast<int>(problem.heads / problem.kv_heads);
    launch.head_dim = static_cast<int>(problem.head_dim);
    launch.scale_log2 = scale_log2(problem);
    g.dout = args.dout.data;
    g.dq = args.dq.data;
    g.dk = args.dk.data;
    g.dv = args.dv.data;
    g.dout_stride = strides_of(args.dout);
    g.dq_stride = strides_of(args.dq);
    g.dk_stride = strides_of(args.dk);
    g.dv_stride = strides_of(args.dv);
    g.forward_out = args.out.data;
    g.forward_out_stride = strides_of(args.out);
    const double scale = problem.pattern.output_scale;
    g.out_factor = scale == 0 ? 0.0f : static_cast<float>(1 / scale);
    g.lse = args.lse.data();
    g.factor = static_cast<float>(*problem.scale * problem.pattern.output_scale);
    g.value_factor = static_cast<float>(problem.pattern.output_scale);
    g.causal = problem.causal;
    return g;
  }

  LaunchShape launch_shape() const {
    LaunchShape shape;
    shape.dtype = problem.dtype;
    shape.batch = problem.batch;
    shape.kv_heads = problem.kv_heads;
    return shape;
  }

  void run_rows(const GradientLaunch& g, rows::GradientRows what, bool only_non_finite, bool overlaps,
                cudaStream_t stream) const {
    GradientRowLaunch launch;
    launch.gradient = g;
    launch.rows.documents = reinterpret_cast<const std::int64_t*>(documents.data());
    launch.rows.document_count = document_count;
    launch.rows.batch = problem.batch;
    launch.rows.only_non_finite = only_non_finite;
    launch.rows.branch_count = static_cast<int>(problem.pattern.branches.size());
    launch.rows.segments = reinterpret_cast<const std::int64_t*>(segments.data());
    launch.rows.dilations = reinterpret_cast<const std::int64_t*>(dilations.data());
    launch.rows.classes = reinterpret_cast<const std::int64_t*>(classes.data());
    launch.rows.causal = problem.causal;
    launch.rows.padded = problem.pattern.pad_like_torchscale && !problem.causal;
    launch.delta_stride = detached() ? rows() : 0;
    LaunchShape shape = launch_shape();
    shape.overlaps = overlaps;
    rows::launch_gradient(launch, what, shape, device.multiprocessors, stream);
  }

  void run_pass(const Tiled& choice, const Pass& pass, GradientLaunch g, const Memory& memory, bool is_counter_clear,
                cudaStream_t stream) const {
    const Scratch scratch(memory.scratch, pass, problem.head_dim);
    Launch& launch = g.common;
    launch.tiling = pass.schedule.tiling;
    launch.stretches = reinterpret_cast<const Stretch*>(pass.stretches.data());
    launch.stretch_count = static_cast<int>(pass.schedule.stretches.size());
    launch.tile_count = pass.schedule.tile_count;
    launch.sets = pass.schedule.set_count > 0 ? scratch.sets : nullptr;
    launch.state_sums = scratch.state_sums;
    launch.state_values = scratch.state_values;
    for (std::size_t i = 0; i < pass.schedule.branch_order.size() && detached(); ++i)
      g.delta_offset[i] = (pass.part == mma::Part::deltas ? pass.branch : pass.schedule.branch_order[i]) * rows();
    LaunchShape shape = launch_shape();
    shape.sweeps = pass.schedule.sweep_count;
    shape.blocks = pass.blocks;
    if (!is_counter_clear)
      check(cudaMemsetAsync(&memory.control->next_tile, 0, sizeof(memory.control->next_tile), stream),
            "clear the counter of tiles");
    if (scratch.zeroed_bytes > 0)
      check(cudaMemsetAsync(memory.scratch, 0, static_cast<std::size_t>(scratch.zeroed_bytes), stream),
            "clear the state");
    // Behind delta.cu, with nothing between.
    shape.overlaps =
        choice.name == "sm90" && pass.part == mma::Part::dk_dv && is_counter_clear && scratch.zeroed_bytes == 0;
    if (choice.name != "sm90" || pass.part == mma::Part::deltas)
      mma::launch_gradient(g, shape, pass.part, stream);
    else if (pass.part == mma::Part::dq)
      sm90::launch_dq(g, shape, stream);
    else
      sm90::launch_gradient(g, shape, stream);
  }

  // Eq. 7 or 8. Where dq is added up, its sums begin at 0; so do the counters.
  void make_delta(const Tiled* choice, const GradientLaunch& g, const Memory& memory, cudaStream_t stream) const {
    if (!detached()) return delta::launch(g, problem.dtype, stream);
    check(cudaMemsetAsync(memory.control, 0, sizeof(Control), stream), "clear the counters");
    if (choice == nullptr) return run_rows(g, rows::GradientRows::deltas, false, false, stream);
    if (g.dq_sums != nullptr)
      check(
          cudaMemsetAsync(
              g.dq_sums, 0,
              static_cast<std::size_t>(choice->passes.back().dq_sums.rows * problem.head_dim) * sizeof(float), stream),
          "clear the sums of dq");
    for (unsigned* counters : {g.regions.ended, g.regions.rounded})
      if (counters != nullptr)
        check(cudaMemsetAsync(counters, 0, static_cast<std::size_t>(g.regions.count) * sizeof(unsigned), stream),
              "clear the counters of regions");
    for (const Pass& pass : choice->deltas) run_pass(*choice, pass, g, memory, false, stream);
    run_rows(g, rows::GradientRows::deltas, true, false, stream);
  }

  // The first kernel that can follow these addresses and strides, or null: row by row.
  const Tiled* choose(const GradientLaunch& g) const {
    for (const Tiled& choice : tiled)
      if (choice.name != "sm90" || sm90::can_address(g, launch_shape())) return &choice;
    return nullptr;
  }

  void run(const BackwardArgs& args, cudaStream_t stream) const {
    if (problem.batch == 0 || problem.tokens == 0) return;
    const Range range("annulus backward");
    GradientLaunch g = common_launch(args);
    const Tiled* choice = choose(g);
    Carver carver(args.workspace.data());
    const Memory memory = carve(carver, choice);
    if (args.workspace.size() < static_cast<std::size_t>(carver.used_bytes()))
      throw InvalidArgument("workspace must have " + std::to_string(carver.used_bytes()) + " bytes; got " +
                            std::to_string(args.workspace.size()) + ": ask Backward::workspace for its size");
    g.common.control = memory.control;
    g.delta = memory.delta;
    g.dq_sums = memory.dq_sums;
    g.tiles_added = memory.tiles_added;
    g.regions = {problem.tokens, problem.tokens, problem.batch, problem.kv_heads, problem.heads / problem.kv_heads, 1};
    if (g.dq_sums != nullptr) {
      const SumPlan& sums = choice->passes.back().dq_sums;
      g.sums = sums.of_head;
      g.numbers = sum_layout(problem);
      g.regions = sums.regions;
      g.regions.ended = memory.ended;
      g.regions.rounded = memory.rounded;
    }
    place_numbers(g, memory.lse_copy, memory.delta_copy);
    make_delta(choice, g, memory, stream);
    if (choice != nullptr)
      for (const Pass& pass : choice->passes)
        run_pass(*choice, pass, g, memory, !detached() && &pass == &choice->passes.front(), stream);
    const bool hopper = choice != nullptr && choice->name == "sm90";  // its last pass is gradient_sm90.cuh
    run_rows(g, rows::GradientRows::results, choice != nullptr, hopper, stream);
  }
};

std::int64_t copied_numbers(const Problem& problem) {
  const SumLayout sums = sum_layout(problem);
  return sums.stride > 1 ? problem.batch * problem.heads * sums.rows : 0;
}

void place_numbers(GradientLaunch& g, float* lse, float* delta) {
  const bool copied = g.numbers.stride > 1;
  g.ordered_lse = copied ? lse : g.lse;
  g.ordered_delta = copied ? delta : g.delta;
  g.number_rows = copied ? g.numbers.rows : g.common.tokens;
  g.lse_copy = copied ? lse : nullptr;
  g.delta_copy = copied ? delta : nullptr;
}

Backward::Backward(const Problem& problem, const Plan& plan, const BackwardOptions& options)
    : impl_(std::make_unique<Impl>(problem, plan, options)) {}
Backward::~Backward() = default;
Backward::Backward(Backward&&) noexcept = default;
Backward& Backward::operator=(Backward&&) noexcept = default;

void Backward::run(const BackwardArgs& args, StreamHandle stream) const { impl_->run(args, stream); }

std::vector<MemoryComponent> Backward::workspace() const {
  Carver least;
  impl_->carve(least, nullptr);
  std::vector<MemoryComponent> largest = least.components();  // of the kernels that may run
  for (const Tiled& choice : impl_->tiled) {
    Carver carver;
    impl_->carve(carver, &choice);
    if (total_bytes(carver.components()) > total_bytes(largest)) largest = carver.components();
  }
  return largest;
}

std::string Backward::kernel() const { return impl_->tiled.empty() ? "rows" : impl_->tiled.front().name; }

std::string Backward::explain() const {
  std::ostringstream text;
  text << "kernel " << kernel() << "\n";
  if (impl_->tiled.empty()) return text.str();
  for (const Pass& pass : impl_->tiled.front().passes) {
    const Schedule& schedule = pass.schedule;
    const bool of_keys = pass.part != mma::Part::dq;
    text << (pass.part == mma::Part::dq     ? "dq"
             : pass.part == mma::Part::dk   ? "dk"
             : pass.part == mma::Part::dv   ? "dv"
             : impl_->tiled.front().adds_dq ? "dq, dk, dv"
                                            : "dk, dv")
         << ": " << schedule.tile_count << " tiles of " << schedule.tiling.shape.query_rows
         << (of_keys ? " keys, " : " queries, ") << schedule.tiling.shape.key_rows
         << (of_keys ? " queries a block\n" : " keys a block\n");
    if (const SumPlan& sums = pass.dq_sums; sums.rows > 0)
      text << "  dq in fp32: " << sums.table.slots << " slots for " << sums.regions.count << " regions of "
           << sums.regions.length << " positions\n";
    for (int i = 0; i < schedule.sweep_count; ++i) {
      const Sweep& sweep = schedule.tiling.sweeps[i];
      text << "  sweep " << i << ": branches";
      for (int b = 0; b < sweep.branch_count; ++b)
        text << " " << schedule.branch_order[static_cast<std::size_t>(sweep.first_branch + b)];
      text << ", stride " << sweep.stride << " in cells of " << sweep.cell << (sweep.continues ? ", continues" : "")
           << (sweep.is_last ? ", writes results" : ", hands state on") << "\n";
    }
  }
  return text.str();
}

}  // namespace annulus::cuda
