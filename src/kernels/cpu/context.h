// What every driver of the CPU backend looks at, and how it finds rows of one head in a tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>

#include "annulus/problem.h"
#include "kernels/cpu/tiles.h"
#include "kernels/kernels.h"
#include "plan/phase.h"
#include "plan/plan.h"

namespace annulus::cpu {

struct Context {
  const Problem& problem;
  const Plan& plan;
  const Tiles& tiles;
  int threads;
  Shard shard;
  const std::function<void()>* poll = nullptr;

  Rows positions() const { return {0, 1, problem.tokens}; }
  std::int64_t rows() const {  // of this rank
    std::int64_t count = 0;
    for (const Rows& piece : shard.pieces) count += piece.count;
    return count;
  }
  std::int64_t dilation(const Task& task) const {
    return problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
  }
  std::int64_t kv_head(std::int64_t head) const { return head / (problem.heads / problem.kv_heads); }
  float scale_log2() const { return static_cast<float>(*problem.scale * 1.4426950408889634); }
  float output_scale() const { return static_cast<float>(problem.pattern.output_scale); }
  std::int64_t row_index(std::int64_t batch, std::int64_t head, std::int64_t row) const {  // in LSE and Delta
    return (batch * problem.heads + head) * rows() + row;
  }
  void make_progress() const {
    if (poll != nullptr && *poll) (*poll)();
  }
};

template <class View>
auto* row_pointer(const View& view, std::int64_t batch, std::int64_t row, std::int64_t head) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, char, const char>;
  const std::int64_t offset = batch * view.stride[0] + row * view.stride[1] + head * view.stride[2];
  return static_cast<Byte*>(view.data) + offset * size_of(view.dtype);
}

inline SourceRows source_rows(const ConstTensorView& view, std::int64_t batch, std::int64_t head, const Rows& rows) {
  return {row_pointer(view, batch, rows.first, head), view.dtype, rows.stride * view.stride[1], rows.count,
          view.shape[3]};
}

inline TargetRows target_rows(const TensorView& view, std::int64_t batch, std::int64_t head, const Rows& rows) {
  return {row_pointer(view, batch, rows.first, head), view.dtype, rows.stride * view.stride[1], view.shape[3]};
}

}  // namespace annulus::cpu
