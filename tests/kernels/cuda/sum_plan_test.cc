// Where dq is added up, without a GPU: every row has one place, runs have every row once, slots are shared where that
// pays. (That a region begins when the one before in its slot has ended: key_schedule_test.cc, tile by tile.)
#include "kernels/cuda/sum_plan.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>

#include "kernels/cuda/key_schedule.h"
#include "support/draw_case.h"

namespace annulus::cuda {
namespace {

TEST(SumPlan, RegionsAreAsShortAsSegmentsAllow) {
  const auto length = [](std::int64_t tokens, const std::vector<std::int64_t>& segments,
                         const std::vector<std::int64_t>& documents = {}, int stride = 1) {
    Problem problem;
    problem.tokens = tokens;
    problem.head_dim = 64;
    problem.pattern = make_pattern(Preset::longnet, segments, std::vector<std::int64_t>(segments.size(), 1), 1);
    problem.documents = documents;
    problem = resolve(problem);
    return region_length(problem, make_plan(problem), stride);
  };
  EXPECT_EQ(length(16384, {2048, 4096}), 4096);
  EXPECT_EQ(length(10000, {2048}), 2048);
  EXPECT_EQ(length(10000, {2048, 3000}), 10000) << "segments that do not nest";
  EXPECT_EQ(length(10000, {2048}, {0, 5000, 10000}), 10000) << "documents begin anywhere";
  EXPECT_EQ(length(1 << 20, {16}), 64) << "not too many counters";
  EXPECT_EQ(length(1 << 16, {160}, {}, 16), 1120) << "whole runs";
  EXPECT_EQ(length(1000, {160}, {}, 160), 1000) << "no longer than the sequence";
}

// Runs of all regions have every row of every query head once, neighbours in the order of the sums.
RC_GTEST_PROP(RegionsProperty, RunsHaveEveryRowOnce, ()) {
  Problem problem = support::draw_dividing_problem(400);
  const int stride = static_cast<int>(support::draw_between(1, 12));
  const int sharers = static_cast<int>(problem.heads / problem.kv_heads);
  const Regions regions(problem.tokens, region_length(problem, make_plan(problem), stride), problem.batch,
                        problem.kv_heads, sharers, stride);
  const SumLayout layout(problem.tokens, stride, 1), of_slot(regions.length, stride, 1);
  std::vector<int> taken(static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens), 0);
  for (std::int64_t region = 0; region < regions.count; ++region)
    for (int i = 0; i < regions.runs; ++i) {
      const Run run(regions, sharers, problem.tokens, stride, region, i);
      const int in_slot = run.rows == 0 ? 0 : run.row_in_window(of_slot);
      RC_ASSERT(in_slot % 8 == 0);  // groups are rounded whole
      for (std::int64_t row = run.first; row < run.first + run.rows; ++row) {
        const std::int64_t position = row * stride + run.residue;
        RC_ASSERT(of_slot.row(static_cast<int>(position - run.begin)) == in_slot + row - run.first);
        RC_ASSERT(in_slot + row - run.first < of_slot.rows);
        RC_ASSERT(regions.index(run.batch, position, run.head / sharers) == region);
        RC_ASSERT(run.row(layout) + row - run.first == layout.row(static_cast<int>(position)));
        ++taken.at(static_cast<std::size_t>((run.batch * problem.heads + run.head) * problem.tokens + position));
      }
    }
  RC_ASSERT(std::ranges::count(taken, 1) == std::ssize(taken));
}

// No int holds the positions of the row kernel's longest sequences.
TEST(Regions, RunsOfVeryLongSequences) {
  const std::int64_t tokens = (std::int64_t{1} << 33) + 5;
  const Regions regions(tokens, tokens, 1, 1, 1, 1);
  const cuda::Run last(regions, 1, tokens, 1, 0, regions.runs - 1);
  EXPECT_EQ(last.first + last.rows, tokens);
  EXPECT_EQ(last.rows, 5);
}

// A few regions are under way together, however many there are.
TEST(SumPlan, SharesSlotsWhereRegionsAreMany) {
  const auto slots = [](std::int64_t tokens, std::int64_t segment, std::int64_t ahead) {
    Problem problem;
    problem.tokens = tokens;
    problem.batch = 2;
    problem.heads = 16;
    problem.head_dim = 64;
    problem.dtype = DType::bf16;
    problem.pattern = make_pattern(Preset::longnet, {segment}, {1}, 16);
    problem = resolve(problem);
    ScheduleRules rules;
    rules.shape = {128, 128};
    const Schedule schedule = make_key_schedule(problem, make_plan(problem), rules);
    const Regions regions(tokens, region_length(problem, make_plan(problem), 1), problem.batch, problem.kv_heads, 1, 1);
    return make_region_table(schedule, regions, tokens, ahead).slots;
  };
  EXPECT_EQ(slots(1 << 14, 2048, 396), 26);  // 16 tiles a region: 412 tiles later the slot is taken again
  EXPECT_EQ(slots(1 << 19, 2048, 396), 26) << "the same, however long";
  EXPECT_EQ(slots(1 << 14, 2048, 0), 256) << "a slot each";
  EXPECT_EQ(slots(1 << 14, 1 << 14, 396), 5);  // 128 tiles a region
  EXPECT_EQ(slots(1 << 14, 1 << 14, 10000), 32) << "not worth it";
  EXPECT_EQ(slots(15000, 2048, 396), 46) << "shorter segments at the end have fewer tiles";
}

TEST(SumPlan, HasNoPlaceForSparseRowsOfVeryManyResidues) {
  Problem problem;
  problem.head_dim = 64;
  for (const auto& [tokens, dilation, fits] : {std::tuple{std::int64_t{1} << 28, std::int64_t{1} << 27, true},
                                               {std::int64_t{1} << 29, (std::int64_t{1} << 29) - 5, false},
                                               {std::int64_t{1} << 30, std::int64_t{1}, true}}) {
    problem.tokens = tokens;
    problem.pattern = make_pattern(Preset::longnet, {tokens}, {dilation}, 1);
    EXPECT_EQ(has_sum_layout(resolve(problem)), fits) << tokens << ", dilation " << dilation;
  }
}

// Every number has a place of its own, and 8 rows at steps up to `pair` fill lines of 2 rows by 16 columns.
TEST(SumLayout, RowsFillLines) {
  constexpr int kDim = 64;
  for (const int pair : {1, 2, 4}) {
    const SumLayout layout(96, 1, pair);
    std::vector<int> taken(static_cast<std::size_t>(layout.rows * kDim / 16), 0);
    for (int row = 0; row < layout.rows; ++row)
      for (int column = 0; column < kDim; column += 16) {
        const std::int64_t place = layout.place(row, kDim, column);
        EXPECT_EQ(place % 16, 0);
        ++taken.at(static_cast<std::size_t>(place / 16));
      }
    EXPECT_EQ(std::ranges::count(taken, 1), std::ssize(taken));
    for (const int step : {1, 2, 4, 8}) {
      std::set<std::int64_t> lines;
      for (int i = 0; i < 8; ++i) lines.insert(layout.place(i * step, kDim, 0) / 32);
      EXPECT_EQ(lines.size(), step <= pair ? 4u : 8u) << "pair " << pair << ", step " << step;
    }
  }
}

// What docs/performance.md and docs/hopper-backward.md say of an H200: which patterns share slots, and what their sums
// take.
struct Shared {
  const char* what;
  std::vector<std::int64_t> segments, dilations;
  std::int64_t tokens, head_dim;
  bool causal;
  std::int64_t mib;  // of sums of dq
};

class SumPlanOfAnH200 : public testing::TestWithParam<Shared> {};

TEST_P(SumPlanOfAnH200, TakesWhatTheDocumentsSay) {
  const Shared& shared = GetParam();
  Problem problem;
  problem.tokens = shared.tokens;
  problem.heads = 16;
  problem.head_dim = shared.head_dim;
  problem.dtype = DType::bf16;
  problem.causal = shared.causal;
  problem.pattern = make_pattern(Preset::residue, shared.segments, shared.dilations, 16);
  if (shared.segments.size() > 1) problem.pattern.phase = Phase::by_head_block;
  problem = resolve(problem);
  ScheduleRules rules;
  rules.shape = {128, shared.head_dim == 64 ? 128 : 64};
  rules.arrivals = 2;
  rules.folds = true;
  rules.state_bytes /= 2;
  const Plan plan = make_plan(problem);
  const SumPlan sums = plan_sums(problem, plan, make_key_schedule(problem, plan, rules), {.blocks = 132});
  EXPECT_EQ(sums.rows * problem.head_dim * 4 / (1 << 20), shared.mib);
  EXPECT_EQ(sums.table.shares(), shared.mib < problem.tokens * problem.heads * problem.head_dim * 4 / (1 << 20));
}

constexpr std::int64_t k16K = 16384, k256K = 262144, k512K = 524288;
INSTANTIATE_TEST_SUITE_P(
    SumPlan, SumPlanOfAnH200,
    testing::Values(Shared{"groups of 2,048", {2048}, {1}, k16K, 128, false, 128},
                    Shared{"groups of 2,048, r = 16", {32768}, {16}, k256K, 128, false, 2048},
                    Shared{"groups of 16,384, r = 16", {k256K}, {16}, k256K, 128, false, 2048},
                    Shared{"two branches", {2048, 4096}, {1, 2}, k512K, 128, false, 28},
                    Shared{"two branches, causal", {2048, 4096}, {1, 2}, k512K, 128, true, 4096},
                    Shared{"two branches, D = 64", {2048, 4096}, {1, 2}, k512K, 64, false, 14},
                    Shared{"five branches", {2048, 4096, 8192, 16384, 32768}, {1, 2, 4, 8, 16}, k512K, 128, false, 48}),
    [](const auto& shared) {
      std::string name;
      for (const char* c = shared.param.what; *c != 0; ++c)
        if (std::isalnum(static_cast<unsigned char>(*c)) != 0) name += *c;
      return name;
    });

}  // namespace
}  // namespace annulus::cuda
