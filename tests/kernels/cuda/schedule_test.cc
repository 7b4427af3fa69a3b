// The schedule, without a GPU: every row is written once, every query sees each key as often as branches have it, and
// nothing waits for what comes after it.
#include "kernels/cuda/schedule.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "plan/phase.h"
#include "support/describe.h"
#include "support/draw_case.h"

namespace annulus::cuda {
namespace {

constexpr TileShape kShapes[] = {{128, 160}, {192, 128}, {64, 64}, {3, 2}};

// How often a row saw each key, and whether it was written.
struct Row {
  std::vector<int> keys;  // [position]
  std::vector<int> met;   // [position]: however often each counted
  int zero_keys = 0;
  int written = 0;
  bool has_state = false;
};

struct Walk {
  std::map<std::tuple<int, int, int>, Row> rows;  // batch, head, position
  std::string fault;
};

void note(std::string& fault, const std::string& text) {
  if (fault.empty()) fault = text;
}

Walk walk(const Problem& problem, const Schedule& schedule, int arrivals_per_tile) {
  Walk result;
  Tiling tiling = schedule.tiling;
  tiling.classes = schedule.classes.data();
  tiling.anchors = schedule.anchors.data();
  std::vector<int> arrivals(static_cast<std::size_t>(schedule.set_count), 0);
  std::map<std::int64_t, std::tuple<int, int, int>> state;  // state row -> who has it
  int at = 0;
  for (std::int64_t index = 0; index < schedule.tile_count; ++index) {
    at = find_stretch(schedule.stretches.data(), static_cast<int>(schedule.stretches.size()), index, at);
    const Stretch& stretch = schedule.stretches[static_cast<std::size_t>(at)];
    if (index < stretch.first_tile || index >= stretch.first_tile + stretch.tiles())
      note(result.fault, "wrong stretch");
    if (stretch.wait_set != kNoSet && arrivals[static_cast<std::size_t>(stretch.wait_set)] != stretch.wait_count)
      note(result.fault, "a tile waits for what comes after it");
    Tile tile;
    locate(tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
    const Sweep& sweep = tiling.sweeps[tile.sweep];
    for (int i = 0; i < tile.rows; ++i) {
      const int position = tile.position + i * sweep.stride;
      const auto key = std::tuple(tile.batch, tile.head, position);
      Row& row = result.rows[key];
      row.keys.resize(static_cast<std::size_t>(problem.tokens));
      row.met.resize(static_cast<std::size_t>(problem.tokens));
      for (int b = 0; b < tile.branch_count; ++b) {
        const TileBranch& part = tile.branches[b];
        const int dilation = tiling.branches[part.branch].dilation;
        const int visible = problem.causal ? std::min(part.keys, part.first + part.step * i + 1) : part.keys;
        if (visible > part.blocks * tiling.shape.key_rows) note(result.fault, "keys left out");
        if (part.key_begin + dilation * (part.first + part.step * i) != position) note(result.fault, "diagonal");
        for (int n = 0; n < visible; ++n) {
          const auto at_key = static_cast<std::size_t>(part.key_begin + dilation * n);
          row.keys.at(at_key) += key_count(tiling, tile, part, n);
          ++row.met.at(at_key);
        }
      }
      row.zero_keys += tile.zero_keys;
      const std::int64_t state_row = tile.state_row + static_cast<std::int64_t>(i) * sweep.stride;
      if (sweep.continues && row.has_state && state[state_row] != key) note(result.fault, "another row's state");
      if (!sweep.is_last && tile.total_blocks > 0) {
        if (state_row < 0 || state_row >= schedule.state_rows) note(result.fault, "state outside");
        const auto owner = state.find(state_row);
        if (owner != state.end() && owner->second != key && result.rows[owner->second].written == 0)
          note(result.fault, "state overwritten");
        state[state_row] = key;
        row.has_state = true;
      }
      if (sweep.is_last) ++row.written;
    }
    if (sweep.is_last && sweep.step > 1)
      for (int i = 0; i < tiling.shape.query_rows; ++i)
        for (int e = 0; e < sweep.step; ++e) {
          const int position = tile.clear_begin + i * sweep.stride + e;
          if (position >= tile.cell_end || e == tile.position - tile.clear_begin) continue;
          ++result.rows[{tile.batch, tile.head, position}].written;
        }
    if (tile.signal_set != kNoSet) arrivals[static_cast<std::size_t>(tile.signal_set)] += arrivals_per_tile;
  }
  return result;
}

// What eq. 1 to 3 say, position by position.
std::string compare(const Problem& problem, const Walk& walked) {
  if (!walked.fault.empty()) return walked.fault;
  const Plan plan = make_plan(problem);
  if (walked.rows.size() != static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens))
    return "rows left out, or rows that are none";
  for (const Span& span : plan.spans)
    for (std::int64_t batch = 0; batch < problem.batch; ++batch)
      for (std::int64_t head = 0; head < problem.heads; ++head)
        for (std::int64_t t = span.begin; t < span.end; ++t) {
          const Row& row = walked.rows.at({static_cast<int>(batch), static_cast<int>(head), static_cast<int>(t)});
          if (row.written != 1) return "row written " + std::to_string(row.written) + " times";
          std::vector<int> keys(static_cast<std::size_t>(problem.tokens), 0);
          std::int64_t zero_keys = 0;
          for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
            const annulus::Branch& branch = problem.pattern.branches[b];
            const Classes classes = classes_of(problem, static_cast<int>(b), head);
            const std::int64_t begin = span.begin + (t - span.begin) / branch.segment * branch.segment;
            const std::int64_t end = branch.segment > span.end - begin ? span.end : begin + branch.segment;
            const std::int64_t own = (t - begin) % branch.dilation;
            if (own < classes.first || own >= classes.first + classes.count) continue;
            for (std::int64_t key = begin + own; key < (problem.causal ? t + 1 : end); key += branch.dilation)
              ++keys[static_cast<std::size_t>(key)];
            const std::int64_t all = 1 + (end - 1 - begin - own) / branch.dilation;
            if (problem.pattern.pad_like_torchscale && !problem.causal && end - begin < branch.segment)
              zero_keys += 1 + (std::min(branch.segment, span.end - span.begin) - 1) / branch.dilation - all;
          }
          if (row.keys.empty() ? std::ranges::any_of(keys, [](int count) { return count > 0; }) : row.keys != keys)
            return "wrong keys";
          if (row.zero_keys != zero_keys) return "zero keys";
        }
  return "";
}

std::string faults(const Problem& problem, const ScheduleRules& rules) {
  const std::string fault =
      compare(problem, walk(problem, make_schedule(problem, make_plan(problem), rules), rules.arrivals));
  return fault.empty() ? "" : fault + " in " + support::describe(problem);
}

// As the schedule cuts it.
std::int64_t dilation_of(const Problem& problem, const annulus::Branch& branch) {
  return std::min({branch.dilation, branch.segment, std::max<std::int64_t>(problem.tokens, 1)});
}

std::vector<std::vector<int>> one_sweep(const Problem& problem) {
  std::vector<int> all(problem.pattern.branches.size());
  std::iota(all.begin(), all.end(), 0);
  return {all};
}

RC_GTEST_PROP(ScheduleProperty, TilesAreTheProblem, ()) {
  const Problem problem = support::draw_problem(90, 4);
  ScheduleRules rules;
  rules.shape = *rc::gen::elementOf(std::vector<TileShape>(std::begin(kShapes), std::end(kShapes)));
  rules.arrivals = static_cast<int>(support::draw_between(1, 3));
  rules.folds = support::draw_bool();
  rules.state_bytes = support::draw_between(1, 20000);
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// Each branch alone, whatever would be chosen: state then passes through memory.
RC_GTEST_PROP(ScheduleProperty, AnyOrderOfSweepsIsRight, ()) {
  const Problem problem = support::draw_problem(90, 4);
  ScheduleRules rules;
  rules.shape = {3, 2};
  rules.folds = support::draw_bool();
  rules.state_bytes = support::draw_between(1, 20000);
  for (int b = 0; b < static_cast<int>(problem.pattern.branches.size()); ++b) rules.forced_sweeps.push_back({b});
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// All branches in one sweep, however their segments lie: cells are cut where any segment ends.
RC_GTEST_PROP(ScheduleProperty, SegmentsThatDoNotNestShareASweep, ()) {
  const Problem problem = support::draw_dividing_problem(150);
  ScheduleRules rules;
  rules.shape = *rc::gen::elementOf(std::vector<TileShape>(std::begin(kShapes), std::end(kShapes)));
  rules.arrivals = static_cast<int>(support::draw_between(1, 3));
  rules.folds = support::draw_bool();
  rules.forced_sweeps = one_sweep(problem);
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// Two sweeps, each with cuts of its own: state passes from cells of one kind to cells of another.
RC_GTEST_PROP(ScheduleProperty, SweepsWithCutsHandStateOn, ()) {
  const Problem problem = support::draw_dividing_problem(150);
  ScheduleRules rules;
  rules.shape = {3, 2};
  rules.folds = support::draw_bool();
  rules.state_bytes = support::draw_between(1, 20000);
  rules.forced_sweeps.resize(2);
  for (int b = 0; b < static_cast<int>(problem.pattern.branches.size()); ++b)
    rules.forced_sweeps[static_cast<std::size_t>(b % 2)].push_back(b);
  if (rules.forced_sweeps[1].empty()) rules.forced_sweeps.pop_back();
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// Segments that grow with their dilations: all branches of a tile have keys in common.
RC_GTEST_PROP(ScheduleProperty, KeysOfSeveralBranchesCountAsOften, ()) {
  Problem problem = support::draw_nested_problem(200);
  ScheduleRules rules;
  rules.shape = *rc::gen::elementOf(std::vector<TileShape>(std::begin(kShapes), std::end(kShapes)));
  rules.folds = true;
  std::int64_t stride = 1;
  for (const annulus::Branch& branch : problem.pattern.branches)
    stride = std::max(stride, dilation_of(problem, branch));
  const bool can_share = std::ranges::all_of(problem.pattern.branches, [&](const annulus::Branch& branch) {
    return stride % dilation_of(problem, branch) == 0;
  });
  if (can_share && support::draw_bool()) rules.forced_sweeps = one_sweep(problem);
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// Where segments nest and dilations double, no pair is computed twice.
TEST(Schedule, KeysOfSeveralBranchesAreMetOnce) {
  for (const bool causal : {false, true})
    for (const Phase phase : {Phase::by_head, Phase::by_head_block, Phase::every}) {
      Problem problem;
      problem.tokens = 600;  // the last segments are cut
      problem.heads = 8;
      problem.head_dim = 64;
      problem.causal = causal;
      problem.pattern = make_pattern(Preset::longnet, {32, 64, 128, 256, 512}, {1, 2, 4, 8, 16}, 8);
      problem.pattern.phase = phase;
      problem = resolve(problem);
      ScheduleRules rules;
      rules.shape = {3, 2};
      rules.forced_sweeps = {{0, 1, 2, 3, 4}};
      for (const bool folds : {false, true}) {
        rules.folds = folds;
        int most = 0;
        for (const auto& [key, row] : walk(problem, make_schedule(problem, make_plan(problem), rules), 1).rows)
          most = std::max(most, row.met.empty() ? 0 : *std::ranges::max_element(row.met));
        EXPECT_EQ(most == 1, folds) << most;
      }
    }
}

Problem many_branches(bool causal) {
  Problem problem;
  problem.tokens = 1 << 19;
  problem.heads = 16;
  problem.head_dim = 128;
  problem.dtype = DType::bf16;
  problem.causal = causal;
  problem.pattern = make_pattern(Preset::longnet, {2048, 4096, 8192, 16384, 32768}, {1, 2, 4, 8, 16}, 16);
  return resolve(problem);
}

Schedule schedule_of(const Problem& problem) {
  ScheduleRules rules;
  rules.shape = {128, 160};
  return make_schedule(problem, make_plan(problem), rules);
}

TEST(Schedule, OneSweepWhereThePatternNestsAndNothingIsWasted) {
  const Problem problem = many_branches(false);
  const Schedule schedule = schedule_of(problem);
  EXPECT_EQ(schedule.sweep_count, 1);
  EXPECT_EQ(schedule.state_rows, 0);
  EXPECT_EQ(schedule.stretches.size(), 1u);
}

TEST(Schedule, OneSweepWhereSegmentsDoNotNest) {
  Problem problem = many_branches(false);
  problem.pattern = make_pattern(Preset::longnet, {2048, 8999}, {1, 4}, 16);
  problem = resolve(problem);
  const Schedule schedule = schedule_of(problem);
  EXPECT_EQ(schedule.sweep_count, 1);
  EXPECT_EQ(schedule.state_rows, 0);
  EXPECT_LE(schedule.stretches.size(), 65536u);
}

// A plan stays small: with a cut in every cell of a long sequence, sweeps go one after the other.
TEST(Schedule, SweepsStayApartWhereCutsWouldBeTooMany) {
  Problem problem = many_branches(false);
  problem.tokens = 1 << 28;
  problem.documents.clear();
  problem.pattern = make_pattern(Preset::longnet, {2048, 2049}, {1, 1}, 16);
  problem = resolve(problem);
  const Schedule schedule = schedule_of(problem);
  EXPECT_EQ(schedule.sweep_count, 2);
  EXPECT_LE(schedule.stretches.size(), 65536u);
}

TEST(Schedule, CausalProblemsSplitAndTheirStateIsBounded) {
  const Problem problem = many_branches(true);
  ScheduleRules rules;
  rules.shape = {128, 128};
  const Schedule schedule = make_schedule(problem, make_plan(problem), rules);
  EXPECT_GT(schedule.sweep_count, 1);
  EXPECT_LE(schedule.state_rows * (problem.head_dim + 2) * 4, 256ll << 20);
}

TEST(Schedule, HeadsApartNeedNoState) {
  Problem problem = many_branches(true);
  problem.pattern = make_pattern(Preset::head_groups, {2048, 3000}, {1, 7}, 16);
  problem = resolve(problem);
  ScheduleRules rules;
  rules.shape = {128, 128};
  const Schedule schedule = make_schedule(problem, make_plan(problem), rules);
  EXPECT_EQ(schedule.sweep_count, 2);
  EXPECT_EQ(schedule.state_rows, 0);
}

}  // namespace
}  // namespace annulus::cuda
