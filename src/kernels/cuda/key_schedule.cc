#include "kernels/cuda/key_schedule.h"

#include <algorithm>

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

}  // namespace

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
