#include "kernels/cuda/sum_plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <map>
#include <numeric>

#include "plan/phase.h"

namespace annulus::cuda {
namespace {

// Counters of all, so that they are cleared in no time.
constexpr std::int64_t kMostCounters = 1 << 14;

// Regions share slots where that saves memory that counts, and where it costs no time: where two warps of a
// multiprocessor keep up with the rounding (tiles of 128 keys that meet 2,048 queries each finish 0.8 bytes of dq in a
// nanosecond: too much), and where a window is not the whole sequence (docs/hopper-backward.md has what was measured).
constexpr std::int64_t kSharedBytes = 256 << 20;  // that a slot for each region would take
constexpr double kSharedQueries = 2500;
// Slots are for tiles that run, for regions that are being rounded, and as many for what comes late.
constexpr std::int64_t kTilesAhead = 3;  // for each block that the device holds

// The dilation where there is one branch; else 1.
std::int64_t stride_of(const Problem& problem) {
  const annulus::Branch& first = problem.pattern.branches.front();
  const std::int64_t longest = std::max<std::int64_t>(1, std::min(first.segment, problem.tokens));
  return problem.pattern.branches.size() == 1 ? std::min(first.dilation, longest) : 1;
}

// Of so many positions of a problem.
SumLayout layout_of(const Problem& problem, std::int64_t positions) {
  const std::vector<annulus::Branch>& branches = problem.pattern.branches;
  if (branches.size() == 1) return {positions, static_cast<int>(stride_of(problem)), 1};
  int pair = 1;
  for (const annulus::Branch& branch : branches)
    if (branch.dilation == 2 || branch.dilation == 4) pair = std::max(pair, static_cast<int>(branch.dilation));
  return {positions, 1, pair};
}

// Queries that a key meets, of one head: how long a row of dq takes to be computed.
double queries_of_key(const Problem& problem) {
  double queries = 0;
  for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
    const annulus::Branch& branch = problem.pattern.branches[b];
    const auto length = static_cast<double>(std::min(branch.segment, problem.tokens));
    double share = 0;  // of rows that take part
    for (std::int64_t head = 0; head < problem.heads; ++head)
      share += static_cast<double>(classes_of(problem, static_cast<int>(b), head).count) /
               static_cast<double>(branch.dilation * problem.heads);
    queries += share * std::ceil(length / static_cast<double>(branch.dilation));
  }
  return problem.causal ? queries / 2 : queries;
}

// 0: a slot for each region. Sets order sweeps, which add to a region at several times.
std::int64_t tiles_ahead(const Problem& problem, const Schedule& schedule, const Regions& regions,
                         const SumRules& rules) {
  if (rules.deterministic || schedule.set_count > 0) return 0;
  if (rules.tiles_ahead >= 0) return rules.tiles_ahead;
  const std::int64_t bytes =
      problem.batch * problem.heads * problem.tokens * problem.head_dim * static_cast<std::int64_t>(sizeof(float));
  const bool pays = bytes > kSharedBytes && queries_of_key(problem) >= kSharedQueries && regions.windows > 1;
  return pays ? kTilesAhead * rules.blocks : 0;
}

// The tiles of one region in a schedule.
struct TileSpan {
  unsigned tiles = 0;
  std::int64_t first = INT64_MAX, last = -1;
};

// Tile `block`, `residue` of a cell: the inverse of place() in tiling.h.
std::int64_t tile_index(const Stretch& stretch, int block, int residue, int cell, int head, int batch) {
  std::int64_t index = 0, unit = 1;
  const auto put = [&](int at, int count) {
    index += at * unit;
    unit *= count;
  };
  const bool is_first = stretch.order == TileOrder::blocks_first;
  if (is_first) put(block, stretch.blocks);
  if (is_first) put(residue, stretch.residues);
  put(cell % stretch.inner_cells, stretch.inner_cells);
  put(head, stretch.heads);
  put(cell / stretch.inner_cells, stretch.outer_cells);
  put(batch, stretch.batches);
  if (stretch.order == TileOrder::residues_last) put(block, stretch.blocks);
  if (!is_first) put(residue, stretch.residues);
  if (stretch.order == TileOrder::blocks_last || stretch.order == TileOrder::blocks_back) put(block, stretch.blocks);
  return stretch.first_tile + index;
}

std::vector<TileSpan> find_spans(const Schedule& schedule, const Regions& regions) {
  std::vector<TileSpan> spans(static_cast<std::size_t>(regions.count));
  for (const Stretch& stretch : schedule.stretches) {
    const Sweep& sweep = schedule.tiling.sweeps[stretch.sweep];
    struct Cells {
      int first = INT_MAX, last = -1;
    };
    std::map<std::int64_t, Cells> windows;
    for (int i = 0; i < stretch.inner_cells * stretch.outer_cells; ++i) {
      const int begin = stretch.grid_begin + (stretch.first_cell + i) * sweep.cell;
      const int last = stretch.document_begin + std::min(begin + sweep.cell, stretch.grid_end) - 1;
      Cells& cells = windows[last / regions.length];
      cells.first = std::min(cells.first, i);
      cells.last = i;
    }
    for (const auto& [window, cells] : windows)
      for (int batch = 0; batch < stretch.batches; ++batch)
        for (int head = 0; head < stretch.heads; ++head) {
          TileSpan& span = spans[static_cast<std::size_t>(
              regions.index(stretch.first_batch + batch, window * regions.length, stretch.first_head + head))];
          const int count = (cells.last - cells.first + 1) * stretch.blocks * stretch.residues;
          span.tiles += static_cast<unsigned>(count);
          span.first = std::min(span.first, tile_index(stretch, 0, 0, cells.first, head, batch));
          span.last = std::max(span.last,
                               tile_index(stretch, stretch.blocks - 1, stretch.residues - 1, cells.last, head, batch));
        }
  }
  return spans;
}

// The fewest slots with which a region begins so many tiles behind the end of the one before in its slot.
std::size_t count_slots(const std::vector<TileSpan>& spans, const std::vector<int>& order, std::int64_t tiles_ahead) {
  std::size_t slots = 1;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t due = spans[static_cast<std::size_t>(order[i])].last + tiles_ahead;
    while (i + slots < order.size() && spans[static_cast<std::size_t>(order[i + slots])].first < due) ++slots;
  }
  return slots;
}

}  // namespace

bool has_sum_layout(const Problem& problem) {
  const std::int64_t stride = stride_of(problem);
  return stride * (((problem.tokens + stride - 1) / stride + 7) / 8 * 8) <= INT_MAX;
}

SumLayout sum_layout(const Problem& problem) { return layout_of(problem, problem.tokens); }

// The longest segment, or a few of them, where all others nest in it; else the whole sequence.
std::int64_t region_length(const Problem& problem, const Plan& plan, int stride) {
  if (problem.tokens == 0 || problem.batch == 0) return 1;
  std::int64_t longest = 1;
  for (const annulus::Branch& branch : problem.pattern.branches)
    longest = std::max(longest, std::min(branch.segment, problem.tokens));
  bool nests = plan.spans.size() == 1;
  for (const annulus::Branch& branch : problem.pattern.branches)
    nests = nests && longest % std::min(branch.segment, problem.tokens) == 0;
  if (!nests) return problem.tokens;
  const std::int64_t segments = (problem.tokens + longest - 1) / longest;
  const std::int64_t most = std::max<std::int64_t>(1, kMostCounters / (problem.batch * problem.kv_heads));
  const std::int64_t for_counters = (segments + most - 1) / most;
  const std::int64_t for_runs = (std::int64_t{Regions::kRunRows} * stride + longest - 1) / longest;
  return std::min(problem.tokens, std::max(for_counters, for_runs) * longest);
}

RegionTable make_region_table(const Schedule& schedule, const Regions& regions, std::int64_t tokens,
                              std::int64_t tiles_ahead) {
  const std::vector<TileSpan> spans = find_spans(schedule, regions);
  std::vector<int> order(spans.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int region) { return spans[static_cast<std::size_t>(region)].first; });
  RegionTable table;
  const std::size_t slots = count_slots(spans, order, tiles_ahead);
  const bool all_have_tiles = std::ranges::all_of(spans, [](const TileSpan& span) { return span.tiles > 0; });
  // For less than half of the memory: rounding while others compute has its price too. (The sequence may not fill its
  // last window.)
  const std::int64_t rows = regions.count / std::max(1, regions.windows) * tokens;
  const bool shares =
      tiles_ahead > 0 && all_have_tiles && 2 * static_cast<std::int64_t>(slots) * regions.length <= rows;
  table.slots = static_cast<int>(shares ? slots : spans.size());
  table.regions.resize(spans.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    table.regions[i].tiles = spans[i].tiles;
    Region& region = table.regions[static_cast<std::size_t>(order[i])];
    region.slot = static_cast<int>(shares ? i % slots : i);
    if (shares && i >= slots) region.before = order[i - slots];
  }
  table.order = std::move(order);
  return table;
}

SumPlan plan_sums(const Problem& problem, const Plan& plan, const Schedule& schedule, const SumRules& rules) {
  const int stride = sum_layout(problem).stride;
  const std::int64_t sharers = problem.heads / problem.kv_heads;
  const auto regions_of = [&](std::int64_t length) {
    return Regions(problem.tokens, length, problem.batch, problem.kv_heads, sharers, stride);
  };
  SumPlan sums;
  sums.regions = regions_of(region_length(problem, plan, stride));
  sums.table =
      make_region_table(schedule, sums.regions, problem.tokens, tiles_ahead(problem, schedule, sums.regions, rules));
  const std::int64_t positions = sums.regions.windows * sums.regions.length;
  if (!sums.table.shares() && positions > problem.tokens / 16 * 17) {  // too much for the last window
    sums.regions = regions_of(problem.tokens);
    sums.table = make_region_table(schedule, sums.regions, problem.tokens, 0);
  }
  sums.of_head = layout_of(problem, sums.regions.length);
  sums.rows = sums.table.slots * sharers * sums.of_head.rows;
  return sums;
}

}  // namespace annulus::cuda
