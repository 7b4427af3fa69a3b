// Verification: which checks there are, and that a wrong one is seen.
#include "cli/verification.h"

#include <gtest/gtest.h>

namespace annulus::cli {
namespace {

TEST(Verification, ChecksEveryTensorOfEveryInstructionSet) {
  Problem problem;
  problem.tokens = 61;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 16;
  problem.pattern = make_pattern(Preset::torchscale, {8, 32}, {1, 3}, 4);
  const VerifySettings settings{.instruction_sets = instruction_sets(), .threads = 3, .seed = 2};
  std::int64_t steps = 0;
  const std::vector<VerifyCheck> checks = verify(resolve(problem), settings, [&](const std::string&) { ++steps; });
  EXPECT_EQ(steps, verify_steps(settings));
  EXPECT_EQ(checks.size(), 15 * settings.instruction_sets.size());
  EXPECT_TRUE(all_passed(checks));
  for (const VerifyCheck& check : checks) {
    const bool bitwise = check.what.find("against") == std::string::npos;
    EXPECT_EQ(check.bound == 0, bitwise) << check.what << " " << check.tensor;
    EXPECT_TRUE(bitwise || check.max_error > 0) << check.what << " " << check.tensor << " equals fp64 to the last bit?";
  }
}

TEST(Verification, OneWrongCheckIsWrong) {
  VerifyCheck right{"a", "out", 1, 2, true};
  VerifyCheck wrong{"a", "lse", 3, 2, false};
  EXPECT_TRUE(all_passed({right, right}));
  EXPECT_FALSE(all_passed({right, wrong, right}));
}

TEST(Verification, MemoryGrowsWithTheProblem) {
  Problem problem;
  problem.tokens = 1000;
  problem.heads = 2;
  problem.head_dim = 64;
  problem.pattern = make_pattern(Preset::longnet, {16}, {1}, 2);
  // 4 inputs and 3 times 4 results in fp64, 4 inputs and 2 times 4 results in fp32; lse in 5 copies.
  const std::int64_t elements = 1000 * 2 * 64;
  EXPECT_EQ(verify_bytes(resolve(problem)), elements * (16 * 8 + 12 * 4) + 2000 * (3 * 8 + 2 * 4));
}

}  // namespace
}  // namespace annulus::cli
