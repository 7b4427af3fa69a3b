// The CPU backend behind the interface of kernels.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "annulus/errors.h"
#include "kernels/cpu/backward.h"
#include "kernels/cpu/forward.h"
#include "kernels/kernels.h"
#include "kernels/softmax_state.h"
#include "kernels/thread_pool.h"

namespace annulus {
namespace {

constexpr int kMostThreads = 4096;

int choose_threads(int wanted) {
  if (wanted < 0 || wanted > kMostThreads)
    throw InvalidArgument("threads must lie in [0, " + std::to_string(kMostThreads) + "]; got " +
                          std::to_string(wanted) + ": 0 takes all cores");
  return wanted == 0 ? usable_cores() : wanted;
}

class CpuKernels : public Kernels {
 public:
  CpuKernels(const Problem& problem, const Plan& plan, const Options& options, const Shard& shard)
      : context_{problem, plan, cpu::find_tiles(options.instruction_set), choose_threads(options.threads),
                 shard,   &poll} {
    if (problem.head_dim > cpu::kMaxHeadDim)
      throw Unsupported("the CPU does head sizes from 1 to " + std::to_string(cpu::kMaxHeadDim) + "; got " +
                        std::to_string(problem.head_dim) + ": split the heads");
  }

  std::string_view instruction_set() const override { return context_.tiles.name; }
  int threads() const override { return context_.threads; }

  std::vector<MemoryComponent> workspace(Pass pass) const override {
    return pass == Pass::forward ? cpu::forward_workspace(context_) : cpu::backward_workspace(context_);
  }
  SoftmaxStates carve_states(Carver& carver, const TensorView& out) const override {
    const std::int64_t rows = context_.problem.batch * context_.problem.heads * context_.rows();
    SoftmaxStates states;
    states.maximum = carver.take<float>("states", rows);
    states.sum = carver.take<float>("states", rows);
    states.values = sums_or(out, "states", context_.problem.heads, carver);
    return states;
  }
  GradientSums carve_sums(Carver& carver, const BackwardArgs& args) const override {
    GradientSums sums;
    sums.dq = sums_or(args.dq, "sums", context_.problem.heads, carver);
    sums.dk = sums_or(args.dk, "sums", context_.problem.kv_heads, carver);
    sums.dv = sums_or(args.dv, "sums", context_.problem.kv_heads, carver);
    return sums;
  }
  bool is_whole() const override {  // backward_split.cc takes rows for positions
    return context_.shard.pieces == std::vector{Rows{0, 1, context_.problem.tokens}};
  }
  bool sums_are_results() const override { return context_.problem.dtype == DType::fp32; }
  void forward(const ForwardArgs& args, const ForwardStep& step) const override { cpu::forward(context_, args, step); }
  void backward(const BackwardArgs& args, const BackwardStep& step) const override {
    cpu::backward(context_, args, step);
  }
  bool makes_branch_deltas() const override { return true; }
  void delta(const BackwardArgs& args, int branch, const ConstTensorView& out) const override {
    cpu::delta(context_, args, branch, out);
  }
  const float* delta(const BackwardArgs& args) const override { return cpu::delta(context_, args); }
  void merge(const ConstTensorView& out, const ConstTensorView& lse, const SoftmaxStates& states, std::int64_t head,
             const Rows& rows) const override {
    for_each_strip(out, [&](std::int64_t batch, std::int64_t, const Rows& strip) {
      for (std::int64_t i = strip.first; i < strip.first + strip.count; ++i) {
        const std::int64_t row = context_.row_index(batch, head, rows[i]);
        merge_row(reinterpret_cast<const float*>(cpu::row_pointer(out, batch, i, 0)),
                  *reinterpret_cast<const float*>(cpu::row_pointer(lse, batch, i, 0)), states.maximum[row],
                  states.sum[row], reinterpret_cast<float*>(cpu::row_pointer(states.values, batch, rows[i], head)));
      }
    });
  }
  void add(const ConstTensorView& source, const TensorView& target) const override {
    for_each_strip(target, [&](std::int64_t batch, std::int64_t head, const Rows& rows) {
      for (std::int64_t i = 0; i < rows.count; ++i) {
        const auto* from = reinterpret_cast<const float*>(cpu::row_pointer(source, batch, rows[i], head));
        auto* to = reinterpret_cast<float*>(cpu::row_pointer(target, batch, rows[i], head));
        for (std::int64_t k = 0; k < target.shape[3]; ++k) to[k] += from[k];
      }
    });
  }
  void round(const ConstTensorView& source, Sum, const TensorView& target) const override {
    for_each_strip(target, [&](std::int64_t batch, std::int64_t head, const Rows& rows) {
      alignas(64) std::array<float, static_cast<std::size_t>(kStripRows * cpu::kMaxHeadDim)> sums;
      std::array<float, static_cast<std::size_t>(kStripRows)> factors;
      factors.fill(1.0f);
      context_.tiles.backward.pack_rows(cpu::source_rows(source, batch, head, rows), 1.0f, sums.data());
      context_.tiles.store_rows(sums.data(), rows.count, factors.data(), cpu::target_rows(target, batch, head, rows));
    });
  }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    const std::int64_t bytes = to.shape[3] * size_of(to.dtype);
    for (std::int64_t batch = 0; batch < to.shape[0]; ++batch)
      for (std::int64_t row = 0; row < to.shape[1]; ++row)
        for (std::int64_t head = 0; head < to.shape[2]; ++head)
          std::memcpy(cpu::row_pointer(to, batch, row, head), cpu::row_pointer(from, batch, row, head),
                      static_cast<std::size_t>(bytes));
  }

 private:
  static constexpr std::int64_t kStripRows = 16;

  // The result itself where it is fp32.
  TensorView sums_or(const TensorView& result, const char* component, std::int64_t heads, Carver& carver) const {
    const Problem& problem = context_.problem;
    if (sums_are_results()) return result;
    return {carver.take<float>(component, problem.batch * context_.rows() * heads * problem.head_dim),
            DType::fp32,
            {problem.batch, context_.rows(), heads, problem.head_dim}};
  }

  // Eq. 5 for one row: a partial result counts as one key with logit `lse`.
  void merge_row(const float* out, float lse, float& maximum, float& sum, float* values) const {
    const float x = lse * kLog2E;
    if (x == kNothing) {  // nothing seen, or seen but without any weight: see softmax_state.h
      if (std::isnan(out[0])) maximum = std::max(maximum, kLowest);
      return;
    }
    const std::int64_t head_dim = context_.problem.head_dim;
    if (std::isnan(x)) maximum = x;  // seen, which an empty state would not say
    if (x > maximum) {
      const float shrink = std::exp2(maximum - x);
      for (std::int64_t k = 0; k < head_dim; ++k) values[k] *= shrink;
      sum *= shrink;
      maximum = x;
    }
    const float weight = std::exp2(x - maximum);
    sum += weight;
    for (std::int64_t k = 0; k < head_dim; ++k) values[k] += weight * out[k];
  }

  // f(batch, head, rows) for strips of at most kStripRows rows of the view.
  template <class F>
  void for_each_strip(const ConstTensorView& view, F f) const {
    const std::int64_t strips = (view.shape[1] + kStripRows - 1) / kStripRows;
    ThreadPool::shared().run(view.shape[0] * strips, context_.threads, [&](std::int64_t index, int) {
      const std::int64_t first = index % strips * kStripRows;
      for (std::int64_t head = 0; head < view.shape[2]; ++head)
        f(index / strips, head, Rows{first, 1, std::min(kStripRows, view.shape[1] - first)});
    });
  }

  cpu::Context context_;
};

}  // namespace

std::unique_ptr<Kernels> make_cpu_kernels(const Problem& problem, const Plan& plan, const Options& options,
                                          const Shard& shard) {
  return std::make_unique<CpuKernels>(problem, plan, options, shard);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const cpu::Tiles* tiles : cpu::available_tiles()) names.emplace_back(tiles->name);
  return names;
}

}  // namespace annulus
