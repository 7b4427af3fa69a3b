// Tiles of keys, without a GPU: every row of keys is written once, meets every query that sees it once, and nothing
// waits for what comes after it. Queries and keys of a region meet no others, its tiles are counted, and it begins when
// the one before in its slot has ended. Where tiles of a group wait for each other, they come in their order.
#include "kernels/cuda/key_schedule.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "kernels/cuda/key_tiles.h"
#include "kernels/cuda/sum_plan.h"
#include "plan/phase.h"
#include "support/describe.h"
#include "support/draw_case.h"

namespace annulus::cuda {
namespace {

struct Row {
  std::map<int, std::vector<int>> queries;  // head -> [position]: how often
  int written = 0;
};
using Rows = std::map<std::tuple<int, int, int>, Row>;  // batch, key/value head, position

Regions regions_of(const Problem& problem, int stride) {
  return {problem.tokens,
          region_length(problem, make_plan(problem), stride),
          problem.batch,
          problem.kv_heads,
          problem.heads / problem.kv_heads,
          stride};
}

// What a walk through all tiles says of the table of regions. `first`, `last`: tiles of each.
std::string compare_regions(const Schedule& schedule, const Regions& regions, std::int64_t tokens,
                            const std::vector<unsigned>& tiles, const std::vector<std::int64_t>& first,
                            const std::vector<std::int64_t>& last) {
  for (const std::int64_t ahead : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}}) {
    const RegionTable table = make_region_table(schedule, regions, tokens, ahead);
    std::vector<int> of_slot(static_cast<std::size_t>(std::max(table.slots, 1)), Region::kNone);
    std::int64_t begun = -1;
    for (const int number : table.order) {
      const auto i = static_cast<std::size_t>(number);
      const Region& region = table.regions.at(i);
      if (region.tiles != tiles.at(i)) return "tiles of a region miscounted";
      if (first[i] < begun) return "a region rounded before one that begins earlier";
      begun = first[i];
      if (!table.shares() && region.before != Region::kNone) return "a region that waits for nothing";
      if (table.shares() && region.tiles == 0) return "a region without tiles that waits";
      if (region.before != of_slot.at(static_cast<std::size_t>(region.slot))) return "two regions in one slot";
      of_slot[static_cast<std::size_t>(region.slot)] = number;
      if (region.before != Region::kNone && last[static_cast<std::size_t>(region.before)] + ahead > first[i])
        return "a region begins before the one in its slot has ended";
    }
    if (begun < 0 && schedule.tile_count > 0) return "no region";
    if (table.shares() && 2 * table.slots > regions.count) return "slots for more than half of the regions";
  }
  return "";
}

std::string walk(const Problem& problem, const Schedule& schedule, Rows& rows) {
  std::string fault;
  const auto note = [&](const char* text) {
    if (fault.empty()) fault = text;
  };
  Tiling tiling = schedule.tiling;
  tiling.classes = schedule.classes.data();
  tiling.anchors = schedule.anchors.data();
  const int sharers = static_cast<int>(problem.heads / problem.kv_heads);
  std::vector<int> arrivals(static_cast<std::size_t>(schedule.set_count), 0);
  std::map<std::int64_t, std::tuple<int, int, int>> state;  // state row -> who has it
  const Regions regions = regions_of(problem, 1);
  std::vector<unsigned> ended(static_cast<std::size_t>(regions.count), 0);
  std::vector<std::int64_t> first_tile(ended.size(), INT64_MAX), last_tile(ended.size(), -1);
  int at = 0;
  for (std::int64_t index = 0; index < schedule.tile_count; ++index) {
    at = find_stretch(schedule.stretches.data(), static_cast<int>(schedule.stretches.size()), index, at);
    const Stretch& stretch = schedule.stretches[static_cast<std::size_t>(at)];
    if (stretch.wait_set != kNoSet && arrivals[static_cast<std::size_t>(stretch.wait_set)] != stretch.wait_count)
      note("a tile waits for what comes after it");
    Tile tile;
    locate(tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
    const int kv_head = tile.head;
    const std::int64_t window = (tile.cell_end - 1) / regions.length;
    const auto region = static_cast<std::size_t>(regions.index(tile.batch, tile.cell_end - 1, kv_head));
    ++ended.at(region);
    first_tile[region] = std::min(first_tile[region], index);
    last_tile[region] = index;
    for (int head = kv_head * sharers; head < (kv_head + 1) * sharers; ++head) {
      take_head(tiling, stretch, problem.causal, head, tile);
      for (int b = 0; b < tile.branch_count; ++b) {
        const TileBranch& part = tile.branches[b];
        const int dilation = tiling.branches[part.branch].dilation;
        const int begin = first_block(part, problem.causal, tiling.shape.key_rows) * tiling.shape.key_rows;
        if (begin + part.blocks * tiling.shape.key_rows < part.keys) note("queries left out");
        const int last = part.key_begin + dilation * (part.keys - 1);
        if (part.key_begin / regions.length != window || last / regions.length != window)
          note("queries of another region");
        for (int i = 0; i < tile.rows; ++i) {
          const int low = problem.causal ? std::max(0, part.first + part.step * i) : 0;
          if (low < begin) note("a query before the first block");
          std::vector<int>& queries = rows[{tile.batch, kv_head, tile.position + i * tile.stride}].queries[head];
          queries.resize(static_cast<std::size_t>(problem.tokens));
          for (int n = low; n < part.keys; ++n)
            queries.at(static_cast<std::size_t>(part.key_begin + dilation * n)) += key_count(tiling, tile, part, n);
        }
      }
    }
    for (int i = 0; i < tile.rows; ++i) {
      const auto key = std::tuple(tile.batch, kv_head, tile.position + i * tile.stride);
      const std::int64_t state_row = tile.state_row + static_cast<std::int64_t>(i) * tile.stride;
      if (tile.continues && state.contains(state_row) && state[state_row] != key && rows[state[state_row]].written == 0)
        note("another row's state");
      if (!tile.is_last) {
        if (state_row < 0 || state_row >= schedule.state_rows) note("state outside");
        state[state_row] = key;
      }
      if (tile.is_last) ++rows[key].written;
    }
    for (int i = 0; tile.is_last && i < tiling.shape.query_rows; ++i)
      for (int e = 0; e < tile.step; ++e) {
        const int position = tile.clear_begin + i * tile.stride + e;
        if (position < tile.cell_end && e != tile.position - tile.clear_begin)
          ++rows[{tile.batch, kv_head, position}].written;
      }
    if (tile.signal_set != kNoSet) ++arrivals[static_cast<std::size_t>(tile.signal_set)];
  }
  if (fault.empty()) fault = compare_regions(schedule, regions, problem.tokens, ended, first_tile, last_tile);
  return fault;
}

// What eq. 1 to 3 say of the queries that see a key, position by position.
std::string compare(const Problem& problem, const Rows& rows) {
  if (rows.size() != static_cast<std::size_t>(problem.batch * problem.kv_heads * problem.tokens))
    return "rows left out, or rows that are none";
  const std::int64_t sharers = problem.heads / problem.kv_heads;
  const Plan plan = make_plan(problem);
  for (const Span& span : plan.spans)
    for (const auto& [key, row] : rows) {
      const auto [batch, kv_head, position] = key;
      if (position < span.begin || position >= span.end) continue;
      if (row.written != 1) return "row written " + std::to_string(row.written) + " times";
      for (std::int64_t head = kv_head * sharers; head < (kv_head + 1) * sharers; ++head) {
        std::vector<int> queries(static_cast<std::size_t>(problem.tokens), 0);
        for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
          const annulus::Branch& branch = problem.pattern.branches[b];
          const Classes classes = classes_of(problem, static_cast<int>(b), head);
          const std::int64_t begin = span.begin + (position - span.begin) / branch.segment * branch.segment;
          const std::int64_t end = branch.segment > span.end - begin ? span.end : begin + branch.segment;
          const std::int64_t own = (position - begin) % branch.dilation;
          if (own < classes.first || own >= classes.first + classes.count) continue;
          for (std::int64_t query = problem.causal ? position : begin + own; query < end; query += branch.dilation)
            ++queries[static_cast<std::size_t>(query)];
        }
        const auto found = row.queries.find(static_cast<int>(head));
        if (found == row.queries.end() ? std::ranges::any_of(queries, [](int count) { return count > 0; })
                                       : found->second != queries)
          return "wrong queries";
      }
    }
  return "";
}

std::string faults(const Problem& problem, const ScheduleRules& rules) {
  Rows rows;
  std::string fault = walk(problem, make_key_schedule(problem, make_plan(problem), rules), rows);
  if (fault.empty()) fault = compare(problem, rows);
  return fault.empty() ? "" : fault + " in " + support::describe(problem);
}

RC_GTEST_PROP(KeyScheduleProperty, TilesAreTheProblem, ()) {
  const Problem problem = support::draw_problem(90, 4);
  ScheduleRules rules;
  rules.shape = support::draw_bool() ? TileShape{128, 64} : TileShape{3, 2};
  rules.folds = support::draw_bool();
  rules.state_bytes = support::draw_between(1, 20000);
  if (support::draw_bool())
    for (int b = 0; b < static_cast<int>(problem.pattern.branches.size()); ++b) rules.forced_sweeps.push_back({b});
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// All branches in one sweep, however their segments lie.
RC_GTEST_PROP(KeyScheduleProperty, SegmentsThatDoNotNestShareASweep, ()) {
  const Problem problem = support::draw_dividing_problem(150);
  ScheduleRules rules;
  rules.shape = support::draw_bool() ? TileShape{128, 64} : TileShape{3, 2};
  rules.folds = support::draw_bool();
  rules.forced_sweeps.emplace_back();
  for (int b = 0; b < static_cast<int>(problem.pattern.branches.size()); ++b) rules.forced_sweeps[0].push_back(b);
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// Segments that grow with their dilations: all branches of a tile have queries in common.
RC_GTEST_PROP(KeyScheduleProperty, QueriesOfSeveralBranchesCountAsOften, ()) {
  const Problem problem = support::draw_nested_problem(200);
  ScheduleRules rules;
  rules.shape = support::draw_bool() ? TileShape{128, 64} : TileShape{3, 2};
  rules.folds = true;
  const std::string fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// To each block of queries the tiles of its group come by their turns, though others may come between.
std::string order_faults(const Problem& problem, const Schedule& schedule) {
  Tiling tiling = schedule.tiling;
  tiling.classes = schedule.classes.data();
  tiling.anchors = schedule.anchors.data();
  const int sharers = static_cast<int>(problem.heads / problem.kv_heads);
  const SumLayout sums(problem.tokens, tiling.branches[0].dilation, 1);
  std::map<std::tuple<int, int, int>, int> added;  // batch, head, row of a block's first query -> tiles so far
  int at = 0;
  for (std::int64_t index = 0; index < schedule.tile_count; ++index) {
    at = find_stretch(schedule.stretches.data(), static_cast<int>(schedule.stretches.size()), index, at);
    const Stretch& stretch = schedule.stretches[static_cast<std::size_t>(at)];
    Tile tile;
    locate(tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
    const int kv_head = tile.head;
    for (int head = kv_head * sharers; head < (kv_head + 1) * sharers; ++head) {
      take_head(tiling, stretch, problem.causal, head, tile);
      for (int b = 0; b < tile.branch_count; ++b) {
        const TileBranch& part = tile.branches[b];
        const int first = first_block(part, problem.causal, tiling.shape.key_rows);
        for (int n = first; n < first + part.blocks; ++n) {
          const int position = part.key_begin + tiling.branches[part.branch].dilation * n * tiling.shape.key_rows;
          const int turn = turn_of(stretch.order, part, n * tiling.shape.key_rows, tiling.shape.query_rows);
          if (added[{tile.batch, head, sums.row(position)}]++ != turn)
            return "a tile before its turn in " + support::describe(problem);
        }
      }
    }
  }
  return "";
}

RC_GTEST_PROP(KeyScheduleProperty, TilesOfAGroupComeInOrder, ()) {
  Problem problem = support::draw_problem(300, 6);
  problem.pattern.branches.resize(1);
  ScheduleRules rules;
  rules.shape = support::draw_bool() ? TileShape{128, 64} : TileShape{6, 3};
  rules.in_order = true;
  const Schedule schedule = make_key_schedule(problem, make_plan(problem), rules);
  std::string fault = order_faults(problem, schedule);
  if (fault.empty()) fault = faults(problem, rules);
  if (!fault.empty()) RC_FAIL(fault);
}

// Tiles of one group wait for each other, so those of many groups come in turn, as far as the cache likes it: heads,
// cells, batches and residues.
TEST(KeySchedule, TilesInOrderComeInTurnWithThoseOfOtherGroups) {
  Problem problem;
  problem.tokens = 1 << 13;
  problem.batch = 4;
  problem.heads = 4;
  problem.head_dim = 64;
  problem.dtype = DType::bf16;
  problem.pattern = make_pattern(Preset::residue, {2048}, {2}, 4);
  problem = resolve(problem);
  ScheduleRules rules;
  rules.shape = {128, 128};
  rules.in_order = true;
  const Schedule schedule = make_key_schedule(problem, make_plan(problem), rules);
  EXPECT_EQ(schedule.tile_count, 4 * 4 * 64);
  EXPECT_EQ(schedule.stretches.size(), 4u);  // 32,768 queries each
  for (const Stretch& stretch : schedule.stretches) {
    EXPECT_EQ(stretch.order, TileOrder::blocks_last);
    EXPECT_EQ(stretch.tiles() / stretch.blocks, 32);  // groups
  }
}

// Causal, in order: from the last tile of a group on, but for so many at the end that all multiprocessors end together.
TEST(KeySchedule, CausalTilesInOrderComeFromTheLastOneOn) {
  Problem problem;
  problem.tokens = 1 << 14;
  problem.heads = 16;
  problem.head_dim = 64;
  problem.dtype = DType::bf16;
  problem.causal = true;
  problem.pattern = make_pattern(Preset::longnet, {2048}, {1}, 16);
  problem = resolve(problem);
  ScheduleRules rules;
  rules.shape = {128, 128};
  rules.in_order = true;
  const Schedule schedule = make_key_schedule(problem, make_plan(problem), rules);
  EXPECT_EQ(schedule.tile_count, 16 * 128);
  ASSERT_EQ(schedule.stretches.size(), 4u);  // 65,536 queries each: 32 MiB of Q, dO and sums
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_EQ(schedule.stretches[i].order, i < 3 ? TileOrder::blocks_back : TileOrder::blocks_last);
  EXPECT_EQ(order_faults(problem, schedule), "");
}

// The same of a dilation, with fewer key heads and a shorter segment at the end; blocks of half a tile.
TEST(KeySchedule, TurnsOfTilesFromTheLastOneOn) {
  Problem problem;
  problem.tokens = 12'100;
  problem.batch = 2;
  problem.heads = 12;
  problem.kv_heads = 4;
  problem.head_dim = 128;
  problem.dtype = DType::bf16;
  problem.causal = true;
  problem.pattern = make_pattern(Preset::residue, {3000}, {3}, 12);
  problem = resolve(problem);
  ScheduleRules rules;
  rules.shape = {128, 64};
  rules.in_order = true;
  const Schedule schedule = make_key_schedule(problem, make_plan(problem), rules);
  EXPECT_EQ(schedule.stretches.front().order, TileOrder::blocks_back);
  EXPECT_EQ(schedule.stretches.back().order, TileOrder::blocks_last);
  EXPECT_EQ(order_faults(problem, schedule), "");
}

// Causal: the longest tiles of a chunk first, chunks of heads whose sums of dq fit the cache.
TEST(KeySchedule, CausalTilesComeInChunksLongestFirst) {
  Problem problem;
  problem.tokens = 1 << 14;
  problem.heads = 16;
  problem.head_dim = 128;
  problem.dtype = DType::bf16;
  problem.causal = true;
  problem.pattern = make_pattern(Preset::longnet, {2048}, {1}, 16);
  problem = resolve(problem);
  ScheduleRules rules;
  rules.shape = {128, 64};
  const Schedule schedule = make_key_schedule(problem, make_plan(problem), rules);
  EXPECT_EQ(schedule.stretches.size(), 8u);
  EXPECT_EQ(schedule.tile_count, 16 * 128);
  for (const Stretch& stretch : schedule.stretches) EXPECT_EQ(stretch.order, TileOrder::residues_last);
}

}  // namespace
}  // namespace annulus::cuda
