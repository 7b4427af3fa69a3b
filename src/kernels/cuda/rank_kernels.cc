#include "kernels/cuda/rank_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <stdexcept>

#include "annulus/errors.h"
#include "kernels/cuda/backward.h"
#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/fused_part.h"
#include "kernels/cuda/meetings.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/row_ops.h"
#include "kernels/cuda/timeline.h"
#include "kernels/groups.h"

namespace annulus::cuda {
namespace {

template <class View>
View rows_of(View view, std::int64_t first, std::int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, std::byte, const std::byte>;
  if (view.data != nullptr) view.data = static_cast<Byte*>(view.data) + first * view.stride[1] * size_of(view.dtype);
  view.shape[1] = count;
  return view;
}

// A list of meetings on the device.
struct PlacedList {
  int branch = 0;
  std::int64_t tile_count = 0;
  DeviceBuffer tiles, parts;
  Meetings meetings;

  PlacedList(const MeetingList& list, bool of_keys, bool causal)
      : branch(list.branch),
        tile_count(static_cast<std::int64_t>(list.tiles.size())),
        tiles(to_device(list.tiles)),
        parts(to_device(list.parts)) {
    meetings.tiles = reinterpret_cast<const MeetingTile*>(tiles.data());
    meetings.parts = reinterpret_cast<const MeetingPart*>(parts.data());
    meetings.of_keys = of_keys;
    meetings.causal = causal;
    meetings.aligned = list.aligned;
  }
};

// What decides a list: where every row lies, counted from the first source on.
using Signature = std::vector<std::int64_t>;
template <class View>
void sign(Signature& signature, const View& view, const void* base) {
  if (view.data == nullptr) return signature.push_back(-1);
  signature.push_back(static_cast<const std::byte*>(static_cast<const void*>(view.data)) -
                      static_cast<const std::byte*>(base));
  signature.insert(signature.end(), view.stride.begin(), view.stride.end());
}
void sign(Signature& signature, const RowSource& source) {
  const Parcel& parcel = source.parcel();
  for (const std::int64_t x : {parcel.rows.first, parcel.rows.stride, parcel.rows.count, std::int64_t{parcel.branch},
                               parcel.segment_begin, parcel.segment_length})
    signature.push_back(x);
}

bool is_aligned(std::initializer_list<const void*> addresses) {  // to 16 bytes
  return std::ranges::all_of(addresses, [](const void* x) { return reinterpret_cast<std::uintptr_t>(x) % 16 == 0; });
}

class RankKernels : public Kernels {
 public:
  RankKernels(const Problem& problem, const Plan& plan, const PassOptions& options, const Shard& shard)
      : problem_(problem), plan_(plan), options_(options), shard_(shard), device_(device_info()) {
    check_problem();
    std::int64_t first = 0;
    for (const Rows& piece : shard.pieces) {
      piece_first_.push_back(first);
      first += piece.count;
    }
    rows_ = first;
    shape_problem_ = problem;  // decides tiles: its size is that of the rank
    shape_problem_.tokens = std::max<std::int64_t>(rows_, 1);
    shape_problem_.documents = {0, shape_problem_.tokens};
    if (!mma::takes(shape_problem_, device_) || !mma::takes_gradient(shape_problem_, device_))
      throw Unsupported("ranks on GPUs need sm_80, head sizes up to 256 and at most " + std::to_string(kMaxBranches) +
                        " branches; got sm_" + std::to_string(device_.compute_capability) + ", head size " +
                        std::to_string(problem.head_dim) + " and " + std::to_string(problem.pattern.branches.size()) +
                        " branches: use device cpu");
    blocks_ = mma::prepare(shape_problem_, device_) * device_.multiprocessors;
    local_ = find_local_parts(problem, plan, shard);
    find_zero_keys();
    if (!shard.stepwise && !shard.own_states && zero_keys_.empty() && is_one_local_part()) {
      forward_.emplace(local_.front().problem, local_.front().plan,
                       ForwardOptions{.kernel = options.kernel, .sweeps = {}});
      return;
    }
    if (options.kernel != "auto" && options.kernel != "sm90") return;
    for (const LocalPart& part : local_)
      fused_.push_back(sm90::takes(part.problem, device_)
                           ? std::make_unique<FusedPart>(part, rows_, device_, !options.deterministic)
                           : nullptr);
  }

  std::string_view instruction_set() const override {
    if (forward_) return forward_->kernel() == "sm90" ? "sm90" : forward_->kernel() == "mma" ? "mma" : "rows";
    return !fused_.empty() && fused_.front() != nullptr ? "sm90" : "mma";
  }
  int threads() const override { return 0; }

  std::vector<MemoryComponent> workspace(Pass pass) const override {
    const DeviceScope scope(options_.device);
    if (forward_) return pass == Pass::forward ? forward_->workspace() : planned_backward().workspace();
    Carver carver;
    if (pass == Pass::forward)
      carve_forward(carver, false);
    else
      carve_backward(carver);
    return carver.components();
  }

  SoftmaxStates carve_states(Carver& carver, const TensorView&) const override {
    const std::int64_t rows = problem_.batch * problem_.heads * rows_;
    SoftmaxStates states;
    states.maximum = reinterpret_cast<float*>(carver.take<float2>("states", rows));
    states.values = by_head(carver.take<float>("states", rows * problem_.head_dim), problem_.heads, problem_.head_dim);
    return states;
  }
  GradientSums carve_sums(Carver& carver, const BackwardArgs&) const override {
    const std::int64_t rows = problem_.batch * rows_, width = problem_.head_dim;
    GradientSums sums;
    sums.dq = by_head(carver.take<float>("sums", rows * problem_.heads * width), problem_.heads, width);
    auto* both = carver.take<float>("sums", rows * problem_.kv_heads * 2 * width);
    sums.dk = by_head(both, problem_.kv_heads, 2 * width);
    sums.dv = by_head(both == nullptr ? nullptr : both + width, problem_.kv_heads, 2 * width);
    return sums;
  }
  bool is_whole() const override { return forward_.has_value() || rows_ == 0; }
  bool sums_are_results() const override { return false; }
  bool makes_branch_deltas() const override { return forward_.has_value(); }

  void forward(const ForwardArgs& args, const ForwardStep& step) const override;
  void backward(const BackwardArgs& args, const BackwardStep& step) const override;
  void delta(const BackwardArgs& args, int branch, const ConstTensorView& out) const override;
  const float* delta(const BackwardArgs& args) const override {
    Carver carver(args.workspace.data());
    return carve_backward(carver).delta;
  }

  void merge(const ConstTensorView& out, const ConstTensorView& lse, const SoftmaxStates& states, std::int64_t head,
             const Rows& rows) const override {
    const DeviceScope scope(options_.device);
    const Slice slice("merge", 0, cuda_stream());
    ops::merge(out, lse, own_states(states), head, rows, cuda_stream());
  }
  void add(const ConstTensorView& source, const TensorView& target) const override {
    const DeviceScope scope(options_.device);
    const Slice slice("merge", 0, cuda_stream());
    ops::add(source, target, cuda_stream());
  }
  void round(const ConstTensorView& source, Sum which, const TensorView& target) const override {
    const DeviceScope scope(options_.device);
    const Slice slice("round", 0, cuda_stream());
    const double factor = (which == Sum::dv ? 1.0 : *problem_.scale) * problem_.pattern.output_scale;
    ops::round(source, static_cast<float>(factor), target, cuda_stream());
  }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    const DeviceScope scope(options_.device);
    ops::copy(from, to, cuda_stream());
  }

 private:
  struct ForwardMemory {
    Control* control = nullptr;
    std::vector<FusedPart::Memory> fused;
    SoftmaxStates states;  // where nobody brings any
  };
  struct ZeroKeys {
    std::int64_t head = 0;
    Rows rows;                // of the rank's memory
    std::int64_t number = 0;  // where the logarithm of how many there are lies, behind a row of zeros
  };
  struct BackwardMemory {
    float* delta = nullptr;  // [.., batch, heads, rows]
    Control* control = nullptr;
    std::vector<FusedPart::Memory> fused;
  };

  void check_problem() const {
    if (options_.kernel != "auto" && options_.kernel != "sm90" && options_.kernel != "mma")
      throw Unsupported("ranks on GPUs have the kernels sm90 and mma; got '" + options_.kernel +
                        "': leave the choice to auto");
  }

  // The rank's rows are a sequence of their own, as far as it has anything to do with them.
  bool is_one_local_part() const {
    if (local_.size() != 1 || shard_.pieces.size() != 1 || local_.front().problem.tokens != rows_) return false;
    const std::int64_t begin = shard_.pieces.front().first;
    for (const Task& task : plan_.tasks)
      if (task.begin < begin + rows_ && task.end() > begin && !local_.front().has(task.branch)) return false;
    return true;
  }

  // Groups of a short last segment that torchscale fills up by keys with logit 0 and value 0: to the states, a partial
  // result of zeros with the logarithm of their number as its lse.
  void find_zero_keys() {
    std::vector<float> numbers(static_cast<std::size_t>(problem_.head_dim), 0.0f);
    for (const Task& task : plan_.tasks)
      for (std::int64_t head = 0; task.padded_rows > 0 && head < problem_.heads; ++head)
        for (std::size_t i = 0; i < shard_.pieces.size(); ++i)
          for_each_group(task, problem_.pattern.branches[static_cast<std::size_t>(task.branch)].dilation,
                         classes_of(problem_, task.branch, head), shard_.pieces[i], {0, 1, problem_.tokens},
                         [&](std::int64_t, const Rows& queries, const Rows& keys) {
                           if (task.padded_rows <= keys.count) return;
                           zero_keys_.push_back({head, memory_rows(queries, shard_.pieces[i]).shifted(piece_first_[i]),
                                                 static_cast<std::int64_t>(numbers.size())});
                           numbers.push_back(std::log(static_cast<float>(task.padded_rows - keys.count)));
                         });
    if (!zero_keys_.empty()) zero_numbers_ = to_device(numbers);
  }

  void add_zero_keys(const ops::States& states) const {
    const auto* numbers = reinterpret_cast<const float*>(zero_numbers_.data());
    for (const ZeroKeys& keys : zero_keys_) {
      const std::int64_t rows = keys.rows.count;
      ops::merge({numbers, DType::fp32, {problem_.batch, rows, 1, problem_.head_dim}, {0, 0, 0, 1}},
                 {numbers + keys.number, DType::fp32, {problem_.batch, rows, 1, 1}, {0, 0, 0, 1}}, states, keys.head,
                 keys.rows, cuda_stream());
    }
  }

  cudaStream_t cuda_stream() const { return static_cast<cudaStream_t>(stream); }
  bool is_detached() const { return has_branch_deltas(problem_); }
  std::int64_t numbers() const { return problem_.batch * problem_.heads * rows_; }
  std::int64_t delta_stride() const { return is_detached() ? numbers() : 0; }
  // eq. 7 or 8 without the output's scale, as all kernels here want it
  float delta_factor() const {
    return problem_.pattern.output_scale == 0 ? 0.0f : static_cast<float>(1 / problem_.pattern.output_scale);
  }

  // [batch, rows, heads, head_dim], a head's rows one behind the other, `width` apart.
  TensorView by_head(float* data, std::int64_t heads, std::int64_t width) const {
    return {data,
            DType::fp32,
            {problem_.batch, rows_, heads, problem_.head_dim},
            {heads * rows_ * width, width, rows_ * width, 1}};
  }
  ops::States own_states(const SoftmaxStates& states) const {
    return {reinterpret_cast<float2*>(states.maximum), static_cast<float*>(states.values.data), rows_, problem_.heads};
  }

  ForwardMemory carve_forward(Carver& carver, bool has_states) const {
    ForwardMemory memory;
    memory.control = carver.take<Control>("control", 1);
    for (const auto& part : fused_)
      memory.fused.push_back(part != nullptr ? part->carve(Pass::forward, carver) : FusedPart::Memory{});
    if (shard_.own_states && !has_states) memory.states = carve_states(carver, {});
    return memory;
  }
  BackwardMemory carve_backward(Carver& carver) const {
    BackwardMemory memory;
    memory.delta = carver.take<float>(
        "delta", numbers() * (is_detached() ? static_cast<std::int64_t>(problem_.pattern.branches.size()) : 1));
    memory.control = carver.take<Control>("control", 1);
    for (const auto& part : fused_)
      memory.fused.push_back(part != nullptr ? part->carve(Pass::backward, carver) : FusedPart::Memory{});
    return memory;
  }

  // Planned when it is first asked for: many only go forward.
  const Backward& planned_backward() const {
    if (!backward_)
      backward_.emplace(
          local_.front().problem, local_.front().plan,
          BackwardOptions{.kernel = options_.kernel, .deterministic = options_.deterministic, .sweeps = {}});
    return *backward_;
  }

  // The piece that a source is, or none.
  std::optional<std::size_t> own_piece(const KeySource& source, const ConstTensorView& k) const {
    for (std::size_t i = 0; i < shard_.pieces.size(); ++i)
      if (source.parcel().branch == kEveryBranch && source.rows() == shard_.pieces[i] &&
          source.tensors.k.data == rows_of(k, piece_first_[i], 0).data)
        return i;
    return {};
  }

  std::vector<QuerySource> own_queries(const QueryTensors& tensors) const {
    std::vector<QuerySource> sources;
    for (std::size_t i = 0; i < shard_.pieces.size(); ++i) {
      const std::int64_t first = piece_first_[i], count = shard_.pieces[i].count;
      sources.push_back(
          {problem_,
           {.owner = 0, .rows = shard_.pieces[i]},
           {rows_of(tensors.q, first, count), rows_of(tensors.dout, first, count), rows_of(tensors.lse, first, count),
            rows_of(tensors.delta, first, count), rows_of(tensors.dq, first, count)}});
    }
    return sources;
  }

  const std::vector<PlacedList>& lists(bool of_keys, bool with_states, std::span<const QuerySource> queries,
                                       std::span<const KeySource> keys, const std::vector<std::size_t>& done,
                                       const ConstTensorView& k) const;
  void run_forward(const ForwardArgs& args, const ops::States& states, Control* control,
                   std::span<const KeySource> sources, const std::vector<std::size_t>& done) const;
  void run_gradients(const GradientLaunch& g, const std::vector<PlacedList>& all, bool of_keys,
                     std::int64_t stride) const;

  const Problem& problem_;
  const Plan& plan_;
  PassOptions options_;
  Shard shard_;
  DeviceInfo device_;
  std::int64_t rows_ = 0;
  std::vector<std::int64_t> piece_first_;
  Problem shape_problem_;
  int blocks_ = 0;
  std::vector<LocalPart> local_;
  std::vector<std::unique_ptr<FusedPart>> fused_;  // of each local part; null: no such kernel
  std::vector<ZeroKeys> zero_keys_;
  DeviceBuffer zero_numbers_;
  std::optional<Forward> forward_;  // all of it at once
  mutable std::optional<Backward> backward_;
  mutable std::map<Signature, std::vector<PlacedList>> lists_;
};

// `done`: local parts whose own groups are computed already.
const std::vector<PlacedList>& RankKernels::lists(bool of_keys, bool with_states, std::span<const QuerySource> queries,
                                                  std::span<const KeySource> keys, const std::vector<std::size_t>& done,
                                                  const ConstTensorView& k) const {
  Signature signature{of_keys, with_states, static_cast<std::int64_t>(queries.size()),
                      static_cast<std::int64_t>(keys.size())};
  for (const QuerySource& source : queries) {
    const QueryTensors &own = source.tensors, &first = queries.front().tensors;
    sign(signature, source);
    sign(signature, own.q, first.q.data);
    sign(signature, own.dout, first.dout.data);
    sign(signature, own.lse, first.lse.data);
    sign(signature, own.delta, first.delta.data);
    sign(signature, own.dq, first.dq.data);
  }
  std::vector<std::optional<std::size_t>> pieces;
  for (const KeySource& source : keys) {
    const KeyTensors &own = source.tensors, &first = keys.front().tensors;
    sign(signature, source);
    sign(signature, own.k, first.k.data);
    sign(signature, own.v, first.v.data);
    sign(signature, own.dk, first.dk.data);
    sign(signature, own.dv, first.dv.data);
    pieces.push_back(own_piece(source, k));
    signature.push_back(pieces.back() ? static_cast<std::int64_t>(*pieces.back()) : -1);
  }
  for (const std::size_t part : done) signature.push_back(static_cast<std::int64_t>(part));
  const auto known = lists_.find(signature);
  if (known != lists_.end()) return known->second;

  const TileShape shape =
      with_states ? mma::tile_shape(shape_problem_, device_) : mma::gradient_tile_shape(shape_problem_);
  MeetingRules rules{problem_, plan_};
  rules.of_keys = of_keys;
  rules.tile_rows = shape.query_rows;
  rules.block_rows = shape.key_rows;
  rules.state_rows = rows_;
  if (with_states) rules.state_first = piece_first_;
  rules.skips = [&](int branch, std::size_t query, std::size_t key, const Rows& group) {
    return std::ranges::any_of(done, [&](std::size_t i) {
      const LocalPart& part = local_[i];
      return part.has(branch) && part.piece == query && pieces[key] == part.piece && group.first >= part.begin;
    });
  };
  std::vector<PlacedList> placed;
  for (const MeetingList& list : list_meetings(rules, queries, keys))
    if (!list.tiles.empty()) placed.emplace_back(list, of_keys, problem_.causal);
  return lists_.emplace(std::move(signature), std::move(placed)).first->second;
}

void RankKernels::run_forward(const ForwardArgs& args, const ops::States& states, Control* control,
                              std::span<const KeySource> sources, const std::vector<std::size_t>& done) const {
  if (sources.empty()) return;
  const std::vector<QuerySource> queries = own_queries({.q = args.q, .dout = {}, .lse = {}, .delta = {}, .dq = {}});
  Launch launch;
  launch.q = queries.front().tensors.q.data;
  launch.k = sources.front().tensors.k.data;
  launch.v = sources.front().tensors.v.data;
  launch.heads = static_cast<int>(problem_.heads);
  launch.head_dim = static_cast<int>(problem_.head_dim);
  launch.scale_log2 = scale_log2(problem_);
  launch.control = control;
  launch.state_sums = states.sums;
  launch.state_values = states.values;
  launch.tiling.causal = problem_.causal;
  launch.tiling.shape = mma::tile_shape(shape_problem_, device_);
  LaunchShape shape;
  shape.dtype = problem_.dtype;
  shape.batch = problem_.batch;
  shape.kv_heads = problem_.kv_heads;
  shape.blocks = blocks_;
  for (const PlacedList& list : lists(false, true, queries, sources, done, args.k)) {
    launch.meetings = list.meetings;
    launch.meetings.aligned = launch.meetings.aligned && is_aligned({launch.q, launch.k, launch.v});
    launch.tile_count = list.tile_count;
    check(cudaMemsetAsync(control, 0, sizeof(Control), cuda_stream()), "clear the counters");
    mma::launch(launch, shape, cuda_stream());
  }
}

void RankKernels::forward(const ForwardArgs& args, const ForwardStep& step) const {
  const DeviceScope scope(options_.device);
  if (rows_ == 0) return;
  const Slice slice("attend", 0, cuda_stream());
  if (forward_) return forward_->run(args, cuda_stream());
  Carver carver(args.workspace.data());
  const bool has_states = step.states.values.data != nullptr;
  const ForwardMemory memory = carve_forward(carver, has_states);
  const ops::States states = own_states(has_states ? step.states : memory.states);
  if (states.sums == nullptr) throw std::logic_error("a rank that is not alone needs states");
  if (step.first)
    check(cudaMemsetAsync(states.sums, 0, static_cast<std::size_t>(numbers()) * sizeof(float2), cuda_stream()),
          "clear the states");
  std::vector<std::size_t> done;
  for (std::size_t i = 0; step.first && i < fused_.size(); ++i) {
    const bool here = fused_[i] != nullptr && std::ranges::any_of(step.sources, [&](const KeySource& source) {
                        return own_piece(source, args.k) == local_[i].piece;
                      });
    if (here && fused_[i]->forward(args, states, memory.fused[i], cuda_stream())) done.push_back(i);
  }
  if (!done.empty()) ops::scale_maxima(states.sums, numbers(), fused_[done.front()]->log2_scale(), cuda_stream());
  run_forward(args, states, memory.control, step.sources, done);
  if (step.first) add_zero_keys(states);
  if (!step.last) return;
  ops::finish(states, static_cast<float>(problem_.pattern.output_scale), args.out,
              args.lse.empty() ? nullptr : args.lse.data(), cuda_stream());
}

void RankKernels::run_gradients(const GradientLaunch& g, const std::vector<PlacedList>& all, bool of_keys,
                                std::int64_t stride) const {
  LaunchShape shape;
  shape.dtype = problem_.dtype;
  shape.batch = problem_.batch;
  shape.kv_heads = problem_.kv_heads;
  for (const PlacedList& list : all) {
    GradientLaunch launch = g;
    launch.common.meetings = list.meetings;
    launch.common.meetings.aligned = list.meetings.aligned && is_aligned({g.common.q, g.common.k, g.common.v, g.dout});
    launch.common.tile_count = list.tile_count;
    launch.delta += list.branch * stride;
    std::vector<mma::Part> parts{mma::Part::dq};
    if (of_keys && mma::has_room_for_both(problem_)) parts = {mma::Part::dk_dv};
    if (of_keys && !mma::has_room_for_both(problem_)) parts = {mma::Part::dk, mma::Part::dv};
    for (const mma::Part part : parts) {
      shape.blocks = mma::prepare_gradient(shape_problem_, part) * device_.multiprocessors;
      check(cudaMemsetAsync(g.common.control, 0, sizeof(Control), cuda_stream()), "clear the counters");
      mma::launch_gradient(launch, shape, part, cuda_stream());
    }
  }
}

void RankKernels::backward(const BackwardArgs& args, const BackwardStep& step) const {
  const DeviceScope scope(options_.device);
  if (rows_ == 0) return;
  const Slice slice(step.sources.empty() ? "Delta" : "attend", 0, cuda_stream());
  if (forward_) return planned_backward().run(args, cuda_stream());
  Carver carver(args.workspace.data());
  const BackwardMemory memory = carve_backward(carver);
  const float* delta = step.delta != nullptr ? step.delta : memory.delta;
  const std::int64_t stride = step.delta != nullptr ? 0 : delta_stride();
  if (step.first) {
    if (step.dq.data != nullptr) ops::clear(step.dq, cuda_stream());
    if (step.delta == nullptr && !step.has_delta) {
      if (is_detached()) throw std::logic_error("Delta of each branch comes from outside");
      ops::dot(args.dout, args.out, delta_factor(), memory.delta, cuda_stream());
    }
  }
  if (step.sources.empty()) return;
  const bool visited = !step.visitors.empty();
  for (const KeySource& source : step.sources) {
    if (visited || source.tensors.dk.data == nullptr) continue;
    ops::clear(source.tensors.dk, cuda_stream());
    ops::clear(source.tensors.dv, cuda_stream());
  }
  for (const QuerySource& source : step.visitors) ops::clear(source.tensors.dq, cuda_stream());

  std::vector<std::size_t> done;
  for (std::size_t i = 0; !visited && i < fused_.size(); ++i) {
    if (fused_[i] == nullptr || !fused_[i]->has_backward() || step.dq.data == nullptr) continue;
    for (const KeySource& source : step.sources) {
      if (own_piece(source, args.k) != local_[i].piece || source.tensors.dk.data == nullptr) continue;
      const std::int64_t first = piece_first_[local_[i].piece];
      const GradientSums sums{step.dq, rows_of(source.tensors.dk, -first, rows_),
                              rows_of(source.tensors.dv, -first, rows_)};
      if (fused_[i]->backward(args, {delta, stride, sums}, memory.fused[i], cuda_stream())) done.push_back(i);
    }
  }

  const auto numbers_view = [&](const float* data) {
    return single_numbers<const void>(data, problem_.batch, rows_, problem_.heads);
  };
  const std::vector<QuerySource> own = own_queries({.q = args.q,
                                                    .dout = args.dout,
                                                    .lse = numbers_view(args.lse.data()),
                                                    .delta = numbers_view(delta),
                                                    .dq = step.dq});
  const std::span<const QuerySource> queries = visited ? step.visitors : std::span<const QuerySource>(own);
  const QueryTensors& query = queries.front().tensors;
  const KeyTensors& key = step.sources.front().tensors;
  GradientLaunch g;
  g.common.q = query.q.data;
  g.common.k = key.k.data;
  g.common.v = key.v.data;
  g.common.heads = static_cast<int>(problem_.heads);
  g.common.head_dim = static_cast<int>(problem_.head_dim);
  g.common.scale_log2 = scale_log2(problem_);
  g.common.control = memory.control;
  g.dout = query.dout.data;
  g.lse = static_cast<const float*>(query.lse.data);
  g.delta = static_cast<float*>(const_cast<void*>(query.delta.data));
  g.causal = problem_.causal;
  const std::int64_t branch_stride = visited ? 0 : stride;
  if (query.dq.data != nullptr) {
    g.sums_of_meetings[0] = static_cast<float*>(query.dq.data);
    run_gradients(g, lists(false, false, queries, step.sources, done, args.k), false, branch_stride);
  }
  if (std::ranges::none_of(step.sources, [](const KeySource& source) { return source.tensors.dk.data != nullptr; }))
    return;
  g.sums_of_meetings[0] = static_cast<float*>(key.dk.data);
  g.sums_of_meetings[1] = static_cast<float*>(key.dv.data);
  run_gradients(g, lists(true, false, queries, step.sources, done, args.k), true, branch_stride);
}

void RankKernels::delta(const BackwardArgs& args, int branch, const ConstTensorView& out) const {
  const DeviceScope scope(options_.device);
  if (rows_ == 0) return;
  Carver carver(args.workspace.data());
  ops::dot(args.dout, out, delta_factor(), carve_backward(carver).delta + branch * delta_stride(), cuda_stream());
}

}  // namespace

std::unique_ptr<Kernels> make_rank_kernels(const Problem& problem, const Plan& plan, const PassOptions& options,
                                           const Shard& shard) {
  return std::make_unique<RankKernels>(problem, plan, options, shard);
}

}  // namespace annulus::cuda
