// replicated: every rank has all queries and a part of the keys. Nothing but partial results travels: each rank merges
// those of a slice of the rows and hands the outcome to all others. For decoding against a long sharded prefix.
//
//   forward    out and lse of all rows by own keys; slices are merged (eq. 5), then gathered
//   backward   dk and dv are complete where they are made; dq is summed by slices, then gathered
#include <algorithm>

#include "annulus/errors.h"
#include "annulus/recorder.h"
#include "exec/agreement.h"
#include "exec/executor.h"
#include "exec/parcels_in_memory.h"
#include "kernels/workspace.h"
#include "plan/strategies.h"

namespace annulus {
namespace {

// Eq. 5 wants partial results as they are; scale and zero keys come in once, when they are merged.
Problem of_partial_results(Problem problem) {
  problem.pattern.output_scale = 1;
  problem.pattern.pad_like_torchscale = false;
  return problem;
}

class ReplicatedExecutor final : public Executor {
 public:
  ReplicatedExecutor(const Problem& problem, const Plan& plan, const Sharding& sharding, Transport& transport,
                     const RankOptions& options)
      : problem_(problem),
        partial_problem_(of_partial_results(problem)),
        partial_plan_(make_plan(partial_problem_)),
        ranks_(sharding.ranks),
        transport_(transport),
        pieces_(pieces_of(sharding, problem.tokens, transport.rank())),
        partial_kernels_(make_kernels(partial_problem_, partial_plan_, options.device, {{all_rows()}, true, true})),
        kernels_(make_kernels(problem, plan, options.device, {{all_rows()}, true})),
        slice_kernels_(make_kernels(problem, plan, options.device, {{slice(transport.rank())}, true})),
        recorder_(options.recorder != nullptr ? *options.recorder : own_recorder_) {
    if (has_branch_deltas(problem) && (ranks_ > 1 || !kernels_->makes_branch_deltas()))
      throw Unsupported("replicated queries need the exact gradient; got the detached one: use another strategy");
    plan_hash_ = agree(transport, describe(problem, sharding, options));
    for (Kernels* kernels : {partial_kernels_.get(), kernels_.get(), slice_kernels_.get()})
      kernels->poll = [this] { transport_.poll(); };
  }

  void forward(ForwardArgs args) const override {
    set_stream(args.stream);
    Carver carver(args.workspace.data());
    const Memory memory = carve(Pass::forward, args.out, carver);
    const Rows own = slice(transport_.rank());
    ForwardArgs partial = args;
    partial.out = memory.values;
    partial.lse = {memory.lse, static_cast<std::size_t>(problem_.batch * problem_.heads * problem_.tokens)};
    partial.workspace = memory.kernels;
    const std::vector<KeySource> keys = keys_of({args.k, args.v, {}, {}});
    recorder_.time("attend", 0, 0, [&] { partial_kernels_->forward(partial, {.sources = keys}); });

    ForwardArgs merged = args;
    merged.q = part_of(args.q, own);
    merged.out = part_of(args.out, own);
    merged.lse = {memory.slice_lse, static_cast<std::size_t>(problem_.batch * problem_.heads * own.count)};
    merged.workspace = memory.kernels;
    if (!own.empty()) {
      slice_kernels_->forward(merged, {.sources = {}, .first = true, .last = false, .states = memory.states});
      merge(memory, part_of(memory.values, own), part_of(lse_view(memory.lse, problem_.tokens), own));
    }
    for (int s = 1; s < ranks_; ++s)
      swap_slices(s, {memory.values, lse_view(memory.lse, problem_.tokens)}, memory,
                  [&](const std::vector<TensorView>& got) { merge(memory, got[0], got[1]); });
    if (!own.empty())
      slice_kernels_->forward(merged, {.sources = {}, .first = false, .last = true, .states = memory.states});
    const TensorView lse = lse_view(args.lse.empty() ? memory.lse : args.lse.data(), problem_.tokens);
    kernels_->copy(lse_view(memory.slice_lse, own.count), part_of(lse, own));
    gather_slices({lse, args.out}, memory);
  }

  void backward(BackwardArgs args) const override {
    set_stream(args.stream);
    Carver carver(args.workspace.data());
    const Memory memory = carve(Pass::backward, {}, carver);
    const Rows own = slice(transport_.rank());
    const bool rounds = !kernels_->sums_are_results();
    args.workspace = memory.kernels;
    const TensorView dk = rounds ? memory.dk : args.dk, dv = rounds ? memory.dv : args.dv;
    const std::vector<KeySource> keys = keys_of({args.k, args.v, dk, dv});
    recorder_.time("attend", 0, 0, [&] { kernels_->backward(args, {.sources = keys, .dq = memory.values}); });
    for (int s = 1; s < ranks_; ++s)
      swap_slices(s, {memory.values}, memory,
                  [&](const std::vector<TensorView>& got) { kernels_->add(got[0], part_of(memory.values, own)); });
    kernels_->round(part_of(memory.values, own), Sum::dq, part_of(args.dq, own));
    gather_slices({args.dq}, memory);
    if (!rounds) return;
    kernels_->round(dk, Sum::dk, args.dk);
    kernels_->round(dv, Sum::dv, args.dv);
  }

  const std::vector<Rows>& pieces() const override { return pieces_; }
  const Kernels& kernels() const override { return *kernels_; }
  bool replicates_queries() const override { return true; }

  std::vector<MemoryComponent> workspace(Pass pass) const override {
    Carver carver;
    carve(pass, {}, carver);
    return carver.components();
  }

  RankTraffic traffic(Pass pass) const override {
    RankTraffic traffic;
    const std::int64_t rounded = vector_bytes(problem_.dtype) + (pass == Pass::forward ? lse_bytes() : 0);
    const std::int64_t partial = vector_bytes(DType::fp32) + (pass == Pass::forward ? lse_bytes() : 0);
    const std::int64_t own = slice(transport_.rank()).count;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank == transport_.rank()) continue;
      const std::int64_t theirs = slice(rank).count;
      traffic.sent_bytes += theirs * partial + own * rounded;
      traffic.received_bytes += own * partial + theirs * rounded;
    }
    return traffic;
  }

 private:
  struct Memory {
    std::span<std::byte> kernels;
    std::byte* slot = nullptr;
    TensorView values;     // fp32, [batch, tokens, heads, head_dim]: partial out, or dq
    float* lse = nullptr;  // partial, [batch, heads, tokens]
    SoftmaxStates states;  // of this rank's slice
    float* slice_lse = nullptr;
    TensorView dk, dv;  // fp32 sums, for 16-bit results
  };

  Rows all_rows() const { return {0, 1, problem_.tokens}; }
  Rows slice(int rank) const {
    const std::int64_t begin = block_begin(problem_.tokens, ranks_, rank);
    return {begin, 1, block_begin(problem_.tokens, ranks_, rank + 1) - begin};
  }
  std::int64_t vector_bytes(DType dtype) const {
    return problem_.batch * problem_.heads * problem_.head_dim * size_of(dtype);
  }
  std::int64_t lse_bytes() const { return problem_.batch * problem_.heads * 4; }

  void set_stream(void* stream) const {
    for (Kernels* kernels : {partial_kernels_.get(), kernels_.get(), slice_kernels_.get()}) kernels->stream = stream;
  }

  Memory carve(Pass pass, const TensorView& out, Carver& carver) const {
    Memory memory;
    const std::int64_t kernel_bytes =
        std::max({total_bytes(partial_kernels_->workspace(pass)), total_bytes(kernels_->workspace(pass)),
                  total_bytes(slice_kernels_->workspace(pass))});
    auto* start = carver.take<std::byte>("tiles", kernel_bytes);
    if (!carver.measuring()) memory.kernels = {start, static_cast<std::size_t>(kernel_bytes)};
    const auto sums = [&](const char* component, std::int64_t rows, std::int64_t heads) {
      return TensorView(carver.take<float>(component, problem_.batch * rows * heads * problem_.head_dim), DType::fp32,
                        {problem_.batch, rows, heads, problem_.head_dim});
    };
    const std::int64_t own = slice(transport_.rank()).count;
    memory.slot = carver.take<std::byte>("slots", (vector_bytes(DType::fp32) + lse_bytes()) * slice(0).count);
    memory.values = sums("partial results", problem_.tokens, problem_.heads);
    if (pass == Pass::forward) {
      const std::int64_t heads = problem_.batch * problem_.heads;
      memory.lse = carver.take<float>("partial results", heads * problem_.tokens);
      memory.states = slice_kernels_->carve_states(carver, part_of(out, slice(transport_.rank())));
      memory.slice_lse = carver.take<float>("states", heads * own);
    } else if (!kernels_->sums_are_results()) {
      memory.dk = sums("sums", count_rows(pieces_), problem_.kv_heads);
      memory.dv = sums("sums", count_rows(pieces_), problem_.kv_heads);
    }
    return memory;
  }

  std::vector<KeySource> keys_of(const KeyTensors& tensors) const {
    return own_keys(problem_, pieces_, transport_.rank(), tensors);
  }

  // [batch, heads, rows] is a tensor of batch * heads sequences of single numbers.
  TensorView lse_view(float* data, std::int64_t rows) const {
    return {data, DType::fp32, {problem_.batch * problem_.heads, rows, 1, 1}};
  }

  // Partial results of this rank's slice into its states. lse is [batch * heads, rows, 1, 1].
  void merge(const Memory& memory, const ConstTensorView& values, const ConstTensorView& lse) const {
    const Rows rows{0, 1, values.shape[1]};
    for (std::int64_t head = 0; head < problem_.heads; ++head) {
      ConstTensorView one = lse;
      one.data = static_cast<const float*>(lse.data) + head * lse.stride[0];
      one.shape[0] = problem_.batch;
      one.stride[0] = problem_.heads * lse.stride[0];
      slice_kernels_->merge(part_of(values, rows, head), one, memory.states, head, rows);
    }
  }

  // Hands the slice of the rank s places ahead to it, and takes this rank's slice from the one s places behind.
  template <class F>
  void swap_slices(int s, const std::vector<TensorView>& tensors, const Memory& memory, F use) const {
    const int to = ahead(transport_.rank(), s, ranks_), from = behind(transport_.rank(), s, ranks_);
    const auto views = move(s, tensors, slice(to), to, slice(transport_.rank()), from, memory);
    if (slice(transport_.rank()).count > 0) use(views);
  }

  // Every slice from the rank that has it to all others.
  void gather_slices(const std::vector<TensorView>& tensors, const Memory& memory) const {
    for (int s = 1; s < ranks_; ++s) {
      const int to = ahead(transport_.rank(), s, ranks_), from = behind(transport_.rank(), s, ranks_);
      const auto views = move(ranks_ + s, tensors, slice(transport_.rank()), to, slice(from), from, memory);
      for (std::size_t i = 0; i < tensors.size(); ++i) kernels_->copy(views[i], part_of(tensors[i], slice(from)));
    }
  }

  // Sends rows of the tensors and receives others, which lie dense in the slot.
  std::vector<TensorView> move(int step, const std::vector<TensorView>& tensors, const Rows& sent, int to,
                               const Rows& received, int from, const Memory& memory) const {
    Exchange exchange{.plan = plan_hash_, .step = step, .sends = {}, .receives = {}, .stream = kernels_->stream};
    Send send{.peer = to, .blocks = {}};
    std::vector<TensorView> views;
    std::byte* data = memory.slot;
    // fp32 comes first, where there is another type: a GPU reads it where it may begin alone.
    for (const TensorView& tensor : tensors) {
      if (sent.count > 0) send.blocks.push_back(ParcelMemory::block(part_of(tensor, sent)));
      views.emplace_back(
          data, tensor.dtype,
          std::array<std::int64_t, 4>{tensor.shape[0], received.count, tensor.shape[2], tensor.shape[3]});
      data += tensor.shape[0] * received.count * tensor.shape[2] * tensor.shape[3] * size_of(tensor.dtype);
    }
    if (!send.blocks.empty()) exchange.sends.push_back(std::move(send));
    if (data > memory.slot)
      exchange.receives.push_back({from, {memory.slot, static_cast<std::size_t>(data - memory.slot)}});
    if (exchange.sends.empty() && exchange.receives.empty()) return views;
    recorder_.time("merge", step, data - memory.slot, [&] {
      transport_.post(exchange);
      transport_.wait();
    });
    return views;
  }

  const Problem& problem_;
  Problem partial_problem_;
  Plan partial_plan_;
  int ranks_;
  Transport& transport_;
  std::vector<Rows> pieces_;                  // of the keys
  std::unique_ptr<Kernels> partial_kernels_;  // all queries, by own keys
  std::unique_ptr<Kernels> kernels_;          // all queries
  std::unique_ptr<Kernels> slice_kernels_;    // the queries of this rank's slice
  Recorder own_recorder_;
  Recorder& recorder_;
  std::uint64_t plan_hash_ = 0;
};

}  // namespace

std::unique_ptr<Executor> make_replicated_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                                   Transport& transport, const RankOptions& options) {
  return std::make_unique<ReplicatedExecutor>(problem, plan, sharding, transport, options);
}

}  // namespace annulus
