// Groups by arithmetic against groups by enumeration: cut anywhere, on both sides.
#include "kernels/groups.h"

#include "kernels/diagonal.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "plan/plan.h"
#include "support/describe.h"
#include "support/draw_case.h"

namespace annulus {
namespace {

using support::draw_between;
using Positions = std::vector<std::int64_t>;
using Group = std::pair<Positions, Positions>;  // queries, keys

Positions positions_of(const Rows& rows) {
  Positions positions;
  for (std::int64_t i = 0; i < rows.count; ++i) positions.push_back(rows[i]);
  return positions;
}

// Some positions of [0, tokens): a stretch of them, or every few.
Rows draw_rows(std::int64_t tokens) {
  const std::int64_t begin = draw_between(0, tokens - 1);
  const std::int64_t stride = support::draw_bool() ? 1 : draw_between(1, 6);
  return progression(begin, draw_between(begin + 1, tokens), 0, stride);
}

Positions common(const Positions& a, const Rows& b) {
  const Positions others = positions_of(b);
  Positions result;
  std::set_intersection(a.begin(), a.end(), others.begin(), others.end(), std::back_inserter(result));
  return result;
}

std::vector<Group> enumerate(const Task& task, std::int64_t dilation, const Classes& classes, const Rows& queries,
                             const Rows& keys) {
  std::vector<Group> groups;
  for (std::int64_t s = 0; s < task.count; ++s)
    for (std::int64_t c = classes.first; c < classes.first + classes.count && c < task.length; ++c) {
      Positions rows;
      for (std::int64_t t = 0; t < task.length; ++t)
        if (t % dilation == c) rows.push_back(task.begin + s * task.length + t);
      const Group group{common(rows, queries), common(rows, keys)};
      if (!group.first.empty() && !group.second.empty()) groups.push_back(group);
    }
  std::sort(groups.begin(), groups.end());
  return groups;
}

template <class F>
void for_some_tasks(const Problem& problem, F f) {
  const Rows queries = draw_rows(problem.tokens), keys = draw_rows(problem.tokens);
  for (const Task& task : make_plan(problem).tasks) {
    const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
    f(task, dilation, classes_of(problem, task.branch, draw_between(0, problem.heads - 1)), queries, keys);
  }
}

RC_GTEST_PROP(GroupsProperty, AreTheTasksCutOnBothSides, ()) {
  for (int round = 0; round < 10; ++round) {
    const Problem problem = support::draw_problem(40, 1);
    for_some_tasks(problem, [&](const Task& task, std::int64_t dilation, const Classes& classes, const Rows& queries,
                                const Rows& keys) {
      std::vector<Group> groups;
      for_each_group(task, dilation, classes, queries, keys,
                     [&](std::int64_t, const Rows& group_queries, const Rows& group_keys) {
                       groups.emplace_back(positions_of(group_queries), positions_of(group_keys));
                     });
      std::sort(groups.begin(), groups.end());
      if (groups != enumerate(task, dilation, classes, queries, keys))
        RC_FAIL("groups of " + support::describe(problem));
    });
  }
}

RC_GTEST_PROP(GroupsProperty, TheDiagonalIsTheCausalMask, ()) {
  const Problem problem = support::draw_problem(40, 1);
  const std::int64_t ranks =
      draw_between(1, 5);  // both sides are what some rank has: whole stretches, or every p-th position
  const Rows queries = progression(0, problem.tokens, draw_between(0, ranks - 1), ranks);
  const Rows keys = progression(0, problem.tokens, draw_between(0, ranks - 1), ranks);
  for (const Task& task : make_plan(problem).tasks) {
    const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
    const Classes classes = classes_of(problem, task.branch, draw_between(0, problem.heads - 1));
    for_each_group(
        task, dilation, classes, queries, keys, [&](std::int64_t, const Rows& group_queries, const Rows& group_keys) {
          const Diagonal diagonal = Diagonal::between(group_queries, group_keys);
          for (std::int64_t i = 0; i < group_queries.count; ++i)
            for (std::int64_t j = 0; j < group_keys.count; ++j)
              RC_ASSERT((j < diagonal.visible_keys(i, group_keys.count)) == (group_keys[j] <= group_queries[i]));
        });
  }
}

// A range deep inside a trillion tokens is found without walking there.
TEST(Groups, FarAwaySegmentsAreFoundByArithmetic) {
  const std::int64_t tokens = std::int64_t{1} << 40;
  Problem problem;
  problem.tokens = tokens;
  problem.heads = 1;
  problem.pattern = make_pattern(Preset::longnet, {1000, tokens}, {1, std::int64_t{1} << 38}, 1);
  problem = resolve(problem);
  const std::int64_t begin = tokens / 1000 / 2 * 1000 + 500;
  std::vector<Group> groups;
  const Plan plan = make_plan(problem);
  for (const Task& task : plan.tasks)
    for_each_group(task, problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation, {0, 1},
                   Rows{begin, 1, 1000}, Rows{0, 1, tokens}, [&](std::int64_t, const Rows& queries, const Rows& keys) {
                     groups.emplace_back(Positions{queries.first, queries.last(), queries.count},
                                         Positions{keys.first, keys.last(), keys.count});
                   });
  const std::vector<Group> want{{{begin, begin + 499, 500}, {begin - 500, begin + 499, 1000}},
                                {{begin + 500, begin + 999, 500}, {begin + 500, begin + 1499, 1000}},
                                {{tokens / 2, tokens / 2, 1}, {0, tokens / 4 * 3, 4}}};
  EXPECT_EQ(groups, want);
}

}  // namespace
}  // namespace annulus
