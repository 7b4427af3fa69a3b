// S_i(t, j) against facts counted out by hand and against segments built by walking through the documents.
#include "reference/keys.h"

#include <map>
#include <set>
#include <utility>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "reference/draw_problem.h"

namespace annulus::reference {
namespace {

using Keys = std::vector<std::int64_t>;

Problem make_problem(std::int64_t tokens, std::int64_t heads, Pattern pattern) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.head_dim = 1;
  problem.pattern = std::move(pattern);
  return problem;
}

RowKeys collect(const Problem& problem, std::int64_t t, std::int64_t head) {
  RowKeys row;
  KeySets(problem).collect(t, head, row);
  return row;
}

Keys keys_of(const Problem& problem, std::int64_t t, std::int64_t head) { return collect(problem, t, head).key; }

TEST(KeySets, SegmentsAreCutAndTheLastIsShort) {
  const Problem problem = resolve(make_problem(10, 1, make_pattern(Preset::longnet, {4}, {1}, 1)));
  EXPECT_EQ(keys_of(problem, 0, 0), (Keys{0, 1, 2, 3}));
  EXPECT_EQ(keys_of(problem, 7, 0), (Keys{4, 5, 6, 7}));
  EXPECT_EQ(keys_of(problem, 9, 0), (Keys{8, 9}));
}

TEST(KeySets, CausalStopsAtTheQuery) {
  Problem problem = make_problem(10, 1, make_pattern(Preset::residue, {10}, {3}, 1));
  problem.causal = true;
  problem = resolve(problem);
  EXPECT_EQ(keys_of(problem, 0, 0), (Keys{0}));
  EXPECT_EQ(keys_of(problem, 7, 0), (Keys{1, 4, 7}));
  EXPECT_EQ(keys_of(problem, 8, 0), (Keys{2, 5, 8}));
}

TEST(KeySets, SegmentsAndClassesStartAnewInEachDocument) {
  Problem problem = make_problem(11, 1, make_pattern(Preset::residue, {4}, {2}, 1));
  problem.documents = {0, 3, 3, 4, 11};
  problem = resolve(problem);
  EXPECT_EQ(keys_of(problem, 2, 0), (Keys{0, 2}));
  EXPECT_EQ(keys_of(problem, 3, 0), (Keys{3}));
  EXPECT_EQ(keys_of(problem, 5, 0), (Keys{5, 7}));
  EXPECT_EQ(keys_of(problem, 10, 0), (Keys{8, 10}));
}

TEST(KeySets, ByHeadGoesRound) {
  const Problem problem = resolve(make_problem(8, 5, make_pattern(Preset::longnet, {8}, {3}, 5)));
  for (std::int64_t j = 0; j < 5; ++j)
    for (std::int64_t t = 0; t < 8; ++t) EXPECT_EQ(collect(problem, t, j).covered(), t % 3 == j % 3) << t << " " << j;
}

TEST(KeySets, ByHeadBlockGivesTwelveHeadsSixOfEightClasses) {
  const Problem problem = resolve(make_problem(16, 12, make_pattern(Preset::torchscale, {16}, {8}, 12)));
  const std::int64_t class_of_head[12] = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5};  // ceil(12 / 8) = 2 heads a class
  for (std::int64_t j = 0; j < 12; ++j)
    for (std::int64_t t = 0; t < 16; ++t) {
      const Keys expected = t % 8 == class_of_head[j] ? Keys{t % 8, t % 8 + 8} : Keys{};
      EXPECT_EQ(keys_of(problem, t, j), expected) << t << " " << j;
    }
}

TEST(KeySets, ByHeadBlockWithMoreClassesThanHeads) {
  const Problem problem = resolve(make_problem(16, 3, make_pattern(Preset::torchscale, {16}, {8}, 3)));
  for (std::int64_t j = 0; j < 3; ++j)
    for (std::int64_t t = 0; t < 16; ++t) EXPECT_EQ(collect(problem, t, j).covered(), t % 8 == j) << t << " " << j;
}

TEST(KeySets, EveryCoversEveryPosition) {
  const Problem problem = resolve(make_problem(29, 3, make_pattern(Preset::residue, {7, 30, 2}, {3, 5, 9}, 3)));
  for (std::int64_t j = 0; j < 3; ++j)
    for (std::int64_t t = 0; t < 29; ++t) {
      const RowKeys row = collect(problem, t, j);
      std::set<int> branches;  // that reach the query itself
      for (std::size_t e = 0; e < row.key.size(); ++e)
        if (row.key[e] == t) branches.insert(row.branch[e]);
      EXPECT_EQ(branches, (std::set<int>{0, 1, 2}));
    }
}

TEST(KeySets, HeadGroupsDealsEachHeadToOneBranch) {
  const Problem problem = resolve(make_problem(12, 8, make_pattern(Preset::head_groups, {4, 6, 12}, {1, 2, 2}, 8)));
  const int branch_of_head[8] = {0, 0, 0, 1, 1, 1, 2, 2};  // 3, 3 and 2 heads
  const std::int64_t class_of_branch[3] = {0, 1, 0};       // i mod r
  for (std::int64_t j = 0; j < 8; ++j)
    for (std::int64_t t = 0; t < 12; ++t) {
      const RowKeys row = collect(problem, t, j);
      const int i = branch_of_head[j];
      const Branch& branch = problem.pattern.branches[static_cast<std::size_t>(i)];
      EXPECT_EQ(row.covered(), t % branch.segment % branch.dilation == class_of_branch[i]) << t << " " << j;
      for (const int from : row.branch) EXPECT_EQ(from, i);
    }
  EXPECT_EQ(problem.pattern.output_scale, 1.0 / 3);
}

TEST(KeySets, TableAndHeadRange) {
  Pattern pattern = make_pattern(Preset::longnet, {6}, {3}, 4);
  pattern.phase = Phase::table;
  pattern.branches[0].first_head = 1;
  pattern.branches[0].head_count = 2;
  pattern.branches[0].classes = {2, 0};
  const Problem problem = resolve(make_problem(6, 4, pattern));
  EXPECT_EQ(keys_of(problem, 5, 0), Keys{});
  EXPECT_EQ(keys_of(problem, 5, 1), (Keys{2, 5}));
  EXPECT_EQ(keys_of(problem, 3, 2), (Keys{0, 3}));
  EXPECT_EQ(keys_of(problem, 5, 2), Keys{});
  EXPECT_EQ(keys_of(problem, 5, 3), Keys{});
}

TEST(KeySets, AHeadRangeDoesNotRenumberTheHeads) {
  for (const Phase phase : {Phase::by_head, Phase::by_head_block}) {
    Pattern pattern = make_pattern(Preset::longnet, {6}, {3}, 6);
    pattern.phase = phase;
    const Problem whole = resolve(make_problem(6, 6, pattern));
    pattern.branches[0].first_head = 2;
    const Problem part = resolve(make_problem(6, 6, pattern));
    for (std::int64_t j = 0; j < 6; ++j)
      for (std::int64_t t = 0; t < 6; ++t)
        EXPECT_EQ(keys_of(part, t, j), j < 2 ? Keys{} : keys_of(whole, t, j)) << t << " " << j;
  }
}

TEST(KeySets, AKeyOfTwoBranchesCountsTwice) {
  const Problem problem = resolve(make_problem(4, 1, make_pattern(Preset::longnet, {4, 2}, {1, 1}, 1)));
  EXPECT_EQ(keys_of(problem, 0, 0), (Keys{0, 0, 1, 1, 2, 3}));
}

TEST(KeySets, DilationAboveTheSegmentLeavesSingleRows) {
  const Problem problem = resolve(make_problem(7, 1, make_pattern(Preset::residue, {3}, {5}, 1)));
  for (std::int64_t t = 0; t < 7; ++t) EXPECT_EQ(keys_of(problem, t, 0), Keys{t});
}

TEST(KeySets, HugeSegmentsAndDilationsDoNotOverflow) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const Problem problem = resolve(make_problem(3, 2, make_pattern(Preset::torchscale, {kHuge}, {kHuge}, 2)));
  EXPECT_EQ(keys_of(problem, 1, 1), Keys{1});
  EXPECT_EQ(keys_of(problem, 2, 1), Keys{});
}

TEST(KeySets, ZeroKeysFillAShortLastSegment) {
  Pattern pattern = make_pattern(Preset::torchscale, {8, 100}, {2, 4}, 1);
  pattern.phase = Phase::every;
  pattern.pad_like_torchscale = true;
  Problem problem = resolve(make_problem(21, 1, pattern));
  EXPECT_EQ(collect(problem, 3, 0).zero_keys, (std::vector<std::int64_t>{0, 1}));   // class 3 of 21 by 4: 5 keys of 6
  EXPECT_EQ(collect(problem, 16, 0).zero_keys, (std::vector<std::int64_t>{1, 0}));  // 16, 18, 20 of 4; 0, 4, ..., 20
  EXPECT_EQ(collect(problem, 17, 0).zero_keys, (std::vector<std::int64_t>{2, 1}));  // 17, 19 of 4
  problem.causal = true;
  EXPECT_EQ(collect(problem, 17, 0).zero_keys, (std::vector<std::int64_t>{0, 0}));
}

// Walks through the documents and lists the groups, rather than asking where a position lies.
RC_GTEST_PROP(KeySets, AgreeWithAWalkThroughTheSegments, ()) {
  const Problem problem = draw_problem(40);
  const std::int64_t head = draw_between(0, problem.heads - 1);
  std::map<std::int64_t, std::multiset<std::pair<std::int64_t, int>>> expected;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    if (head < branch.first_head || head - branch.first_head >= branch.head_count) continue;
    const std::int64_t heads_a_class = (problem.heads + branch.dilation - 1) / branch.dilation;
    for (std::size_t d = 1; d < problem.documents.size(); ++d) {
      std::int64_t begin = problem.documents[d - 1];
      while (begin < problem.documents[d]) {
        const std::int64_t end = std::min(begin + branch.segment, problem.documents[d]);
        for (std::int64_t c = 0; c < branch.dilation; ++c) {
          const Phase phase = problem.pattern.phase;
          if (phase == Phase::by_head && head % branch.dilation != c) continue;
          if (phase == Phase::by_head_block && (head < c * heads_a_class || head >= (c + 1) * heads_a_class)) continue;
          if (phase == Phase::table && branch.classes.at(static_cast<std::size_t>(head - branch.first_head)) != c)
            continue;
          for (std::int64_t t = begin + c; t < end; t += branch.dilation)
            for (std::int64_t k = begin + c; k < (problem.causal ? t + 1 : end); k += branch.dilation)
              expected[t].insert({k, static_cast<int>(i)});
        }
        begin = end;
      }
    }
  }
  for (std::int64_t t = 0; t < problem.tokens; ++t) {
    const RowKeys row = collect(problem, t, head);
    std::multiset<std::pair<std::int64_t, int>> got;
    for (std::size_t e = 0; e < row.key.size(); ++e) got.insert({row.key[e], row.branch[e]});
    RC_ASSERT(got == expected[t]);
    RC_ASSERT(std::is_sorted(row.key.begin(), row.key.end()));
  }
}

}  // namespace
}  // namespace annulus::reference
