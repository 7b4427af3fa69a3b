// The rules of the softmax state: what "nothing seen" is, and what it is not.
#include "kernels/softmax_state.h"

#include <gtest/gtest.h>

namespace annulus {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(SoftmaxState, OnlyNothingIsUncovered) {
  EXPECT_FALSE(is_covered(kNothing));
  for (const float maximum : {kLowest, -1e30f, 0.0f, 1e30f, kInfinity, kNaN})
    EXPECT_TRUE(is_covered(maximum)) << maximum;
}

TEST(SoftmaxState, LogSumExpIsNatural) {
  EXPECT_FLOAT_EQ(log_sum_exp(0, 1), 0);
  EXPECT_FLOAT_EQ(log_sum_exp(3, 2), 4 * kLn2);
  EXPECT_FLOAT_EQ(log_sum_exp(-10, 0.5), -11 * kLn2);
  EXPECT_FLOAT_EQ(log_sum_exp(1e30f, 1), 1e30f * kLn2);
  EXPECT_FLOAT_EQ(kLog2E * kLn2, 1);
}

TEST(SoftmaxState, EdgesOfLogSumExp) {
  EXPECT_EQ(log_sum_exp(kNothing, 0), -kInfinity);
  EXPECT_EQ(log_sum_exp(kNothing, kNaN), -kInfinity);  // nobody looks at the sum of nothing
  EXPECT_EQ(log_sum_exp(kLowest, 0), -kInfinity);      // seen, but all logits were -inf
  EXPECT_TRUE(std::isnan(log_sum_exp(0, kNaN)));
  EXPECT_TRUE(std::isnan(log_sum_exp(kInfinity, kNaN)));
}

}  // namespace
}  // namespace annulus
