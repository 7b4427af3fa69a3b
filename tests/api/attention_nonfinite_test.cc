// Section 8: a NaN or an infinity in one input row reaches exactly the rows that may see it. The reference says which:
// it computes with NaN and infinities as IEEE has them, and compare() wants each where the reference has it.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "annulus/attention.h"
#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/draw_case.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::Call;
using support::draw_between;
using support::Way;
using support::Yardstick;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Spot {
  int tensor = 0;  // q, k, v, dout
  std::size_t element = 0;
};

std::vector<double>& tensor_of(Inputs& inputs, int tensor) {
  std::vector<double>* tensors[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.dout};
  return *tensors[tensor];
}

std::string faults(const Problem& problem, Inputs inputs, const Spot& spot, double value) {
  tensor_of(inputs, spot.tensor)[spot.element] = value;
  const Yardstick yardstick(problem, inputs);
  std::string all;
  for (const Way& way : support::each_instruction_set()) {
    const std::string fault = yardstick.faults(inputs, way);
    if (!fault.empty())
      all += fault + ", tensor " + std::to_string(spot.tensor) + " element " + std::to_string(spot.element) + " = " +
             std::to_string(value) + "\n";
  }
  return all;
}

Problem spoiled_problem(DType dtype, bool causal, Gradient gradient) {
  Problem problem;
  problem.tokens = 150;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 19;
  problem.dtype = dtype;
  problem.causal = causal;
  problem.documents = {0, 130, 150};
  problem.pattern = make_pattern(Preset::longnet, {32, 130}, {1, 3}, 4);
  problem.pattern.gradient = gradient;
  return resolve(problem);
}

void expect_spread(double value) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const bool causal : {false, true}) {
      const Problem problem = spoiled_problem(dtype, causal, causal ? Gradient::exact : Gradient::detached);
      const Inputs inputs = draw_inputs(problem, 31);
      for (int tensor = 0; tensor < 4; ++tensor) {
        const std::int64_t heads = tensor == 0 || tensor == 3 ? problem.heads : problem.kv_heads;
        // The last element of a row lies where vectors end.
        EXPECT_EQ(faults(problem, inputs, {tensor, reference::element(problem, heads, 0, 60, 1) + 18}, value), "");
      }
    }
}

TEST(AttentionNonfinite, ANaNReachesExactlyTheRowsThatSeeIt) { expect_spread(kNaN); }
TEST(AttentionNonfinite, AnInfinityReachesExactlyTheRowsThatSeeIt) { expect_spread(kInfinity); }
TEST(AttentionNonfinite, ANegativeInfinityReachesExactlyTheRowsThatSeeIt) { expect_spread(-kInfinity); }

RC_GTEST_PROP(AttentionNonfiniteProperty, ReachesExactlyTheRowsThatSeeIt, ()) {
  Problem problem = support::draw_problem(40, 20);
  if (*problem.scale == 0) problem.scale = 0.3;  // 0 * inf has its own test
  const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  Spot spot;
  spot.tensor = static_cast<int>(draw_between(0, 3));
  const auto size = static_cast<std::int64_t>(tensor_of(const_cast<Inputs&>(inputs), spot.tensor).size());
  spot.element = static_cast<std::size_t>(draw_between(0, size - 1));
  const std::string fault = faults(problem, inputs, spot, *rc::gen::element(kNaN, kInfinity, -kInfinity));
  if (!fault.empty()) RC_FAIL(fault);
}

// One element a head: an infinite query has logits of +inf and -inf alone, and rows of the latter kind only.
RC_GTEST_PROP(AttentionNonfiniteProperty, RowsOfMinusInfinityAlone, ()) {
  Problem problem = support::draw_problem(20, 1);
  if (*problem.scale == 0) problem.scale = -0.3;
  Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  if (support::draw_bool())
    for (double& x : inputs.k) x = -std::abs(x);
  const auto at = static_cast<std::size_t>(draw_between(0, static_cast<std::int64_t>(inputs.q.size()) - 1));
  const std::string fault = faults(problem, inputs, {0, at}, *rc::gen::element(kInfinity, -kInfinity));
  if (!fault.empty()) RC_FAIL(fault);
}

TEST(AttentionNonfinite, AScaleOfZeroTimesInfinityIsNaN) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    Problem problem = spoiled_problem(dtype, true, Gradient::exact);
    problem.scale = 0.0;
    const Inputs inputs = draw_inputs(problem, 32);
    for (const double value : {kNaN, kInfinity, -kInfinity})
      EXPECT_EQ(faults(problem, inputs, {1, reference::element(problem, problem.kv_heads, 0, 60, 1)}, value), "");
  }
}

// A NaN has many faces: payloads, signalling ones, negative ones. None may turn into a number on its way through the
// kernels.
TEST(AttentionNonfinite, EveryKindOfNaNIsOne) {
  const std::vector<std::uint32_t> fp32{0x7fc00000u, 0x7f800001u, 0x7fc00001u, 0xffc00000u,
                                        0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fa00000u};
  const std::vector<std::uint32_t> bf16{0x7fc0u, 0x7f81u, 0x7fc1u, 0xffc0u, 0xff81u, 0x7fffu, 0xffffu};
  const std::vector<std::uint32_t> fp16{0x7e00u, 0x7c01u, 0x7e01u, 0xfe00u, 0xfc01u, 0x7fffu, 0xffffu};
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const bool causal : {false, true}) {
      const Problem problem = spoiled_problem(dtype, causal, Gradient::exact);
      const Inputs inputs = draw_inputs(problem, 33);
      for (int tensor = 0; tensor < 4; ++tensor) {
        const std::int64_t heads = tensor == 0 || tensor == 3 ? problem.heads : problem.kv_heads;
        const std::size_t at = reference::element(problem, heads, 0, 60, 1) + 5;
        Inputs spoiled = inputs;
        tensor_of(spoiled, tensor)[at] = kNaN;
        const Yardstick yardstick(problem, spoiled);
        for (const std::uint32_t bits : dtype == DType::fp32 ? fp32 : dtype == DType::bf16 ? bf16 : fp16)
          for (const Way& way : support::each_instruction_set()) {
            const Attention attention(problem, way.options);
            Call call(problem, inputs, way);
            support::HostTensor* tensors[] = {&call.q, &call.k, &call.v, &call.dout};
            tensors[tensor]->set_bits(at, bits);
            call.forward(attention);
            call.backward(attention);
            EXPECT_EQ(call.fault() + yardstick.faults(call.result()), "")
                << std::hex << bits << " in tensor " << tensor << ", " << support::describe(problem) << " by "
                << support::describe(way);
          }
      }
    }
}

}  // namespace
}  // namespace annulus
