// The phase rules, head by head.
#include "plan/phase.h"

#include <map>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/draw_case.h"

namespace annulus {
namespace {

Problem problem_with(Phase phase, std::int64_t heads, std::int64_t dilation) {
  Problem problem;
  problem.tokens = 64;
  problem.heads = heads;
  problem.pattern = make_pattern(Preset::longnet, {64}, {dilation}, heads);
  problem.pattern.phase = phase;
  return problem;
}

TEST(Phase, ClassesOfEachRule) {
  const Problem by_head = resolve(problem_with(Phase::by_head, 12, 8));
  const Problem by_block = resolve(problem_with(Phase::by_head_block, 12, 8));
  const Problem every = resolve(problem_with(Phase::every, 12, 8));
  for (std::int64_t head = 0; head < 12; ++head) {
    EXPECT_EQ(classes_of(by_head, 0, head), (Classes{head % 8, 1}));
    EXPECT_EQ(classes_of(by_block, 0, head), (Classes{head / 2, 1}));  // ceil(12 / 8) heads a class
    EXPECT_EQ(classes_of(every, 0, head), (Classes{0, 8}));
  }
}

TEST(Phase, HeadsOutsideTheRangeTakeNothing) {
  Problem problem = problem_with(Phase::table, 5, 3);
  problem.pattern.branches[0].first_head = 1;
  problem.pattern.branches[0].head_count = 2;
  problem.pattern.branches[0].classes = {2, 0};
  problem = resolve(problem);
  EXPECT_EQ(classes_of(problem, 0, 0), Classes{});
  EXPECT_EQ(classes_of(problem, 0, 1), (Classes{2, 1}));
  EXPECT_EQ(classes_of(problem, 0, 2), (Classes{0, 1}));
  EXPECT_EQ(classes_of(problem, 0, 3), Classes{});
}

RC_GTEST_PROP(PhaseProperty, TakersNameEveryHeadAndClassOnce, ()) {
  const Problem problem = support::draw_problem(20, 1);
  for (int branch = 0; branch < static_cast<int>(problem.pattern.branches.size()); ++branch) {
    std::map<std::int64_t, Classes> seen;
    for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head) {
      std::map<std::int64_t, int> first_classes;
      for (const Takers& takers : takers_of(problem, branch, kv_head)) {
        RC_ASSERT(++first_classes[takers.classes.first] == 1);
        for (const std::int64_t head : takers.heads) {
          RC_ASSERT(head / (problem.heads / problem.kv_heads) == kv_head);
          RC_ASSERT(seen.emplace(head, takers.classes).second);
        }
      }
    }
    for (std::int64_t head = 0; head < problem.heads; ++head) {
      const Classes classes = classes_of(problem, branch, head);
      if (classes.count == 0)
        RC_ASSERT(!seen.contains(head));
      else
        RC_ASSERT(seen.at(head) == classes);
    }
  }
}

}  // namespace
}  // namespace annulus
