// The plan against the semantics: its tasks, written out pair by pair, are equations 1 to 3 to the letter, and there
// are few of them.
#include "plan/plan.h"
#include "plan/phase.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/describe.h"
#include "support/draw_case.h"

namespace annulus {
namespace {

using Position = std::int64_t;
using Pair = std::tuple<Position, Position, int, std::int64_t>;  // query, key, branch, head
using Row = std::tuple<Position, int, std::int64_t>;             // query, branch, head

// What a problem means, or what a plan says.
struct Meaning {
  std::map<Pair, int> pairs;              // how often
  std::map<Row, std::int64_t> zero_keys;  // of rows that have any

  bool operator==(const Meaning&) const = default;
};

Position ceil_div(Position a, Position b) { return a / b + (a % b != 0 ? 1 : 0); }

// Section 2: which class(es) of a branch head j takes.
bool takes_part(const Problem& problem, const Branch& branch, Position c, std::int64_t j) {
  if (j < branch.first_head || j >= branch.first_head + branch.head_count) return false;
  switch (problem.pattern.phase) {
    case Phase::by_head:
      return c == j % branch.dilation;
    case Phase::by_head_block:
      return c == j / ceil_div(problem.heads, branch.dilation);
    case Phase::every:
      return true;
    case Phase::table:
      return c == branch.classes[static_cast<std::size_t>(j - branch.first_head)];
  }
  return false;
}

// Equations 1 to 3 for the queries t of the document [d0, d1).
void write_out(const Problem& problem, int i, Position d0, Position d1, Meaning& meaning) {
  const Branch& branch = problem.pattern.branches[static_cast<std::size_t>(i)];
  const Position w = branch.segment, r = branch.dilation;
  for (Position t = d0; t < d1; ++t) {
    const Position a = d0 + (t - d0) / w * w;
    const Position e = std::min(a + w, d1);
    const Position c = (t - a) % r;
    for (std::int64_t j = 0; j < problem.heads; ++j) {
      if (!takes_part(problem, branch, c, j)) continue;
      Position count = 0;
      for (Position k = a; k < e; ++k) {
        if ((k - a) % r != c) continue;
        ++count;
        if (!problem.causal || k <= t) ++meaning.pairs[{t, k, i, j}];
      }
      const bool pads = problem.pattern.pad_like_torchscale && !problem.causal && e - a < w;  // section 5
      const Position zero_keys = pads ? ceil_div(std::min(w, d1 - d0), r) - count : 0;
      if (zero_keys > 0) meaning.zero_keys[{t, i, j}] = zero_keys;
    }
  }
}

Meaning meaning_of(const Problem& problem) {
  Meaning meaning;
  for (std::size_t d = 0; d + 1 < problem.documents.size(); ++d)
    for (int i = 0; i < static_cast<int>(problem.pattern.branches.size()); ++i)
      write_out(problem, i, problem.documents[d], problem.documents[d + 1], meaning);
  return meaning;
}

Meaning meaning_of(const Plan& plan, const Problem& problem) {
  Meaning meaning;
  for (const Task& task : plan.tasks)
    for (Position head = 0; head < problem.heads; ++head) {
      const Classes classes = classes_of(problem, task.branch, head);
      const Position dilation = problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
      for (Position s = 0; s < task.count; ++s)
        for (Position c = classes.first; c < std::min(classes.first + classes.count, task.length); ++c) {
          const Rows rows = task.rows(s, c, dilation);
          for (Position q = 0; q < rows.count; ++q) {
            for (Position k = 0; k < rows.count; ++k)
              if (!problem.causal || rows[k] <= rows[q]) ++meaning.pairs[{rows[q], rows[k], task.branch, head}];
            if (task.padded_rows > rows.count)
              meaning.zero_keys[{rows[q], task.branch, head}] += task.padded_rows - rows.count;
          }
        }
    }
  return meaning;
}

// Spans follow the documents, cover every position, own all tasks, and no task leaves its span.
bool spans_hold(const Plan& plan, const Problem& problem) {
  Position next = 0, next_task = 0;
  for (const Span& span : plan.spans) {
    if (span.begin != next || span.end <= span.begin || span.first_task != next_task || span.last_task < next_task)
      return false;
    const bool is_document =
        std::find(problem.documents.begin(), problem.documents.end(), span.begin) != problem.documents.end() &&
        std::find(problem.documents.begin(), problem.documents.end(), span.end) != problem.documents.end();
    if (!is_document) return false;
    for (Position i = span.first_task; i < span.last_task; ++i) {
      const Task& task = plan.tasks[static_cast<std::size_t>(i)];
      if (task.length < 1 || task.count < 1 || task.begin < span.begin || task.end() > span.end) return false;
      if (i > span.first_task && task.branch < plan.tasks[static_cast<std::size_t>(i - 1)].branch) return false;
    }
    next = span.end;
    next_task = span.last_task;
  }
  return next == problem.tokens && next_task == static_cast<Position>(plan.tasks.size());
}

RC_GTEST_PROP(PlanProperty, TasksAreTheEquations, ()) {
  for (int round = 0; round < 30; ++round) {
    const Problem problem = support::draw_problem(24, 2);
    const Plan plan = make_plan(problem);
    const Meaning want = meaning_of(problem);
    if (meaning_of(plan, problem) != want) RC_FAIL("not the equations: " + support::describe(problem));
    if (!spans_hold(plan, problem)) RC_FAIL("spans do not hold: " + support::describe(problem));
    for (const auto& [pair, count] : want.pairs) RC_ASSERT(count == 1);
  }
}

RC_GTEST_PROP(PlanProperty, CountPairsCountsThem, ()) {
  const Problem problem = support::draw_problem(30, 2);
  const auto want = static_cast<double>(problem.batch) * static_cast<double>(meaning_of(problem).pairs.size());
  if (count_pairs(problem) != want) RC_FAIL(support::describe(problem));
}

Problem long_problem(Position tokens, Phase phase) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads = 12;
  problem.head_dim = 64;
  problem.pattern =
      make_pattern(Preset::longnet, {2048, 1 << 15, (1 << 18) - 1, tokens / 2 + 1, tokens}, {1, 2, 4, 8, 16}, 12);
  problem.pattern.phase = phase;
  return resolve(problem);
}

TEST(Plan, SizeDoesNotGrowWithTokens) {
  for (const Phase phase : {Phase::by_head, Phase::by_head_block, Phase::every}) {
    const std::size_t small = make_plan(long_problem((Position{1} << 20) + 17, phase)).tasks.size();
    EXPECT_EQ(make_plan(long_problem((Position{1} << 40) + 17, phase)).tasks.size(), small) << name(phase);
    EXPECT_LE(small, 5u * 2) << name(phase);
  }
}

TEST(Plan, PairsOfATrillionTokens) {
  // One class a head: w / r keys a query, and 1 / r of the queries.
  const Position tokens = Position{1} << 40;
  Problem problem;
  problem.tokens = tokens;
  problem.heads = 4;
  problem.head_dim = 1;
  problem.pattern = make_pattern(Preset::longnet, {4096, tokens}, {1, 1024}, 4);
  problem = resolve(problem);
  EXPECT_DOUBLE_EQ(count_pairs(problem), 4 * (0x1p40 * 0x1p12 + 0x1p30 * 0x1p30));
  EXPECT_TRUE(spans_hold(make_plan(problem), problem));
}

TEST(Plan, HugeSegmentsAndDilationsOverflowNothing) {
  constexpr Position kMost = std::numeric_limits<Position>::max();
  for (const Phase phase : {Phase::by_head, Phase::by_head_block, Phase::every}) {
    Problem problem;
    problem.tokens = 10;
    problem.heads = 3;
    problem.pattern = make_pattern(Preset::longnet, {kMost, 4, kMost}, {1, kMost, kMost}, 3);
    problem.pattern.phase = phase;
    problem.pattern.pad_like_torchscale = true;
    problem = resolve(problem);
    const Plan plan = make_plan(problem);
    EXPECT_TRUE(spans_hold(plan, problem)) << name(phase);
    Problem same = problem;  // what differs is beyond the sequence
    same.pattern.branches[0].segment = same.pattern.branches[2].segment = 11;
    same.pattern.branches[1].dilation = same.pattern.branches[2].dilation = 1000;
    EXPECT_EQ(meaning_of(plan, problem), meaning_of(same)) << name(phase);
  }
}

TEST(Plan, NothingToDoIsAnEmptyPlan) {
  Problem problem;
  problem.tokens = 0;
  problem.pattern = make_pattern(Preset::longnet, {16}, {1}, 1);
  problem = resolve(problem);
  EXPECT_TRUE(make_plan(problem).tasks.empty());
  EXPECT_TRUE(make_plan(problem).spans.empty());
  EXPECT_EQ(count_pairs(problem), 0);

  problem.tokens = 9;
  problem.documents = {0, 0, 9, 9, 9};
  EXPECT_EQ(make_plan(problem).spans.size(), 1u);
  problem.pattern.branches[0].head_count = 0;  // nobody takes part
  EXPECT_TRUE(meaning_of(make_plan(problem), problem).pairs.empty());
  EXPECT_EQ(count_pairs(problem), 0);
}

// The detached gradient is another one where a head takes part in several branches.
TEST(Plan, BranchesHaveDeltasWhereTheyShareAHead) {
  Problem problem;
  problem.tokens = 100;
  problem.heads = 4;
  problem.head_dim = 8;
  const auto deltas = [&](const Pattern& pattern, Gradient gradient) {
    problem.pattern = pattern;
    problem.pattern.gradient = gradient;
    return has_branch_deltas(resolve(problem));
  };
  const Pattern two = make_pattern(Preset::torchscale, {10, 20}, {1, 2}, 4);
  EXPECT_TRUE(deltas(two, Gradient::detached));
  EXPECT_FALSE(deltas(two, Gradient::exact));
  EXPECT_FALSE(deltas(make_pattern(Preset::torchscale, {10}, {1}, 4), Gradient::detached));
  EXPECT_FALSE(deltas(make_pattern(Preset::head_groups, {10, 20}, {1, 2}, 4), Gradient::detached));
  Pattern idle = two;
  idle.branches[1].head_count = 0;
  EXPECT_FALSE(deltas(idle, Gradient::detached));
}

TEST(Plan, ARunOfWholeSegmentsIsOneTask) {
  Problem problem;
  problem.tokens = 1000;
  problem.pattern = make_pattern(Preset::longnet, {64}, {1}, 1);
  const Plan plan = make_plan(resolve(problem));
  ASSERT_EQ(plan.tasks.size(), 2u);
  EXPECT_EQ(plan.tasks[0], (Task{.branch = 0, .begin = 0, .length = 64, .count = 15, .padded_rows = 0}));
  EXPECT_EQ(plan.tasks[1], (Task{.branch = 0, .begin = 960, .length = 40, .count = 1, .padded_rows = 0}));
}

}  // namespace
}  // namespace annulus
