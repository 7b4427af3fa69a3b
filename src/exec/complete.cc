// The reproducible way: a rank first gathers every row that shares a segment with one of its own, then computes its own
// rows as one rank alone would, in the same order. A row's bits then do not depend on ranks, layout or strategy.
//
// The price: memory for the longest segments, nothing overlaps, and backward makes its scores twice, once for dq of
// this rank's queries and once for dk and dv of its keys.
#include <algorithm>

#include "annulus/recorder.h"
#include "exec/agreement.h"
#include "exec/branch_deltas.h"
#include "exec/executor.h"
#include "exec/parcels_in_memory.h"
#include "kernels/workspace.h"
#include "plan/needs.h"
#include "plan/strategies.h"

namespace annulus {
namespace {

// A tensor of this rank, and the same of all gathered rows.
struct Gathered {
  ConstTensorView own;
  TensorView all;  // dense
};

// Own rows of one rank that lie in the range of another.
std::vector<Rows> rows_within(const std::vector<Rows>& pieces, const Rows& range) {
  std::vector<Rows> result;
  for (const Rows& piece : pieces)
    if (const Rows rows = cut(piece, range.first, range.first + range.count); !rows.empty()) result.push_back(rows);
  return result;
}

class CompleteExecutor final : public Executor {
 public:
  CompleteExecutor(const Problem& problem, const Plan& plan, const Sharding& sharding, Transport& transport,
                   const RankOptions& options)
      : problem_(problem),
        sharding_(sharding),
        transport_(transport),
        pieces_(pieces_of(sharding, problem.tokens, transport.rank())),
        range_(shared_range(problem, sharding, transport.rank())),
        parcels_(problem, pieces_, Cargo::keys),
        kernels_(make_kernels(problem, plan, options.device, {pieces_, true, true})),
        range_kernels_(make_kernels(problem, plan, options.device, {{range_}, true})),
        deltas_(deltas_of(pieces_, options)),
        range_deltas_(deltas_of({range_}, options)),
        recorder_(options.recorder != nullptr ? *options.recorder : own_recorder_) {
    plan_hash_ = agree(transport, describe(problem, sharding, options));
    kernels_->poll = range_kernels_->poll = [this] { transport_.poll(); };
  }

  void forward(ForwardArgs args) const override {
    set_stream(args.stream);
    Carver carver(args.workspace.data());
    const Memory memory = carve(Pass::forward, {}, carver);
    gather({{args.k, memory.k}, {args.v, memory.v}}, memory.slot);
    args.workspace = memory.kernels;
    const KeySource all = gathered_keys(memory);
    recorder_.time("attend", 0, 0, [&] { kernels_->forward(args, {.sources = {&all, 1}}); });
  }

  void backward(BackwardArgs args) const override {
    set_stream(args.stream);
    Carver carver(args.workspace.data());
    const Memory memory = carve(Pass::backward, args, carver);
    // fp32 first: a GPU reads it where it may begin alone.
    gather({{lse_view<const void>(args.lse.data(), count_rows(pieces_)), lse_view<void>(memory.lse, range_.count)},
            {args.q, memory.q},
            {args.k, memory.k},
            {args.v, memory.v},
            {args.out, memory.out},
            {args.dout, memory.dout}},
           memory.slot);
    args.workspace = memory.kernels;
    const auto& [dq, dk, dv] = memory.sums;

    const KeySource all = gathered_keys(memory);
    recorder_.time("attend", 0, 0, [&] {
      if (deltas_) deltas_->make(*kernels_, args, all, dq, memory.branch);
      kernels_->backward(args, {.sources = {&all, 1}, .has_delta = deltas_ != nullptr, .dq = dq});
    });

    BackwardArgs range_args = args;
    range_args.q = memory.q;
    range_args.out = memory.out;
    range_args.dout = memory.dout;
    range_args.lse = {memory.lse, static_cast<std::size_t>(problem_.batch * problem_.heads * range_.count)};
    const std::vector<KeySource> own = own_keys(problem_, pieces_, transport_.rank(), {args.k, args.v, dk, dv});
    recorder_.time("attend", 1, 0, [&] {
      if (range_deltas_)
        range_deltas_->make(*range_kernels_, range_args, all, memory.branch_out, memory.branch);
      else
        range_kernels_->backward(range_args, {.sources = {&all, 1}, .dq = {}});  // Delta alone
      range_kernels_->backward(range_args, {.sources = own, .first = false, .dq = {}});
    });
    if (kernels_->sums_are_results()) return;
    kernels_->round(dq, Sum::dq, args.dq);
    kernels_->round(dk, Sum::dk, args.dk);
    kernels_->round(dv, Sum::dv, args.dv);
  }

  const std::vector<Rows>& pieces() const override { return pieces_; }
  const Kernels& kernels() const override { return *kernels_; }

  std::vector<MemoryComponent> workspace(Pass pass) const override {
    Carver carver;
    carve(pass, {}, carver);
    return carver.components();
  }

  RankTraffic traffic(Pass pass) const override {
    RankTraffic traffic;
    for (int s = 1; s < sharding_.ranks; ++s) {
      traffic.sent_bytes += message_bytes(pass, sent_rows(s));
      traffic.received_bytes += message_bytes(pass, received_rows(s));
    }
    return traffic;
  }

 private:
  struct Memory {
    std::span<std::byte> kernels;
    std::byte* slot = nullptr;
    TensorView q, k, v, out, dout;  // of all gathered rows
    float* lse = nullptr;
    GradientSums sums;  // of this rank's rows
    // For Delta of eq. 8, where kernels do not make it: a branch's output of all gathered rows, and what making it
    // takes.
    TensorView branch_out;
    std::span<std::byte> branch;
  };

  static Rows shared_range(const Problem& problem, const Sharding& sharding, int rank) {
    Problem both_ways = problem;
    both_ways.causal = false;
    return Reach(both_ways, sharding, rank).hull();
  }

  // In step s this rank hears from the one s places behind and speaks to the one s places ahead.
  std::vector<Rows> received_rows(int s) const {
    return rows_within(pieces_of(sharding_, problem_.tokens, behind(transport_.rank(), s, sharding_.ranks)), range_);
  }
  std::vector<Rows> sent_rows(int s) const {
    return rows_within(pieces_, shared_range(problem_, sharding_, ahead(transport_.rank(), s, sharding_.ranks)));
  }

  std::int64_t message_bytes(Pass pass, const std::vector<Rows>& rows) const {
    const std::int64_t of_q = problem_.heads * problem_.head_dim * size_of(problem_.dtype);
    const std::int64_t of_k = problem_.kv_heads * problem_.head_dim * size_of(problem_.dtype);
    const std::int64_t row = pass == Pass::forward ? 2 * of_k : 2 * of_k + 3 * of_q + problem_.heads * 4;
    return problem_.batch * count_rows(rows) * row;
  }

  std::unique_ptr<BranchDeltas> deltas_of(const std::vector<Rows>& queries, const RankOptions& options) const {
    if (!has_branch_deltas(problem_) || kernels_->makes_branch_deltas()) return nullptr;
    return std::make_unique<BranchDeltas>(problem_, options.device, queries);
  }

  void set_stream(void* stream) const { kernels_->stream = range_kernels_->stream = stream; }

  Memory carve(Pass pass, const BackwardArgs& args, Carver& carver) const {
    Memory memory;
    const std::int64_t kernel_bytes =
        std::max(total_bytes(kernels_->workspace(pass)),
                 pass == Pass::backward ? total_bytes(range_kernels_->workspace(pass)) : std::int64_t{0});
    auto* start = carver.take<std::byte>("tiles", kernel_bytes);
    if (!carver.measuring()) memory.kernels = {start, static_cast<std::size_t>(kernel_bytes)};
    std::int64_t slot = 0;
    for (int s = 1; s < sharding_.ranks; ++s) slot = std::max(slot, message_bytes(pass, received_rows(s)));
    memory.slot = carver.take<std::byte>("slots", slot);
    const auto tensor = [&](const char* component, DType dtype, std::int64_t rows, std::int64_t heads) {
      const std::int64_t bytes = problem_.batch * rows * heads * problem_.head_dim * size_of(dtype);
      return TensorView(carver.take<std::byte>(component, bytes), dtype,
                        {problem_.batch, rows, heads, problem_.head_dim});
    };
    memory.k = tensor("gathered", problem_.dtype, range_.count, problem_.kv_heads);
    memory.v = tensor("gathered", problem_.dtype, range_.count, problem_.kv_heads);
    if (pass == Pass::forward) return memory;
    for (TensorView* view : {&memory.q, &memory.out, &memory.dout})
      *view = tensor("gathered", problem_.dtype, range_.count, problem_.heads);
    memory.lse = carver.take<float>("gathered", problem_.batch * problem_.heads * range_.count);
    memory.sums = kernels_->carve_sums(carver, args);
    if (!deltas_) return memory;
    memory.branch_out = tensor("branch", DType::fp32, range_.count, problem_.heads);
    const std::int64_t branch_bytes = std::max(deltas_->workspace_bytes(), range_deltas_->workspace_bytes());
    auto* branch = carver.take<std::byte>("branch", branch_bytes);
    if (!carver.measuring()) memory.branch = {branch, static_cast<std::size_t>(branch_bytes)};
    return memory;
  }

  // [batch, heads, rows] is a tensor of batch * heads sequences of single numbers.
  template <class Void>
  BasicTensorView<Void> lse_view(Void* data, std::int64_t rows) const {
    return {data, DType::fp32, {problem_.batch * problem_.heads, rows, 1, 1}};
  }

  KeySource gathered_keys(const Memory& memory) const {
    return {problem_, {.owner = transport_.rank(), .rows = range_}, {memory.k, memory.v, {}, {}}};
  }

  void gather(const std::vector<Gathered>& tensors, std::byte* slot) const {
    for (const Gathered& tensor : tensors) {
      std::int64_t first = 0;
      for (const Rows& piece : pieces_) {
        place(part_of(tensor.own, {first, 1, piece.count}), piece, tensor.all);
        first += piece.count;
      }
    }
    for (int s = 1; s < sharding_.ranks; ++s) {
      Exchange exchange{.plan = plan_hash_, .step = s, .sends = {}, .receives = {}, .stream = kernels_->stream};
      Send send{.peer = ahead(transport_.rank(), s, sharding_.ranks), .blocks = {}};
      for (const Gathered& tensor : tensors)
        for (const Rows& rows : sent_rows(s))
          send.blocks.push_back(parcels_.block(part_of(tensor.own, parcels_.own_rows(rows))));
      if (!send.blocks.empty()) exchange.sends.push_back(std::move(send));
      std::int64_t bytes = 0;
      for (const Gathered& tensor : tensors)
        for (const Rows& rows : received_rows(s)) bytes += dense_bytes(tensor.all, rows.count);
      if (bytes > 0)
        exchange.receives.push_back(
            {behind(transport_.rank(), s, sharding_.ranks), {slot, static_cast<std::size_t>(bytes)}});
      if (exchange.sends.empty() && exchange.receives.empty()) continue;
      recorder_.time("gather", s, bytes, [&] {
        transport_.post(exchange);
        transport_.wait();
      });
      const std::byte* data = slot;
      for (const Gathered& tensor : tensors)
        for (const Rows& rows : received_rows(s)) {
          const auto& shape = tensor.all.shape;
          place(ConstTensorView(data, tensor.all.dtype, {shape[0], rows.count, shape[2], shape[3]}), rows, tensor.all);
          data += dense_bytes(tensor.all, rows.count);
        }
    }
  }

  static std::int64_t dense_bytes(const TensorView& view, std::int64_t rows) {
    return view.shape[0] * rows * view.shape[2] * view.shape[3] * size_of(view.dtype);
  }

  // Puts these positions where they belong among the gathered ones.
  void place(const ConstTensorView& from, const Rows& positions, const TensorView& all) const {
    kernels_->copy(from, part_of(all, memory_rows(positions, range_)));
  }

  const Problem& problem_;
  const Sharding& sharding_;
  Transport& transport_;
  std::vector<Rows> pieces_;
  Rows range_;  // every position that shares a segment with one of this rank, and those between
  ParcelMemory parcels_;
  std::unique_ptr<Kernels> kernels_;                     // queries: this rank's
  std::unique_ptr<Kernels> range_kernels_;               // queries: all gathered ones
  std::unique_ptr<BranchDeltas> deltas_, range_deltas_;  // null: kernels make them, or eq. 7 holds
  Recorder own_recorder_;
  Recorder& recorder_;
  std::uint64_t plan_hash_ = 0;
};

}  // namespace

std::unique_ptr<Executor> make_complete_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                                 Transport& transport, const RankOptions& options) {
  return std::make_unique<CompleteExecutor>(problem, plan, sharding, transport, options);
}

}  // namespace annulus
