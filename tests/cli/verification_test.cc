// Verification: which checks there are, and that a wrong one is seen.
#include "cli/verification.h"

#include <gtest/gtest.h>

namespace annulus::cli {
namespace {

std::vector<VerifyCheck> verify_on(int ranks, VerifySettings settings, const Problem& problem) {
  settings.setup.sharding = resolve(Sharding{.ranks = ranks, .layout = Layout::zigzag}, problem.tokens);
  settings.setup.options.strategy = Strategy::exchange;
  settings.setup.options.device.threads = 3;
  std::vector<VerifyCheck> result;
  const int code = run_ranks(launch_threads(ranks), {}, [&](Rank& rank) {
    std::int64_t steps = 0;
    const std::vector<VerifyCheck> checks = verify(problem, settings, rank, [&](const std::string&) { ++steps; });
    EXPECT_EQ(steps, rank.reports() ? verify_steps(settings) : verify_steps(settings) - 2);  // the reference
    if (rank.reports()) result = checks;
    return kRight;
  });
  EXPECT_EQ(code, kRight);
  return result;
}

TEST(Verification, ChecksEveryTensorOfEveryInstructionSet) {
  Problem problem;
  problem.tokens = 61;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 16;
  problem.pattern = make_pattern(Preset::torchscale, {8, 32}, {1, 3}, 4);
  VerifySettings settings;
  settings.instruction_sets = instruction_sets();
  settings.seed = 2;
  for (const int ranks : {1, 3}) {
    const std::vector<VerifyCheck> checks = verify_on(ranks, settings, resolve(problem));
    EXPECT_EQ(checks.size(), (ranks == 1 ? 15 : 20) * settings.instruction_sets.size());
    EXPECT_TRUE(all_passed(checks));
    for (const VerifyCheck& check : checks) {
      const bool bitwise = check.what.find("against") == std::string::npos;
      EXPECT_EQ(check.bound == 0, bitwise) << check.what << " " << check.tensor;
      EXPECT_TRUE(bitwise || check.max_error > 0)
          << check.what << " " << check.tensor << " equals fp64 to the last bit?";
      EXPECT_EQ(check.what.find(" on 3 ranks") != std::string::npos, ranks == 3) << check.what;
    }
  }
  settings.setup.options.reproducible = true;
  for (const VerifyCheck& check : verify_on(3, settings, resolve(problem)))
    EXPECT_EQ(check.bound == 0, check.what.find("against fp64") == std::string::npos) << check.what;
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
  // 4 inputs and 3 times 4 results in fp64, 2 times 4 inputs and 3 times 4 results in fp32; lse in 6 copies.
  const std::int64_t elements = 1000 * 2 * 64;
  EXPECT_EQ(verify_bytes(resolve(problem)), elements * (16 * 8 + 20 * 4) + 2000 * (3 * 8 + 3 * 4));
}

}  // namespace
}  // namespace annulus::cli
