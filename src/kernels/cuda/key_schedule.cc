#include "kernels/cuda/key_schedule.h"

#include <algorithm>
#include <climits>
#include <map>
#include <numeric>

#include "plan/phase.h"

namespace annulus::cuda {
namespace {

// Of queries: two tiles for each of an H200's multiprocessors, and less than half of its cache for their sums of dQ.
constexpr std::int64_t kChunkRows = 40960;
// When causal, and tiles add to dQ one after the other: with so many groups in turn as the cache has room for, since
// all tiles of a group are at other queries. Q, dO and the sums of dQ of one head.
constexpr std::int64_t kOrderedCausalBytes = 32 << 20;
// There, tiles of a group come from the last to the first, each with its own queries first: the one behind has just
// left them, so nobody waits. But that ends with the longest tiles, so the last of all tiles, at least so many, come
// the other way round.
constexpr std::int64_t kForwardTiles = 256;

// One head for each key/value head, with every class: which of them a query head takes is asked tile by tile.
Problem problem_of_keys(Problem problem) {
  problem.heads = problem.kv_heads;
  problem.pattern.phase = Phase::every;
  for (annulus::Branch& branch : problem.pattern.branches) {
    branch.first_head = 0;
    branch.head_count = problem.kv_heads;
    branch.classes.clear();
  }
  return problem;
}

std::int32_t class_of(const Problem& problem, int branch, std::int64_t head, int dilation) {
  const Classes classes = classes_of(problem, branch, head);
  if (classes.count == 0) return kNoClass;
  if (problem.pattern.phase == Phase::every) return kEveryClass;
  return classes.first < dilation ? static_cast<std::int32_t>(classes.first) : kNoClass;
}

void give_classes(const Problem& problem, Schedule& schedule) {
  schedule.tiling.heads = static_cast<int>(problem.heads);
  schedule.anchors.assign(static_cast<std::size_t>(schedule.sweep_count * problem.heads), 0);
  schedule.classes.clear();
  for (int b = 0; b < schedule.tiling.branch_count; ++b)
    for (std::int64_t head = 0; head < problem.heads; ++head)
      schedule.classes.push_back(class_of(problem, schedule.branch_order[static_cast<std::size_t>(b)], head,
                                          schedule.tiling.branches[b].dilation));
}

// Cuts stretches into chunks and lets each walk its blocks slowly: when causal, from the longest to the shortest.
class Chunker {
 public:
  Chunker(const Problem& problem, TileOrder order, Schedule& schedule)
      : problem_(problem),
        order_(order),
        chunk_rows_(order == TileOrder::blocks_last && problem.causal ? kOrderedCausalBytes / (8 * problem.head_dim)
                                                                      : kChunkRows),
        schedule_(schedule) {}

  void cut_all() {
    std::vector<Stretch> given;
    given.swap(schedule_.stretches);
    schedule_.tile_count = 0;
    for (const Stretch& stretch : given) cut(stretch);
    if (order_ == TileOrder::blocks_last && problem_.causal) turn_back();
  }

 private:
  // Queries that are under way together, in one head and cell: of one residue, or of all.
  std::int64_t rows(const Stretch& stretch) const {
    const Sweep& sweep = schedule_.tiling.sweeps[stretch.sweep];
    const std::int64_t positions =
        std::min(std::int64_t{stretch.inner_cells} * sweep.cell, std::int64_t{stretch.grid_end} - stretch.grid_begin);
    const int residues = order_ == TileOrder::blocks_last ? stretch.residues : 1;
    return positions / sweep.stride * residues * (problem_.heads / problem_.kv_heads);
  }

  void cut(const Stretch& stretch) {
    const std::int64_t most = std::max<std::int64_t>(1, chunk_rows_ / std::max<std::int64_t>(1, rows(stretch)));
    const std::int64_t of_batch = std::int64_t{stretch.outer_cells} * stretch.heads;
    if (stretch.batches > 1 && stretch.batches * of_batch > most)
      return cut_by(stretch, &Stretch::batches, &Stretch::first_batch,
                    static_cast<int>(std::max<std::int64_t>(1, most / of_batch)), 1);
    if (stretch.outer_cells > 1 && of_batch > most)
      return cut_by(stretch, &Stretch::outer_cells, &Stretch::first_cell,
                    static_cast<int>(std::max<std::int64_t>(1, most / stretch.heads)), stretch.inner_cells);
    if (stretch.heads > most) return cut_by(stretch, &Stretch::heads, &Stretch::first_head, static_cast<int>(most), 1);
    push(stretch);
  }

  // Pieces of at most `most`; one further in `count` is `unit` further in `first`.
  void cut_by(const Stretch& stretch, int Stretch::*count, int Stretch::*first, int most, int unit) {
    for (int done = 0; done < stretch.*count; done += most) {
      Stretch piece = stretch;
      piece.*first += done * unit;
      piece.*count = std::min(most, stretch.*count - done);
      if (count == &Stretch::heads) piece.state_row += std::int64_t{done} * stretch.state_span;
      cut(piece);
    }
  }

  void turn_back() {
    std::int64_t behind = 0;  // tiles
    for (auto stretch = schedule_.stretches.rbegin(); stretch != schedule_.stretches.rend(); ++stretch) {
      if (behind >= kForwardTiles) stretch->order = TileOrder::blocks_back;
      behind += stretch->tiles();
    }
  }

  void push(Stretch stretch) {
    stretch.order = order_;
    stretch.first_tile = schedule_.tile_count;
    schedule_.tile_count += stretch.tiles();
    schedule_.stretches.push_back(stretch);
  }

  const Problem& problem_;
  TileOrder order_;
  std::int64_t chunk_rows_;
  Schedule& schedule_;
};

// Counters of all, so that they are cleared in no time.
constexpr std::int64_t kMostCounters = 1 << 14;

}  // namespace

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

namespace {

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

Schedule make_key_schedule(const Problem& problem, const Plan& plan, const ScheduleRules& rules) {
  const bool shared = problem.heads != problem.kv_heads;
  Schedule schedule = make_schedule(shared ? problem_of_keys(problem) : problem, plan, rules);
  if (shared) give_classes(problem, schedule);
  schedule.tiling.causal = false;  // blocks in their own order
  if (rules.in_order)
    Chunker(problem, TileOrder::blocks_last, schedule).cut_all();
  else if (problem.causal)
    Chunker(problem, TileOrder::residues_last, schedule).cut_all();
  return schedule;
}

}  // namespace annulus::cuda
