// What `auto` takes, and what it says.
#include "plan/choice.h"

#include <gtest/gtest.h>

#include "annulus/problem.h"
#include "plan/shard.h"

namespace annulus {
namespace {

Problem problem_with(std::int64_t tokens, std::vector<std::int64_t> segments, std::vector<std::int64_t> dilations,
                     std::int64_t heads = 4, std::int64_t kv_heads = 4) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.kv_heads = kv_heads;
  problem.head_dim = 64;
  problem.pattern = make_pattern(Preset::longnet, segments, dilations, heads);
  return resolve(problem);
}

TEST(Choice, BranchesThatNestMoveNothing) {
  const Problem problem = problem_with(4096, {256, 4096}, {1, 4});
  const Choice choice = choose_strategy(problem, resolve({.ranks = 4}, 4096), Strategy::automatic);
  EXPECT_EQ(choice.branches[0].received_bytes, 0);
  EXPECT_EQ(choice.branches[0].why, "every key that a query sees lies on its own rank");
  EXPECT_GT(choice.branches[1].received_bytes, 0);
}

TEST(Choice, DealsOutWhereThatMovesLessAndKeepsAllRanksBusy) {
  const Sharding sharding = resolve({.ranks = 4}, 4096);
  const Choice even = choose_strategy(problem_with(4096, {4096}, {1}), sharding, Strategy::automatic);
  EXPECT_EQ(even.branches[0].strategy, Strategy::reshard) << even.branches[0].why;
  const Choice three = choose_strategy(problem_with(4096, {4096}, {1}, 3, 3), sharding, Strategy::automatic);
  EXPECT_EQ(three.branches[0].strategy, Strategy::exchange) << "three heads leave a rank idle";
}

TEST(Choice, WholeGroupsMayBeWorthMoreBytes) {
  const Problem problem = problem_with(4096, {4096}, {1});
  const Sharding sharding = resolve({.ranks = 2}, 4096);
  EXPECT_EQ(choose_strategy(problem, sharding, Strategy::automatic).branches[0].strategy, Strategy::exchange);
  const Rates rates{.favours_whole_groups = true};
  const Choice choice = choose_strategy(problem, sharding, Strategy::automatic, rates);
  EXPECT_EQ(choice.branches[0].strategy, Strategy::reshard) << choice.branches[0].why;
}

// Whoever has rows is looked at, wherever the empty shards are.
TEST(Choice, EmptyShardsHideNothing) {
  const std::int64_t n = 4096;
  const Sharding sharding = resolve({.ranks = 8, .boundaries = {0, 0, 0, n / 2, n / 2, n / 2, n, n, n}}, n);
  const Choice choice = choose_strategy(problem_with(n, {n}, {1}), sharding, Strategy::automatic);
  EXPECT_GT(choice.branches[0].received_bytes, 0) << choice.branches[0].why;
}

TEST(Choice, ManyTinyClassesAreNotDealtOutUnasked) {
  for (const std::int64_t dilation : {std::int64_t{1} << 16, std::int64_t{1} << 62}) {  // four heads have 2^64 classes
    Problem problem = problem_with(1 << 20, {1 << 20}, {dilation});
    problem.pattern.phase = Phase::every;
    problem = resolve(problem);
    const Sharding sharding = resolve({.ranks = 4}, problem.tokens);
    EXPECT_EQ(choose_strategy(problem, sharding, Strategy::automatic).branches[0].strategy, Strategy::exchange);
  }
}

// 16 heads on 4: keys are fewer than queries, but where a head sees every fourth row, each key/value head sends the
// rows of all four classes that its heads take, and a query head those of one. Branches that send nothing have no say.
TEST(Choice, TheDirectionOfBackwardGoesByWhatTravels) {
  const Sharding sharding = resolve({.ranks = 4}, 16384);
  const Problem spread = problem_with(16384, {16384}, {4}, 16, 4);
  EXPECT_TRUE(queries_travel(spread, sharding, Strategy::exchange));
  const Problem dense = problem_with(16384, {16384}, {1}, 16, 4);
  EXPECT_FALSE(queries_travel(dense, sharding, Strategy::exchange));
  const Problem both = problem_with(16384, {2048, 16384}, {1, 4}, 16, 4);
  EXPECT_TRUE(queries_travel(both, sharding, Strategy::exchange));
}

TEST(Choice, SaysWhatReplicatedDoes) {
  const Choice choice =
      choose_strategy(problem_with(4096, {4096}, {1}), resolve({.ranks = 2}, 4096), Strategy::replicated);
  EXPECT_EQ(choice.branches[0].why, "every rank attends all queries to its own keys");
}

}  // namespace
}  // namespace annulus
