// Both gradients of the reference against finite differences in fp64: of the output itself (eq. 7), and of the output
// with its merge weights held fast (eq. 8).
#include <cmath>
#include <functional>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "reference/draw_inputs.h"
#include "reference/draw_problem.h"
#include "reference/reference.h"

namespace annulus::reference {
namespace {

using Loss = std::function<double(const Inputs&)>;

double inner_product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// sum(dout * out): its gradient is what backward returns.
Loss loss_of_output(const Problem& problem, const Inputs& at) {
  const std::vector<double> dout = at.dout;
  return [problem, dout](const Inputs& inputs) {
    const Inputs forward{.q = inputs.q, .k = inputs.k, .v = inputs.v, .dout = {}};
    return inner_product(exact(problem, forward, 1).out, dout);
  };
}

// The same with out = sum_i weight_i O_i and weight_i = exp(G_i - G) taken at `at` for good.
Loss loss_of_frozen_merge(const Problem& problem, const Inputs& at) {
  std::vector<Problem> branches;
  for (const Branch& branch : problem.pattern.branches) {
    branches.push_back(problem);
    branches.back().pattern.branches = {branch};
  }
  const std::vector<double> total = exact(problem, at, 1).lse;
  std::vector<std::vector<double>> weighted_dout;  // by branch
  for (const Problem& branch : branches) {
    const std::vector<double> lse = exact(branch, at, 1).lse;
    std::vector<double> dout = at.dout;
    for (std::int64_t b = 0; b < problem.batch; ++b)
      for (std::int64_t t = 0; t < problem.tokens; ++t)
        for (std::int64_t j = 0; j < problem.heads; ++j) {
          const std::size_t row = lse_element(problem, b, j, t);
          const double weight = std::isinf(lse[row]) ? 0 : std::exp(lse[row] - total[row]);
          for (std::size_t d = 0; d < static_cast<std::size_t>(problem.head_dim); ++d)
            dout[element(problem, problem.heads, b, t, j) + d] *= weight;
        }
    weighted_dout.push_back(dout);
  }
  return [branches, weighted_dout](const Inputs& inputs) {
    const Inputs forward{.q = inputs.q, .k = inputs.k, .v = inputs.v, .dout = {}};
    double loss = 0;
    for (std::size_t i = 0; i < branches.size(); ++i)
      loss += inner_product(exact(branches[i], forward, 1).out, weighted_dout[i]);
    return loss;
  };
}

// The largest deviation of `gradient` from central differences of `loss` in inputs.*tensor.
double deviation(const Loss& loss, Inputs inputs, std::vector<double> Inputs::*tensor,
                 const std::vector<double>& gradient) {
  constexpr double kStep = 1e-5;
  double worst = 0;
  for (std::size_t i = 0; i < (inputs.*tensor).size(); ++i) {
    const double x = (inputs.*tensor)[i];
    (inputs.*tensor)[i] = x + kStep;
    const double above = loss(inputs);
    (inputs.*tensor)[i] = x - kStep;
    const double below = loss(inputs);
    (inputs.*tensor)[i] = x;
    worst = std::max(worst, std::abs((above - below) / (2 * kStep) - gradient[i]));
  }
  return worst;
}

void expect_gradient_of(const Loss& loss, const Problem& problem, const Inputs& inputs) {
  constexpr double kTolerance = 2e-8;
  const Result result = exact(problem, inputs, 1);
  EXPECT_LT(deviation(loss, inputs, &Inputs::q, result.dq), kTolerance);
  EXPECT_LT(deviation(loss, inputs, &Inputs::k, result.dk), kTolerance);
  EXPECT_LT(deviation(loss, inputs, &Inputs::v, result.dv), kTolerance);
}

Problem small_problem(Phase phase, bool causal, bool documents) {
  Problem problem;
  problem.batch = 2;
  problem.tokens = 13;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 3;
  problem.causal = causal;
  if (documents) problem.documents = {0, 1, 1, 9, 13};
  problem.pattern = make_pattern(Preset::longnet, {4, 7, 20}, {1, 2, 3}, 4);
  problem.pattern.phase = phase;
  if (phase == Phase::table)
    for (Branch& branch : problem.pattern.branches) branch.classes = {0, 0, branch.dilation - 1, 0};
  return resolve(problem);
}

class GradientTest : public testing::TestWithParam<std::tuple<Phase, bool, bool>> {};

TEST_P(GradientTest, ExactIsTheDerivativeOfTheOutput) {
  const auto [phase, causal, documents] = GetParam();
  const Problem problem = small_problem(phase, causal, documents);
  const Inputs inputs = draw_inputs(problem, 1);
  expect_gradient_of(loss_of_output(problem, inputs), problem, inputs);
}

TEST_P(GradientTest, DetachedIsTheDerivativeWithFrozenMergeWeights) {
  const auto [phase, causal, documents] = GetParam();
  Problem problem = small_problem(phase, causal, documents);
  problem.pattern.gradient = Gradient::detached;
  problem.pattern.output_scale = 0.75;
  const Inputs inputs = draw_inputs(problem, 2);
  expect_gradient_of(loss_of_frozen_merge(problem, inputs), problem, inputs);
}

INSTANTIATE_TEST_SUITE_P(Phases, GradientTest,
                         testing::Combine(testing::Values(Phase::by_head, Phase::by_head_block, Phase::every,
                                                          Phase::table),
                                          testing::Bool(), testing::Bool()),
                         [](const auto& test) {
                           return std::string(name(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) ? "_causal" : "") +
                                  (std::get<2>(test.param) ? "_documents" : "");
                         });

TEST(Gradient, ZeroKeysTakePartInBoth) {
  Problem problem = small_problem(Phase::every, false, true);
  problem.pattern.pad_like_torchscale = true;
  const Inputs inputs = draw_inputs(problem, 3);
  expect_gradient_of(loss_of_output(problem, inputs), problem, inputs);
  problem.pattern.gradient = Gradient::detached;
  expect_gradient_of(loss_of_frozen_merge(problem, inputs), problem, inputs);
}

TEST(Gradient, OutputScaleAndHeadGroups) {
  Problem problem;
  problem.tokens = 11;
  problem.heads = 5;
  problem.head_dim = 2;
  problem.scale = 1.5;
  problem.pattern = make_pattern(Preset::head_groups, {4, 11}, {1, 2}, 5);
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, 4);
  expect_gradient_of(loss_of_output(problem, inputs), problem, inputs);
}

TEST(Gradient, BothAgreeOnDvAndOnOneBranch) {
  Problem problem = small_problem(Phase::by_head, true, true);
  const Inputs inputs = draw_inputs(problem, 5);
  const Result through = exact(problem, inputs);
  problem.pattern.gradient = Gradient::detached;
  const Result detached = exact(problem, inputs);
  EXPECT_EQ(through.dv, detached.dv);
  EXPECT_NE(through.dq, detached.dq);

  problem.pattern.branches.resize(1);
  const Result single_detached = exact(problem, inputs);
  problem.pattern.gradient = Gradient::exact;
  const Result single = exact(problem, inputs);
  for (std::size_t i = 0; i < single.dq.size(); ++i) EXPECT_NEAR(single.dq[i], single_detached.dq[i], 1e-14);
  for (std::size_t i = 0; i < single.dk.size(); ++i) EXPECT_NEAR(single.dk[i], single_detached.dk[i], 1e-14);
}

// Along a random direction, for any problem at all.
RC_GTEST_PROP(Gradient, IsTheDirectionalDerivative, ()) {
  const Problem problem = draw_problem(16);
  const Inputs inputs = draw_inputs(problem, 6);
  const Inputs direction = draw_inputs(problem, 7);
  const Loss loss = problem.pattern.gradient == Gradient::exact ? loss_of_output(problem, inputs)
                                                                : loss_of_frozen_merge(problem, inputs);
  const auto moved = [&](double step) {
    Inputs result = inputs;
    for (auto tensor : {&Inputs::q, &Inputs::k, &Inputs::v})
      for (std::size_t i = 0; i < (result.*tensor).size(); ++i) (result.*tensor)[i] += step * (direction.*tensor)[i];
    return result;
  };
  constexpr double kStep = 1e-4;  // five points: the error is of fourth order
  const double difference =
      (8 * (loss(moved(kStep)) - loss(moved(-kStep))) - (loss(moved(2 * kStep)) - loss(moved(-2 * kStep)))) /
      (12 * kStep);
  const Result result = exact(problem, inputs, 1);
  const double derivative = inner_product(result.dq, direction.q) + inner_product(result.dk, direction.k) +
                            inner_product(result.dv, direction.v);
  RC_ASSERT(std::abs(difference - derivative) < 1e-8 * (1 + std::abs(derivative)));
}

}  // namespace
}  // namespace annulus::reference
