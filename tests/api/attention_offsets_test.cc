// Section 8: more than 2^31 elements, or 2^31 bytes, between one row and the next. A sparse mapping makes the distance
// real and the memory small.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "numeric/half.h"
#include "reference/draw_inputs.h"
#include "support/sparse_memory.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::Inputs;
using support::SparseMemory;

constexpr std::int64_t kFar =
    (std::int64_t{1} << 30) + 24;  // elements; four steps pass 2^32 elements and 2^33 bytes of any type

// The axis of a tensor whose neighbours lie kFar elements apart.
enum class Axis { batch, tokens, heads };

class FarTensor {
 public:
  FarTensor(DType dtype, const std::array<std::int64_t, 4>& shape, Axis axis)
      : view_(nullptr, dtype, shape), memory_(static_cast<std::size_t>(5 * kFar * size_of(dtype))) {
    view_.stride[static_cast<std::size_t>(axis)] = kFar;
    view_.data = memory_.data();
  }

  bool exists() const { return memory_.data() != nullptr; }
  TensorView view() const { return view_; }
  std::int64_t last_offset() const {
    std::int64_t last = 0;
    for (std::size_t i = 0; i < 4; ++i) last += (view_.shape[i] - 1) * view_.stride[i];
    return last;
  }

  void fill(const std::vector<double>& values) {
    for_each([&](std::byte* p, std::size_t i) {
      const auto single = static_cast<float>(values[i]);
      const auto brain = from_double<BFloat16>(values[i]);
      std::memcpy(p, view_.dtype == DType::fp32 ? static_cast<const void*>(&single) : &brain,
                  static_cast<std::size_t>(size_of(view_.dtype)));
    });
  }
  std::vector<double> read() const {
    std::vector<double> values(
        static_cast<std::size_t>(view_.shape[0] * view_.shape[1] * view_.shape[2] * view_.shape[3]));
    for_each([&](const std::byte* p, std::size_t i) {
      float single = 0;
      BFloat16 brain{};
      if (view_.dtype == DType::fp32)
        std::memcpy(&single, p, sizeof single);
      else
        std::memcpy(&brain, p, sizeof brain);
      values[i] = static_cast<double>(view_.dtype == DType::fp32 ? single : to_float(brain));
    });
    return values;
  }

 private:
  template <class F>
  void for_each(F f) const {
    std::size_t i = 0;
    const auto [batch, tokens, heads, head_dim] = view_.shape;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t d = 0; d < head_dim; ++d)
            f(memory_.data() +
                  (b * view_.stride[0] + t * view_.stride[1] + h * view_.stride[2] + d) * size_of(view_.dtype),
              i++);
  }

  TensorView view_;
  SparseMemory memory_;
};

struct FarCase {
  DType dtype;
  Axis axis;
};

class AttentionOffsets : public ::testing::TestWithParam<FarCase> {};

TEST_P(AttentionOffsets, BeyondTwoToTheThirtyOneAreRight) {
  const auto [dtype, axis] = GetParam();
  Problem problem;
  problem.batch = axis == Axis::batch ? 5 : 1;
  problem.tokens = axis == Axis::tokens ? 5 : 3;
  problem.heads = axis == Axis::heads ? 5 : 1;
  problem.head_dim = 20;
  problem.dtype = dtype;
  problem.causal = true;
  problem.pattern = make_pattern(Preset::longnet, {16, 4}, {1, 2}, problem.heads);
  problem = resolve(problem);
  const Inputs inputs = reference::draw_inputs(problem, 41);
  const std::array<std::int64_t, 4> shape{problem.batch, problem.tokens, problem.heads, problem.head_dim};
  FarTensor q(dtype, shape, axis), k(dtype, shape, axis), v(dtype, shape, axis), out(dtype, shape, axis);
  FarTensor dout(dtype, shape, axis), dq(dtype, shape, axis), dk(dtype, shape, axis), dv(dtype, shape, axis);
  for (const FarTensor* tensor : {&q, &k, &v, &out, &dout, &dq, &dk, &dv})
    if (!tensor->exists())
      GTEST_SKIP() << "this system gives no address space of " << 5 * kFar * size_of(dtype) << " bytes";
  ASSERT_GT(q.last_offset(), std::int64_t{1} << 32);
  q.fill(inputs.q);
  k.fill(inputs.k);
  v.fill(inputs.v);
  dout.fill(inputs.dout);
  std::vector<float> lse(static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens));
  const support::Yardstick yardstick(problem, inputs);
  for (const std::string& instruction_set : instruction_sets()) {
    const Attention attention(problem, {.threads = 2, .instruction_set = instruction_set});
    attention.forward({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse, .workspace = {}});
    attention.backward({.q = q.view(),
                        .k = k.view(),
                        .v = v.view(),
                        .out = out.view(),
                        .lse = lse,
                        .dout = dout.view(),
                        .dq = dq.view(),
                        .dk = dk.view(),
                        .dv = dv.view(),
                        .workspace = {}});
    EXPECT_EQ(
        yardstick.faults(
            {.out = out.read(), .lse = {lse.begin(), lse.end()}, .dq = dq.read(), .dk = dk.read(), .dv = dv.read()}),
        "")
        << instruction_set;
  }
}

std::string name_of(const ::testing::TestParamInfo<FarCase>& far) {
  constexpr std::array<const char*, 3> kAxes{"Batch", "Tokens", "Heads"};
  return std::string(name(far.param.dtype)) + kAxes[static_cast<std::size_t>(far.param.axis)];
}

INSTANTIATE_TEST_SUITE_P(EveryAxis, AttentionOffsets,
                         ::testing::Values(FarCase{DType::fp32, Axis::batch}, FarCase{DType::fp32, Axis::tokens},
                                           FarCase{DType::fp32, Axis::heads}, FarCase{DType::bf16, Axis::batch},
                                           FarCase{DType::bf16, Axis::tokens}, FarCase{DType::bf16, Axis::heads}),
                         name_of);

}  // namespace
}  // namespace annulus
