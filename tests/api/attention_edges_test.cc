// Section 8, row by row: shapes at the edge, and logits at the edge of what numbers can hold.
#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "numeric/half.h"
#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::Call;
using support::Way;
using support::Yardstick;

Problem make_problem(std::int64_t tokens, const Pattern& pattern) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 12;
  problem.pattern = pattern;
  return problem;
}

// In every type, causal or not, on every instruction set.
void expect_right(Problem problem) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const bool causal : {false, true}) {
      problem.dtype = dtype;
      problem.causal = causal;
      const Problem resolved = resolve(problem);
      const Inputs inputs = draw_inputs(resolved, 21);
      const Yardstick yardstick(resolved, inputs);
      for (const Way& way : support::each_instruction_set()) EXPECT_EQ(yardstick.faults(inputs, way), "");
    }
}

TEST(AttentionEdges, SegmentsLongerThanTheSequence) {
  expect_right(make_problem(30, make_pattern(Preset::longnet, {1000, std::int64_t{1} << 62}, {1, 3}, 4)));
}

TEST(AttentionEdges, SegmentsLongerThanADocument) {
  Problem problem = make_problem(60, make_pattern(Preset::longnet, {50, 20}, {1, 3}, 4));
  problem.documents = {0, 7, 40, 60};
  expect_right(problem);
}

TEST(AttentionEdges, NothingDividesAnything) {
  expect_right(make_problem(101, make_pattern(Preset::longnet, {13, 29, 101}, {3, 7, 11}, 4)));
  expect_right(make_problem(1, make_pattern(Preset::longnet, {16, 3}, {1, 2}, 4)));
  expect_right(make_problem(2, make_pattern(Preset::residue, {16, 3}, {1, 2}, 4)));
}

TEST(AttentionEdges, EmptyDocuments) {
  Problem problem = make_problem(40, make_pattern(Preset::torchscale, {16, 33}, {1, 2}, 4));
  problem.documents = {0, 0, 1, 1, 1, 18, 40, 40, 40};
  expect_right(problem);
}

TEST(AttentionEdges, DilationsBeyondSegmentsAndHeads) {
  expect_right(make_problem(50, make_pattern(Preset::longnet, {10}, {16}, 4)));
  expect_right(make_problem(50, make_pattern(Preset::torchscale, {10, 50}, {16, 9}, 4)));
  expect_right(make_problem(50, make_pattern(Preset::residue, {10}, {16}, 4)));
  expect_right(make_problem(50, make_pattern(Preset::longnet, {std::int64_t{1} << 62}, {std::int64_t{1} << 62}, 4)));
}

TEST(AttentionEdges, GroupsOfOneRowAttendToThemselves) {
  Problem problem = make_problem(33, make_pattern(Preset::longnet, {1}, {1}, 4));
  expect_right(problem);
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, 22);
  const Call call = support::compute(problem, inputs);
  const std::vector<double> out = call.out.read(), dv = call.dv.read(), dq = call.dq.read(), dk = call.dk.read();
  for (std::int64_t t = 0; t < problem.tokens; ++t)
    for (std::int64_t head = 0; head < problem.heads; ++head)
      for (std::size_t d = 0; d < 12; ++d)
        EXPECT_EQ(out[reference::element(problem, 4, 0, t, head) + d],
                  inputs.v[reference::element(problem, 2, 0, t, head / 2) + d]);
  for (const double x : dq) EXPECT_NEAR(x, 0, 1e-5);
  for (const double x : dk) EXPECT_NEAR(x, 0, 1e-5);
  for (std::int64_t t = 0; t < problem.tokens; ++t)
    for (std::size_t d = 0; d < 12; ++d)
      EXPECT_NEAR(dv[reference::element(problem, 2, 0, t, 0) + d],
                  inputs.dout[reference::element(problem, 4, 0, t, 0) + d] +
                      inputs.dout[reference::element(problem, 4, 0, t, 1) + d],
                  1e-5);
}

TEST(AttentionEdges, UncoveredRowsAreZeroAndAddNothing) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const Way& way : support::each_instruction_set()) {
      Problem problem =
          make_problem(40, make_pattern(Preset::longnet, {10}, {5}, 4));  // head j: class j alone, class 4 nowhere
      problem.kv_heads = 4;
      problem.dtype = dtype;
      problem = resolve(problem);
      Inputs inputs = draw_inputs(problem, 23);
      const auto covered = [](std::int64_t t, std::int64_t head) { return t % 5 == head; };
      // What an uncovered row holds is nobody's business.
      for (std::int64_t t = 0; t < problem.tokens; ++t)
        for (std::int64_t head = 0; head < problem.heads; ++head)
          for (std::vector<double>* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout})
            if (!covered(t, head)) (*tensor)[reference::element(problem, 4, 0, t, head)] = NAN;
      const Call call = support::compute(problem, inputs, way);
      EXPECT_EQ(call.fault(), "");
      const reference::Result result = call.result();
      for (std::int64_t t = 0; t < problem.tokens; ++t)
        for (std::int64_t head = 0; head < problem.heads; ++head) {
          const double lse = result.lse[reference::lse_element(problem, 0, head, t)];
          EXPECT_EQ(std::isfinite(lse), covered(t, head));
          for (std::size_t d = 0; d < 12; ++d) {
            const std::size_t at = reference::element(problem, 4, 0, t, head) + d;
            for (const std::vector<double>* tensor : {&result.out, &result.dq, &result.dk, &result.dv}) {
              EXPECT_TRUE(std::isfinite((*tensor)[at]));
              if (!covered(t, head)) {
                EXPECT_EQ((*tensor)[at], 0);
                EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
              }
            }
          }
        }
    }
}

TEST(AttentionEdges, ABranchThatNoHeadTakesChangesNothing) {
  Problem problem = make_problem(40, make_pattern(Preset::torchscale, {16}, {2}, 4));
  const Problem alone = resolve(problem);
  Branch idle;
  idle.segment = 8;
  idle.head_count = 0;
  problem.pattern.branches.push_back(idle);
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(alone, 24);
  EXPECT_TRUE(support::compute(problem, inputs).bits() == support::compute(alone, inputs).bits());
}

TEST(AttentionEdges, NoTokensAndNoBatchAreNoError) {
  for (const auto& [batch, tokens] : {std::pair<std::int64_t, std::int64_t>{1, 0}, {0, 5}, {0, 0}})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      Problem problem = make_problem(tokens, make_pattern(Preset::torchscale, {16, 4}, {1, 2}, 4));
      problem.batch = batch;
      problem.dtype = dtype;
      const Attention attention(problem);
      EXPECT_NO_THROW(attention.workspace_bytes(Pass::forward));
      EXPECT_NO_THROW(attention.workspace_bytes(Pass::backward));
      const TensorView q(nullptr, dtype, {batch, tokens, 4, 12}), k(nullptr, dtype, {batch, tokens, 2, 12});
      EXPECT_NO_THROW(attention.forward({.q = q, .k = k, .v = k, .out = q, .lse = {}, .workspace = {}}));
      EXPECT_NO_THROW(attention.backward(
          {.q = q, .k = k, .v = k, .out = q, .lse = {}, .dout = q, .dq = q, .dk = k, .dv = k, .workspace = {}}));
    }
}

// Inputs times `size`, in the problem's type.
Inputs draw_large(const Problem& problem, double size, std::uint64_t seed) {
  Inputs inputs = draw_inputs(problem, seed);
  for (std::vector<double>* tensor : {&inputs.q, &inputs.k})
    for (double& x : *tensor)
      x = std::clamp(round_to(problem.dtype, x * size), -max_finite(problem.dtype), max_finite(problem.dtype));
  return inputs;
}

Problem large_problem(DType dtype, bool causal) {
  Problem problem = make_problem(150, make_pattern(Preset::longnet, {64, 150}, {1, 2}, 4));
  problem.dtype = dtype;
  problem.causal = causal;
  return resolve(problem);
}

// Logits of 1e2 to 1e6: beyond what fp16 can hold.
TEST(AttentionEdges, LogitsBeyondHalfPrecisionAreRight) {
  for (const double size : {6.0, 60.0, 600.0})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const bool causal : {false, true}) {
        const Problem problem = large_problem(dtype, causal);
        const Inputs inputs = draw_large(problem, size, 25);
        const Yardstick yardstick(problem, inputs);
        for (const Way& way : support::each_instruction_set())
          EXPECT_EQ(yardstick.faults(inputs, way), "") << "inputs of " << size;
      }
}

// All logits of a row far below zero, at the same level or not: the maximum runs with them.
TEST(AttentionEdges, VeryNegativeLogitsAreRight) {
  for (const double size : {30.0, 300.0})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const bool causal : {false, true}) {
        const Problem problem = large_problem(dtype, causal);
        Inputs inputs = draw_large(problem, size, 26);
        for (double& x : inputs.q) x = std::abs(x);
        for (double& x : inputs.k) x = -std::abs(x);
        const Yardstick yardstick(problem, inputs);
        for (const Way& way : support::each_instruction_set())
          EXPECT_EQ(yardstick.faults(inputs, way), "") << "inputs of " << size;
      }
}

TEST(AttentionEdges, ZeroKeysBesideVeryNegativeLogits) {
  for (const double size : {1.0, 30.0, 300.0})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      Problem problem = make_problem(150, make_pattern(Preset::torchscale, {64, 100}, {1, 3}, 4));
      problem.pattern.pad_like_torchscale = true;
      problem.dtype = dtype;
      problem = resolve(problem);
      Inputs inputs = draw_large(problem, size, 27);
      for (double& x : inputs.q) x = std::abs(x);
      for (double& x : inputs.k) x = -std::abs(x);
      const Yardstick yardstick(problem, inputs);
      for (const Way& way : support::each_instruction_set())
        EXPECT_EQ(yardstick.faults(inputs, way), "") << "inputs of " << size;
    }
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double x : values)
    most = std::isfinite(x) ? std::max(most, std::abs(x)) : std::numeric_limits<double>::infinity();
  return most;
}

// "" or what is larger than probabilities allow. A key is seen by at most 2 heads x 2 branches x 150 rows, each of
// which adds P dO.
std::string excess(const Call& call, const Inputs& inputs) {
  const reference::Result result = call.result();
  std::string fault = call.fault();
  if (!(largest(result.out) <= 1.01 * largest(inputs.v)))
    fault += "out reaches " + std::to_string(largest(result.out)) + "; ";
  if (!std::isfinite(largest(result.lse))) fault += "lse is not finite; ";
  if (!(largest(result.dv) <= 600 * largest(inputs.dout)))
    fault += "dv reaches " + std::to_string(largest(result.dv)) + "; ";
  return fault;
}

// A logit of 1e9 is known to 100 at best in fp32. Its gradient cannot be exact, but P is a probability still: results
// are finite and no larger than a sum of such terms can be.
TEST(AttentionEdges, HugeLogitsStayFinite) {
  for (const double size : {2e4, 1e5, 1e8, 1e14})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const Way& way : support::each_instruction_set()) {
        const Problem problem = large_problem(dtype, size == 1e5);
        const Inputs inputs = draw_large(problem, size, 28);
        EXPECT_EQ(excess(support::compute(problem, inputs, way), inputs), "")
            << name(dtype) << " inputs of " << size << ", " << way.options.instruction_set;
      }
}

}  // namespace
}  // namespace annulus
