// The judge must acquit the innocent and convict the guilty.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "annulus/errors.h"
#include "reference/draw_inputs.h"
#include "reference/reference.h"

namespace annulus::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class CompareTest : public testing::TestWithParam<DType> {
 protected:
  CompareTest() {
    problem.tokens = 40;
    problem.heads = 3;
    problem.head_dim = 8;
    problem.dtype = GetParam();
    problem.pattern = make_pattern(Preset::longnet, {16, 40}, {4, 2}, 3);  // leaves rows uncovered
    problem = resolve(problem);
    const Inputs inputs = draw_inputs(problem, 1);
    truth = exact(problem, inputs);
    typed = textbook(problem, inputs);
    rounded = truth;
    for (auto tensor : {&Result::out, &Result::dq, &Result::dk, &Result::dv})
      for (double& x : rounded.*tensor) x = round_to(problem.dtype, x);
    for (double& x : rounded.lse) x = round_to(DType::fp32, x);
  }

  Check find(const Result& result, const std::string& tensor) const {
    for (const Check& check : compare(problem, result, truth, typed))
      if (check.tensor == tensor) return check;
    throw std::runtime_error("no check of " + tensor);
  }

  Problem problem;
  Result truth, typed, rounded;
};

struct NamedTensor {
  const char* name;
  std::vector<double> Result::*values;
};
constexpr NamedTensor kTensors[] = {
    {"out", &Result::out}, {"lse", &Result::lse}, {"dq", &Result::dq}, {"dk", &Result::dk}, {"dv", &Result::dv}};

TEST_P(CompareTest, TheTruthAndTheTextbookPass) {
  for (const Result& result : {truth, rounded, typed}) {
    const std::vector<Check> checks = compare(problem, result, truth, typed);
    ASSERT_EQ(checks.size(), 5u);
    for (const Check& check : checks)
      EXPECT_TRUE(check.passed) << check.tensor << " " << check.max_error << " > " << check.bound;
  }
}

TEST_P(CompareTest, TheBoundIsTight) {
  // A few per cent of a unit-sized result in bf16, a few parts per million in fp32: nothing that a wrong key could hide
  // in.
  for (const Check& check : compare(problem, typed, truth, typed))
    EXPECT_LT(check.bound, 100 * ulp(problem.dtype, 1.0)) << check.tensor;
}

TEST_P(CompareTest, APerturbedElementFails) {
  for (const auto& [tensor, values] : kTensors) {
    const double bound = find(rounded, tensor).bound;
    std::size_t at = 0;
    while (!std::isfinite((truth.*values)[at])) ++at;
    for (const double sign : {-1.0, 1.0}) {
      Result result = rounded;
      (result.*values)[at] = (truth.*values)[at] + sign * 1.01 * bound;
      const Check check = find(result, tensor);
      EXPECT_FALSE(check.passed) << tensor;
      EXPECT_NEAR(check.max_error, 1.01 * bound, 1e-9 * bound);
      (result.*values)[at] = (truth.*values)[at] + sign * 0.99 * bound;
      EXPECT_TRUE(find(result, tensor).passed) << tensor;
    }
  }
}

TEST_P(CompareTest, ASwappedRowFails) {
  for (const auto& [tensor, values] : kTensors) {
    Result result = rounded;
    auto& x = result.*values;
    std::reverse(x.begin(), x.end());
    EXPECT_FALSE(find(result, tensor).passed) << tensor;
  }
}

TEST_P(CompareTest, WhatIsNotFiniteFailsWhereTheTruthIsFinite) {
  for (const auto& [tensor, values] : kTensors) {
    std::size_t at = 0;
    while (!std::isfinite((truth.*values)[at])) ++at;
    for (const double x : {kNaN, kInfinity, -kInfinity}) {
      Result result = rounded;
      (result.*values)[at] = x;
      const Check check = find(result, tensor);
      EXPECT_FALSE(check.passed) << tensor << " " << x;
      EXPECT_EQ(check.max_error, kInfinity);
    }
  }
}

TEST_P(CompareTest, MinusInfinityMustStandWhereItBelongs) {
  std::size_t at = 0;
  while (std::isfinite(truth.lse[at])) ++at;
  for (const double x : {0.0, kInfinity, kNaN, -1e30}) {
    Result result = rounded;
    result.lse[at] = x;
    EXPECT_FALSE(find(result, "lse").passed) << x;
  }
}

TEST_P(CompareTest, NaNMustStandWhereItBelongs) {
  truth.out[5] = kNaN;
  typed.out[5] = kNaN;
  EXPECT_FALSE(find(rounded, "out").passed);
  rounded.out[5] = kInfinity;
  EXPECT_FALSE(find(rounded, "out").passed);
  rounded.out[5] = kNaN;
  EXPECT_TRUE(find(rounded, "out").passed);
}

TEST_P(CompareTest, AValueBeyondTheRangeIsTheInfinityItRoundsTo) {
  const double beyond = 4 * max_finite(problem.dtype);
  truth.dq[3] = beyond;
  EXPECT_FALSE(find(rounded, "dq").passed);
  rounded.dq[3] = kInfinity;
  EXPECT_TRUE(find(rounded, "dq").passed);
  EXPECT_LT(find(rounded, "dq").bound, 1);
  truth.dq[3] = -beyond;
  EXPECT_FALSE(find(rounded, "dq").passed);
}

TEST_P(CompareTest, ATextbookThatOverflowsDoesNotWidenTheBound) {
  const double bound = find(rounded, "dk").bound;
  typed.dk[0] = kInfinity;
  typed.dk[1] = kNaN;
  EXPECT_LE(find(rounded, "dk").bound, bound);
}

TEST_P(CompareTest, OnlyTensorsThatTheResultHas) {
  Result result;
  result.out = rounded.out;
  const std::vector<Check> checks = compare(problem, result, truth, typed);
  ASSERT_EQ(checks.size(), 1u);
  EXPECT_EQ(checks[0].tensor, "out");
}

TEST_P(CompareTest, TensorsOfAnotherSizeAreRefused) {
  Result result = rounded;
  result.dv.pop_back();
  EXPECT_THROW(compare(problem, result, truth, typed), InvalidArgument);
  EXPECT_THROW(compare(problem, Result{}, truth, typed), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Types, CompareTest, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& test) { return std::string(name(test.param)); });

}  // namespace
}  // namespace annulus::reference
