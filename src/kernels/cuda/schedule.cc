#include "kernels/cuda/schedule.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "plan/phase.h"

namespace annulus::cuda {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;        // sums of two positions fit an int
constexpr std::int64_t kMaxStretchTiles = std::int64_t{1} << 31;  // indices within a stretch are unsigned
constexpr int kMaxSearchedBranches = kMaxSweepBranches;           // 2^7 ways to group them
constexpr int kSlabsAtLeast = 6;                                  // so that sweeps of different slabs overlap
constexpr std::int64_t kLastTiles = 512;  // a few rounds of all multiprocessors, whose keys still fit the cache
// Where segments do not nest:
constexpr std::int64_t kMaxCutStretches = 65536;               // about 7 MB of a plan
constexpr std::int64_t kCutKeyBytes = std::int64_t{20} << 20;  // keys and values that cells of one segment share
constexpr int kSampledCells = 1024;                            // to tell what cuts cost

// Work is counted in pairs (query, key) that the matrix units see. What else a tile costs, in the same currency:
// loading and storing its queries takes about as long as so many keys do, and a row whose state passes through memory
// (2 * 4 bytes an element at 3.5 TB/s, against 4 FLOP an element and pair at 600 TFLOP/s) as long as so many pairs.
constexpr double kTileKeys = 128;
constexpr double kStatePairs = 400;
constexpr int kGroupRows = 64;  // a consumer group without rows does not compute

using Grouping = std::vector<std::vector<int>>;

int to_int(std::int64_t value) { return static_cast<int>(std::min<std::int64_t>(value, INT_MAX)); }
std::int64_t up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

class Maker {
 public:
  Maker(const Problem& problem, const Plan& plan, const ScheduleRules& rules)
      : problem_(problem), plan_(plan), rules_(rules) {
    for (const annulus::Branch& branch : problem.pattern.branches) {
      BranchShape shape;
      shape.segment = to_int(std::min(branch.segment, std::max<std::int64_t>(problem.tokens, 1)));
      shape.dilation = to_int(std::min<std::int64_t>(branch.dilation, shape.segment));
      shape.twos = std::countr_zero(static_cast<unsigned>(shape.dilation));
      shape.padded_segment = problem.pattern.pad_like_torchscale && !problem.causal ? to_int(branch.segment) : 0;
      shapes_.push_back(shape);
    }
  }

  Schedule make() {
    const Grouping grouping = choose_grouping(heads_are_apart());
    const bool apart =
        heads_are_apart() && std::ranges::all_of(grouping, [](const auto& group) { return group.size() == 1; });
    fill_tiling(grouping, apart);
    if (rules_.kept_rows > 0) {
      add_kept();
    } else if (apart || grouping.size() == 1) {
      for (const Span& span : by_length())
        for (int sweep = 0; sweep < schedule_.sweep_count; ++sweep) add_document(span, sweep);
      if (problem_.causal) put_longest_first();
    } else {
      add_slabs();
    }
    return std::move(schedule_);
  }

 private:
  // Every head in exactly one branch (`head_groups`): then branches never meet in a row.
  bool heads_are_apart() const {
    std::vector<int> taken(static_cast<std::size_t>(problem_.heads), 0);
    for (const annulus::Branch& branch : problem_.pattern.branches)
      for (std::int64_t j = 0; j < branch.head_count; ++j) ++taken[static_cast<std::size_t>(branch.first_head + j)];
    return std::ranges::all_of(taken, [](int count) { return count == 1; });
  }

  // ---- Which branches share a sweep

  // Of some branches: the numbers that make cells.
  struct Grid {
    int stride = 1;
    int cell = INT_MAX;
    int longest = 0;
    std::vector<int> uneven;  // segments that cells do not fill: they cut cells
    // That cuts bring, in one head of one batch: a run of cells between two of them has three at most.
    std::int64_t cut_stretches = 0;
  };
  Grid grid_of(const std::vector<int>& group) const {
    Grid grid;
    for (const int b : group) {
      grid.stride = std::max(grid.stride, shape(b).dilation);
      grid.cell = std::min(grid.cell, shape(b).segment);
      grid.longest = std::max(grid.longest, shape(b).segment);
    }
    for (const int b : group)
      if (shape(b).segment % grid.cell != 0) grid.uneven.push_back(shape(b).segment);
    for (const int segment : grid.uneven)
      for (const Span& span : plan_.spans) grid.cut_stretches += 3 * ((span.end - span.begin) / segment);
    return grid;
  }
  // The first place behind `at` where an uneven segment ends, or INT64_MAX.
  static std::int64_t next_cut(const Grid& grid, std::int64_t at) {
    std::int64_t next = INT64_MAX;
    for (const int segment : grid.uneven) next = std::min(next, (at / segment + 1) * segment);
    return next;
  }

  // Whether branches can share a sweep. Batches have stretches of their own, and slabs may give each head some too.
  bool can_share(const std::vector<int>& group, bool is_alone) const {
    const Grid grid = grid_of(group);
    const bool divides = std::ranges::all_of(group, [&](int b) { return grid.stride % shape(b).dilation == 0; });
    return divides && grid.cut_stretches * problem_.batch * (is_alone ? 1 : problem_.heads) <= kMaxCutStretches;
  }

  // Lengths of cells, those of a while at the longest document's begin.
  std::vector<std::int64_t> sample_cells(const Grid& grid) const {
    if (grid.uneven.empty() || plan_.spans.empty()) return {grid.cell};
    std::int64_t length = 0;
    for (const Span& span : plan_.spans) length = std::max(length, span.end - span.begin);
    std::vector<std::int64_t> cells;
    for (std::int64_t at = 0; at < length && cells.size() < kSampledCells; at += cells.back())
      cells.push_back(std::min({next_cut(grid, at), (at / grid.cell + 1) * grid.cell, length}) - at);
    return cells;
  }

  // Whether segments of a branch have those of a denser one in them, and its keys there are some of the other's for
  // every query that both cover: then they have one class there. Dilations are such that counts repeat soon.
  bool follows(const BranchShape& branch, const BranchShape& denser) const {
    const int shift = branch.twos - denser.twos;
    return shift >= 0 && 1 << shift <= kCountPeriod && denser.dilation << shift == branch.dilation &&
           (branch.segment % denser.segment == 0 || branch.segment == problem_.tokens);
  }

  // Positions of a branch's segment that a tile leaves out, since a denser branch of the sweep has its keys there:
  // about, for a chain is found tile by tile. With one class a head, only dilation 1 is sure to cover what another
  // branch does.
  double left_out(const std::vector<int>& group, int branch) const {
    const bool every = problem_.pattern.phase == Phase::every;
    int longest = 0;
    for (const int b : group) {
      const auto order = [&](int x) { return std::tuple(shape(x).dilation, shape(x).segment, x); };
      const bool is_before = order(b) < order(branch) && (every || shape(b).dilation == 1);
      if (rules_.folds && is_before && follows(shape(branch), shape(b))) longest = std::max(longest, shape(b).segment);
    }
    return longest;
  }

  // Pairs that the matrix units see for each position and head, with what the tiles cost beside them.
  double cost(const std::vector<int>& group, bool stores_state) const {
    const Grid grid = grid_of(group);
    const bool every = problem_.pattern.phase == Phase::every;
    double least_dilation = INT_MAX;
    for (const int b : group) least_dilation = std::min<double>(least_dilation, shape(b).dilation);
    const double covered = every ? 1 : 1 / least_dilation;
    double sum = 0;
    double positions = 0;
    for (const std::int64_t cell : sample_cells(grid)) {
      const std::int64_t rows = (cell + grid.stride - 1) / grid.stride;
      const std::int64_t tile_rows = up(rows, rules_.shape.query_rows);
      const std::int64_t group_rows = up(rows, kGroupRows);
      const double idle = 1 - static_cast<double>(group_rows) / static_cast<double>(tile_rows);
      const double computed = static_cast<double>(group_rows) * (1 + 0.3 * idle);  // fewer groups hide less
      const auto residues = static_cast<double>(std::min<std::int64_t>(grid.stride, cell));
      for (const int b : group) {
        const double dilation = shape(b).dilation;
        const double keys = shape(b).segment / dilation;
        const double span =
            static_cast<double>(std::min<std::int64_t>(std::int64_t{rules_.shape.query_rows} * grid.stride, cell)) /
            dilation;
        const double folded = left_out(group, b) / dilation;
        const double seen =
            problem_.causal ? (keys - folded + (folded > 0 ? 0 : span) + rules_.shape.key_rows) / 2
                            : static_cast<double>(up(static_cast<std::int64_t>(keys - folded), rules_.shape.key_rows));
        sum += computed * seen * residues / (every ? 1 : dilation);
      }
      sum += kTileKeys * static_cast<double>(tile_rows) * residues * covered;
      positions += static_cast<double>(cell);
    }
    sum /= positions;
    return stores_state ? sum + kStatePairs * covered : sum;
  }

  // Sparse branches first: only the rows that they cover have state to hand on.
  Grouping choose_grouping(bool apart) const {
    if (!rules_.forced_sweeps.empty()) return rules_.forced_sweeps;
    std::vector<int> order(shapes_.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int a, int b) {
      return shape(a).dilation != shape(b).dilation ? shape(a).dilation > shape(b).dilation
                                                    : shape(a).segment > shape(b).segment;
    });
    Grouping best;
    for (const int b : order) best.push_back({b});
    if (apart || order.size() > kMaxSearchedBranches) return best;
    double least = 0;
    for (std::size_t i = 0; i < best.size(); ++i) least += cost(best[i], i + 1 < best.size());
    for (unsigned cuts = 0; cuts + 1 < 1u << (order.size() - 1); ++cuts) {  // bit i: a cut behind order[i]
      Grouping grouping(1);
      for (std::size_t i = 0; i < order.size(); ++i) {
        grouping.back().push_back(order[i]);
        if (i + 1 < order.size() && (cuts >> i & 1) != 0) grouping.emplace_back();
      }
      if (!std::ranges::all_of(grouping, [&](const auto& group) { return can_share(group, grouping.size() == 1); }))
        continue;
      double sum = 0;
      for (std::size_t i = 0; i < grouping.size(); ++i) sum += cost(grouping[i], i + 1 < grouping.size());
      if (sum < least) {
        least = sum;
        best = grouping;
      }
    }
    return best;
  }

  // ---- The tiling

  void fill_tiling(const Grouping& grouping, bool apart) {
    Tiling& tiling = schedule_.tiling;
    tiling.shape = rules_.shape;
    tiling.heads = static_cast<int>(problem_.heads);
    tiling.causal = problem_.causal;
    schedule_.sweep_count = static_cast<int>(grouping.size());
    for (std::size_t i = 0; i < grouping.size(); ++i) {
      Sweep& sweep = tiling.sweeps[i];
      sweep.first_branch = tiling.branch_count;
      sweep.branch_count = static_cast<int>(grouping[i].size());
      if (sweep.branch_count > kMaxSweepBranches) throw std::logic_error("a sweep has more branches than a tile holds");
      const bool kept = rules_.kept_rows > 0;
      sweep.continues = kept || (!apart && i > 0);
      sweep.is_last = !kept && (apart || i + 1 == grouping.size());
      grids_.push_back(grid_of(grouping[i]));
      sweep.stride = grids_.back().stride;
      sweep.cell = grids_.back().cell;
      // Dense branches first: tiles of a cell that begin together then read the same rows, which are in the cache.
      // (Causal tiles of queries have theirs last: see gather_parts.)
      std::vector<int> dense_first = grouping[i];
      std::ranges::stable_sort(dense_first, {}, [&](int b) { return std::pair(shape(b).dilation, shape(b).segment); });
      for (const int b : dense_first) {
        BranchShape& own = tiling.branches[tiling.branch_count];
        own = shape(b);
        for (int before = sweep.first_branch; before < tiling.branch_count; ++before)
          if (follows(own, tiling.branches[before])) own.follows |= 1 << (before - sweep.first_branch);
        tiling.folds = tiling.folds || (rules_.folds && own.follows != 0);
        ++tiling.branch_count;
        schedule_.branch_order.push_back(b);
        for (std::int64_t head = 0; head < problem_.heads; ++head) schedule_.classes.push_back(class_of(b, head));
      }
    }
    for (int i = 0; i < schedule_.sweep_count; ++i) {
      Sweep& sweep = tiling.sweeps[i];
      const bool meets_all = sweep.is_last && !apart;  // whatever any branch covers must be walked to be written
      sweep.step = common_step(meets_all ? 0 : sweep.first_branch,
                               meets_all ? tiling.branch_count : sweep.first_branch + sweep.branch_count);
      for (std::int64_t head = 0; head < problem_.heads; ++head)
        schedule_.anchors.push_back(anchor_of(head, sweep, meets_all));
    }
  }

  std::int32_t class_of(int branch, std::int64_t head) const {
    const Classes classes = classes_of(problem_, branch, head);
    if (classes.count == 0) return kNoClass;
    if (problem_.pattern.phase == Phase::every) return kEveryClass;
    return classes.first < shape(branch).dilation ? static_cast<std::int32_t>(classes.first) : kNoClass;
  }
  std::int32_t taken(int branch, std::int64_t head) const {  // of the tiling's branches
    return schedule_.classes[static_cast<std::size_t>(branch * problem_.heads + head)];
  }

  // The largest step s so that all rows of a head that these branches cover lie in one class modulo s, or 1.
  int common_step(int begin, int end) const {
    const Tiling& tiling = schedule_.tiling;
    int step = INT_MAX;
    for (int b = begin; b < end; ++b) step = std::min(step, tiling.branches[b].dilation);
    if (problem_.pattern.phase == Phase::every) return 1;
    for (int b = begin; b < end; ++b) {
      if (tiling.branches[b].dilation % step != 0) return 1;
      if (end - begin > 1 && tiling.branches[b].segment % step != 0) return 1;  // else classes shift between segments
    }
    for (std::int64_t head = 0; head < problem_.heads; ++head) {
      int seen = kNoClass;
      for (int b = begin; b < end; ++b) {
        const int own = taken(b, head);
        if (own == kNoClass) continue;
        if (seen != kNoClass && seen != own % step) return 1;
        seen = own % step;
      }
    }
    return step;
  }

  std::int32_t anchor_of(std::int64_t head, const Sweep& sweep, bool meets_all) const {
    const int begin = meets_all ? 0 : sweep.first_branch;
    const int end = meets_all ? schedule_.tiling.branch_count : sweep.first_branch + sweep.branch_count;
    for (int b = begin; b < end && sweep.step > 1; ++b)
      if (taken(b, head) != kNoClass) return taken(b, head) % sweep.step;
    return 0;
  }

  // ---- The order of tiles

  std::vector<Span> by_length() const {  // longest work first
    std::vector<Span> spans = plan_.spans;
    std::ranges::stable_sort(spans, [](const Span& a, const Span& b) { return a.end - a.begin > b.end - b.begin; });
    return spans;
  }

  // The cells of positions [begin, end) of a document; `begin` is a multiple of the sweep's cell.
  void add_cells(const Stretch& stretch, std::int64_t begin, std::int64_t end) {
    const Grid& grid = grids_[static_cast<std::size_t>(stretch.sweep)];
    if (next_cut(grid, begin) >= end) return add_run(stretch, grid, begin, end);
    // Cells of one longest segment share its keys: those of a few heads at a time, so that they stay in the cache.
    const Stretch chunk = cut_chunk(stretch, grid);
    for (std::int64_t next; begin < end; begin = next) {
      next = std::min((begin / grid.longest + 1) * grid.longest, end);
      for (int batch = 0; batch < stretch.batches; batch += chunk.batches)
        for (int head = 0; head < stretch.heads; head += chunk.heads) {
          Stretch part = stretch;
          part.first_batch += batch;
          part.batches = std::min(chunk.batches, stretch.batches - batch);
          part.first_head += head;
          part.heads = std::min(chunk.heads, stretch.heads - head);
          part.state_row += std::int64_t{head} * stretch.state_span;
          for (std::int64_t at = begin, cut; at < next; at = cut) {
            cut = std::min(next_cut(grid, at), next);
            add_run(part, grid, at, cut);
          }
        }
    }
  }

  // The heads and batches that walk one longest segment together where cells are cut.
  Stretch cut_chunk(Stretch stretch, const Grid& grid) const {
    const std::int64_t row_bytes = problem_.head_dim * (problem_.dtype == DType::fp32 ? 4 : 2) * 2;
    const std::int64_t length = std::min(grid.longest, stretch.document_length);
    const std::int64_t most = std::max<std::int64_t>(
        1, kCutKeyBytes / std::max<std::int64_t>(1, length * row_bytes) * (problem_.heads / problem_.kv_heads));
    const std::int64_t chunks = (std::int64_t{stretch.heads} * stretch.batches + most - 1) / most;
    if (grid.cut_stretches * chunks > kMaxCutStretches) return stretch;
    stretch.batches = to_int(std::clamp<std::int64_t>(most / stretch.heads, 1, stretch.batches));
    stretch.heads = to_int(std::min<std::int64_t>(most, stretch.heads));
    return stretch;
  }

  // Positions [begin, end) of a document, which no uneven segment cuts: the rest of a cell, whole ones, in runs that
  // share a longer segment, and what is left.
  void add_run(Stretch stretch, const Grid& grid, std::int64_t begin, std::int64_t end) {
    const Sweep& sweep = schedule_.tiling.sweeps[stretch.sweep];
    const auto add = [&](std::int64_t inner, std::int64_t outer, std::int64_t length) {
      stretch.first_cell = static_cast<int>((begin - stretch.grid_begin) / sweep.cell);
      stretch.inner_cells = static_cast<int>(inner);
      stretch.outer_cells = static_cast<int>(outer);
      stretch.residues = divide_up(static_cast<int>(std::min<std::int64_t>(sweep.stride, length)), sweep.step);
      stretch.blocks = divide_up(divide_up(static_cast<int>(length), sweep.stride), rules_.shape.query_rows);
      begin += inner * outer * length;
      push(stretch);
    };
    if (begin % sweep.cell != 0) {
      const std::int64_t length = std::min(up(begin, sweep.cell), end) - begin;
      stretch.grid_begin = static_cast<int>(begin);
      stretch.grid_end = static_cast<int>(begin + length);
      add(1, 1, length);
    }
    stretch.grid_begin = 0;
    stretch.grid_end = static_cast<int>(end);
    const std::int64_t nest = grid.longest / sweep.cell;
    const std::int64_t whole = (end - begin) / sweep.cell;
    if (whole / nest > 0) add(nest, whole / nest, sweep.cell);
    if (whole % nest > 0) add(whole % nest, 1, sweep.cell);
    if (begin < end) add(1, 1, end - begin);
  }

  void push(Stretch stretch) {
    // Indices in a stretch have 32 bits: give the batches, then the heads, stretches of their own.
    if (stretch.tiles() >= kMaxStretchTiles && stretch.batches > 1)
      return split(stretch, &Stretch::batches, &Stretch::first_batch);
    if (stretch.tiles() >= kMaxStretchTiles && stretch.heads > 1)
      return split(stretch, &Stretch::heads, &Stretch::first_head);
    stretch.first_tile = schedule_.tile_count;
    schedule_.tile_count += stretch.tiles();
    schedule_.stretches.push_back(stretch);
  }
  void split(Stretch stretch, int Stretch::*count, int Stretch::*first) {
    Stretch half = stretch;
    half.*count /= 2;
    push(half);
    half.*first += half.*count;
    if (count == &Stretch::heads) half.state_row += std::int64_t{half.heads} * half.state_span;
    half.*count = stretch.*count - half.*count;
    push(half);
  }

  // Causal tiles of one group differ in length. In the last rounds long ones come before short ones, so that all
  // multiprocessors end together. Elsewhere tiles of a group stay together, for the sake of the cache.
  void put_longest_first() {
    if (schedule_.stretches.empty()) return;
    Stretch last = schedule_.stretches.back();
    // A group of many blocks fills all multiprocessors by itself, in the right order.
    if (last.blocks == 1 || last.blocks > kLastTiles / 8 || last.batches > 1) return;
    schedule_.stretches.pop_back();
    schedule_.tile_count = last.first_tile;
    const std::int64_t of_cell = last.tiles() / last.outer_cells;
    const int cells = static_cast<int>(std::clamp<std::int64_t>(kLastTiles / of_cell, 1, last.outer_cells));
    Stretch before = last;
    before.outer_cells -= cells;
    if (before.outer_cells > 0) push(before);
    last.outer_cells = cells;
    last.first_cell += before.outer_cells * last.inner_cells;
    last.order = TileOrder::residues_last;
    push(last);
  }

  Stretch whole_document(const Span& span, int sweep) const {
    Stretch stretch;
    stretch.sweep = sweep;
    stretch.document_begin = static_cast<int>(span.begin);
    stretch.document_length = static_cast<int>(span.end - span.begin);
    stretch.heads = static_cast<int>(problem_.heads);
    stretch.batches = static_cast<int>(problem_.batch);
    return stretch;
  }

  void add_document(const Span& span, int sweep) {
    Stretch stretch = whole_document(span, sweep);
    if (schedule_.sweep_count > 1) {  // heads apart: those of the sweep's one branch
      const int branch = schedule_.branch_order[static_cast<std::size_t>(schedule_.tiling.sweeps[sweep].first_branch)];
      const annulus::Branch& given = problem_.pattern.branches[static_cast<std::size_t>(branch)];
      stretch.first_head = static_cast<int>(given.first_head);
      stretch.heads = static_cast<int>(given.head_count);
      if (stretch.heads == 0) return;
    }
    add_cells(stretch, 0, span.end - span.begin);
  }

  // All state is in memory: one sweep after the other.
  void add_kept() {
    schedule_.set_count = schedule_.sweep_count - 1;
    int arrivals = 0;
    for (int sweep = 0; sweep < schedule_.sweep_count; ++sweep) {
      const std::int64_t before = schedule_.tile_count;
      for (const Span& span : by_length())
        for (int batch = 0; batch < problem_.batch; ++batch) {
          Stretch stretch = whole_document(span, sweep);
          stretch.first_batch = batch;
          stretch.batches = 1;
          stretch.signal_set = sweep + 1 < schedule_.sweep_count ? sweep : kNoSet;
          stretch.wait_set = sweep > 0 ? sweep - 1 : kNoSet;
          stretch.wait_count = arrivals;
          stretch.state_row = batch * problem_.heads * rules_.kept_rows + rules_.kept_first;
          stretch.state_span = static_cast<int>(rules_.kept_rows);
          add_cells(stretch, 0, span.end - span.begin);
        }
      arrivals = to_int((schedule_.tile_count - before) * rules_.arrivals);
    }
  }

  // A slab: rows whose state is in memory at the same time, as pieces: positions [begin, end) of a document, in some
  // heads. Short documents share a slab.
  struct Piece {
    Span span;
    int batch = 0;
    int first_head = 0;
    int heads = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t rows() const { return (end - begin) * heads; }
  };
  struct Slab {
    std::vector<Piece> pieces;
    std::int64_t rows = 0;
  };

  std::vector<Slab> cut_slabs(std::int64_t slots) const {
    const std::int64_t row_bytes = (problem_.head_dim + 2) * 4;
    const std::int64_t all = problem_.batch * problem_.tokens * problem_.heads;
    const std::int64_t aim =
        std::max<std::int64_t>(1, std::min(rules_.state_bytes / slots / row_bytes, all / kSlabsAtLeast));
    std::vector<Slab> slabs;
    const auto add = [&](const Piece& piece) {
      if (slabs.empty() || slabs.back().rows + piece.rows() > aim) slabs.emplace_back();
      slabs.back().pieces.push_back(piece);
      slabs.back().rows += piece.rows();
    };
    for (const Span& span : by_length()) {
      const std::int64_t length = span.end - span.begin;
      std::int64_t unit = 1;  // a cell of no sweep reaches across its end
      for (int i = 0; i < schedule_.sweep_count && unit < length; ++i)
        unit = std::lcm(unit, std::int64_t{schedule_.tiling.sweeps[i].cell});
      unit = std::min(unit, length);
      const std::int64_t heads = std::clamp<std::int64_t>(aim / length, 1, problem_.heads);
      const std::int64_t positions =
          heads > 1 ? length : std::min(length, std::max<std::int64_t>(aim / unit, 1) * unit);
      for (int batch = 0; batch < problem_.batch; ++batch)
        for (std::int64_t head = 0; head < problem_.heads; head += heads)
          for (std::int64_t begin = 0; begin < length; begin += positions)
            add({span, batch, static_cast<int>(head), static_cast<int>(std::min(heads, problem_.heads - head)), begin,
                 std::min(begin + positions, length)});
    }
    return slabs;
  }

  // Step t has slab t in sweep 0, slab t - 1 in sweep 1, and so on. One slot more than sweeps, so that a slab's slot
  // has been free for a whole step when the next slab takes it.
  void add_slabs() {
    const int sweeps = schedule_.sweep_count;
    std::int64_t slots = sweeps + 1;
    std::vector<Slab> slabs = cut_slabs(slots);
    const auto count = static_cast<std::int64_t>(slabs.size());
    slots = std::min(slots, count);
    std::int64_t slot_rows = 0;
    for (const Slab& slab : slabs) slot_rows = std::max(slot_rows, slab.rows);
    schedule_.state_rows = slots * slot_rows;
    schedule_.set_count = to_int(count * sweeps);
    std::vector<int> arrivals(static_cast<std::size_t>(schedule_.set_count), 0);
    const auto set_of = [&](std::int64_t slab, int sweep) { return static_cast<int>(slab * sweeps + sweep); };
    for (std::int64_t step = 0; step < count + sweeps - 1; ++step)
      for (int sweep = 0; sweep < sweeps; ++sweep) {
        const std::int64_t s = step - sweep;
        if (s < 0 || s >= count) continue;
        Stretch stretch;
        stretch.signal_set = set_of(s, sweep);
        if (sweep > 0)
          stretch.wait_set = set_of(s, sweep - 1);
        else if (s >= slots)
          stretch.wait_set = set_of(s - slots, sweeps - 1);
        if (stretch.wait_set != kNoSet) stretch.wait_count = arrivals[static_cast<std::size_t>(stretch.wait_set)];
        stretch.state_row = s % slots * slot_rows;
        const std::int64_t before = schedule_.tile_count;
        for (const Piece& piece : slabs[static_cast<std::size_t>(s)].pieces) {
          add_piece(piece, sweep, stretch);
          stretch.state_row += piece.rows();
        }
        arrivals[static_cast<std::size_t>(stretch.signal_set)] =
            to_int((schedule_.tile_count - before) * rules_.arrivals);
      }
  }

  // `sets` has the stretch's sets and its first row of state.
  void add_piece(const Piece& piece, int sweep, const Stretch& sets) {
    Stretch stretch = whole_document(piece.span, sweep);
    stretch.first_head = piece.first_head;
    stretch.heads = piece.heads;
    stretch.first_batch = piece.batch;
    stretch.batches = 1;
    stretch.wait_set = sets.wait_set;
    stretch.wait_count = sets.wait_count;
    stretch.signal_set = sets.signal_set;
    stretch.state_row = sets.state_row;
    stretch.state_position = stretch.document_begin + static_cast<int>(piece.begin);
    stretch.state_span = static_cast<int>(piece.end - piece.begin);
    add_cells(stretch, piece.begin, piece.end);
  }

  const BranchShape& shape(int branch) const { return shapes_[static_cast<std::size_t>(branch)]; }

  const Problem& problem_;
  const Plan& plan_;
  const ScheduleRules& rules_;
  std::vector<BranchShape> shapes_;
  std::vector<Grid> grids_;  // [sweep]
  Schedule schedule_;
};

}  // namespace

bool can_schedule(const Problem& problem) {
  return problem.tokens <= kMaxTokens && problem.batch <= INT_MAX && problem.heads <= INT_MAX &&
         problem.pattern.branches.size() <= kMaxBranches && !problem.pattern.branches.empty();
}

Schedule make_schedule(const Problem& problem, const Plan& plan, const ScheduleRules& rules) {
  return Maker(problem, plan, rules).make();
}

}  // namespace annulus::cuda
