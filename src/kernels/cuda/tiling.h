// Tiles on a GPU: which queries of which head, against which keys. Plain data and arithmetic for host and device.
//
// A sweep is a set of branches whose keys go through one running softmax. Its cells are the segments of its shortest
// branch, cut where a segment of another of its branches ends within one; its stride is its largest dilation, which all
// others divide. So the queries first, first + stride, ... of one cell lie in one segment and in one class of every
// branch of the sweep (eq. 1 and 2): such queries make a tile, and no row of a tile ever needs keys that another row
// must not see, but for the causal edge.
//
// A key may be one of several branches: segments of 2048 at dilation 1 have half of what segments of 4096 at dilation 2
// see. A softmax over all branches has such a key several times, with the same logit; a tile meets it once and counts
// it as often (`Tiling::folds`). Branch by branch, sparser ones leave out the segment of the one before and have their
// keys in it counted there: see gather_parts and key_count.
//
// A stretch is a run of tiles that are found by division: cells of equal length, in some heads and batches.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ANNULUS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ANNULUS_HOST_DEVICE inline
#endif

namespace annulus::cuda {

inline constexpr int kMaxSweepBranches = 8;  // that share one; a tile has their parts
inline constexpr int kMaxBranches = 16;      // tensor maps of all branches travel as one kernel argument
inline constexpr int kNoClass = -1;          // the head takes no part in the branch
inline constexpr int kEveryClass = -2;       // a query sees the keys of its own class, whichever that is
inline constexpr int kNoSet = -1;
inline constexpr int kCountPeriod = 16;  // how often keys count repeats after so many; blocks have a multiple of it

struct TileShape {
  int query_rows = 0;
  int key_rows = 0;  // of one block of keys
};

// A branch with sizes cut to the sequence, which changes no group: w <= tokens, r <= w.
struct BranchShape {
  int segment = 0;
  int dilation = 1;
  int padded_segment = 0;  // pad_like_torchscale: w as it was given, or INT_MAX; 0: no padding
  int twos = 0;            // that divide the dilation
  // Bit b: its segments have those of branch b of the sweep in them, and there its keys are some of that one's,
  // wherever both cover a query.
  int follows = 0;
};

struct Sweep {
  int first_branch = 0;
  int branch_count = 0;
  int stride = 1;          // largest dilation
  int cell = 0;            // shortest segment: the longest that a cell can be
  int step = 1;            // only residues anchor + i * step (mod stride) of a cell are walked; no branch covers others
  bool continues = false;  // starts from the state that the sweep before left
  bool is_last = true;     // writes results; otherwise state
};

// In which order the tiles of a stretch come: by blocks, then residues, inner cells, heads, outer cells, batches, the
// first one fastest; or with blocks and residues behind all others.
enum class TileOrder : std::uint8_t {
  blocks_first,
  residues_last,  // residues slowest, then blocks: when causal, where tiles shall end together
  blocks_last,    // blocks slowest, then residues: where a block waits for the one before
  blocks_back,    // the same from the last block on: where a block waits for the one behind
};

struct Stretch {
  std::int64_t first_tile = 0;
  int sweep = 0;
  int document_begin = 0;
  int document_length = 0;
  // Cell i begins at grid_begin + i * Sweep::cell; the last one is cut at grid_end. Counted from the document.
  int grid_begin = 0;
  int grid_end = 0;
  int first_cell = 0;
  // How many tiles there are, by TileOrder. Inner cells share the keys of a longer segment, which thus stay in the
  // cache.
  int blocks = 0;    // of query_rows queries, in a residue of a cell
  int residues = 0;  // walked
  int inner_cells = 0;
  int heads = 0;
  int outer_cells = 0;
  int batches = 0;
  int first_head = 0;
  int first_batch = 0;
  TileOrder order = TileOrder::blocks_first;
  // Sets of tiles order the sweeps: these wait until `wait_count` arrivals were signalled by another set.
  int wait_set = kNoSet;
  int wait_count = 0;
  int signal_set = kNoSet;
  // State of (first_head, state_position); a head's rows follow each other, then the next head's.
  int state_position = 0;
  int state_span = 0;
  std::int64_t state_row = 0;

  ANNULUS_HOST_DEVICE std::int64_t tiles() const {
    return static_cast<std::int64_t>(blocks) * residues * inner_cells * heads * outer_cells * batches;
  }
};

// What is the same for all tiles. Lists lie where the reader can see them: host or device.
struct Tiling {
  BranchShape branches[kMaxBranches] = {};
  Sweep sweeps[kMaxBranches] = {};
  TileShape shape;
  int heads = 0;
  int branch_count = 0;
  bool causal = false;
  bool folds = false;                     // keys of several branches are met once
  const std::int32_t* classes = nullptr;  // [branch, head]
  const std::int32_t* anchors = nullptr;  // [sweep, head]: the first residue that is walked, below step
};

// One branch of a tile, or a part of it. Query row i sees the keys [0, keys), and of those, when causal,
// [0, first + step * i].
struct TileBranch {
  int branch = 0;
  int blocks = 0;     // of keys
  int keys = 0;       // of the group, or of the part
  int first = 0;      // the key at the place of query row 0; of a part, it may lie outside
  int step = 1;       // keys from one query row to the next
  int key_begin = 0;  // position of key 0; the next ones follow at the branch's dilation
};

struct Tile {
  int sweep = 0;
  int stride = 1;  // of the sweep, as the next three
  int step = 1;
  bool continues = false;
  bool is_last = false;
  std::uint8_t folded = 0;       // bit b: branch b of the sweep is one of those whose common keys are met once
  std::int8_t branch_count = 0;  // parts: of the branches that cover the tile, each as one, in two, or not at all
  int batch = 0;
  int head = 0;
  int rows = 0;      // queries; may be 0 where there is only something to clear
  int position = 0;  // of the first query; the next ones follow at the stride
  int total_blocks = 0;
  int zero_keys = 0;      // keys with logit 0 and value 0 (pad_like_torchscale)
  int clear_begin = 0;    // no branch covers [clear_begin, clear_begin + step) + i * stride but for the tile's own row,
  int cell_end = 0;       // as far as that lies before cell_end
  int wait_set = kNoSet;  // as in Stretch
  int wait_count = 0;
  int signal_set = kNoSet;
  int meeting = 0;  // of a list of meetings: which one this is
  std::int64_t state_row = 0;
  TileBranch branches[kMaxSweepBranches] = {};
};

ANNULUS_HOST_DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }
ANNULUS_HOST_DEVICE int at_most(int a, int b) { return a < b ? a : b; }

// The part of a tile that one branch gives, or blocks = 0. `at` is the tile's first query, counted from its document.
ANNULUS_HOST_DEVICE TileBranch locate_branch(const Tiling& tiling, const Stretch& stretch, const Tile& tile, int at,
                                             int branch, int& zero_keys) {
  TileBranch result;
  const int taken = tiling.classes[static_cast<std::int64_t>(branch) * tiling.heads + tile.head];
  if (taken == kNoClass) return result;
  const BranchShape shape = tiling.branches[branch];
  const int begin = at / shape.segment * shape.segment;
  const int own = (at - begin) % shape.dilation;
  if (taken != kEveryClass && taken != own) return result;
  const int length = at_most(shape.segment, stretch.document_length - begin);
  result.branch = branch;
  result.keys = divide_up(length - own, shape.dilation);
  result.first = (at - begin - own) / shape.dilation;
  result.step = tile.stride / shape.dilation;
  result.key_begin = stretch.document_begin + begin + own;
  const int last =
      tiling.causal ? at_most(result.keys - 1, result.first + result.step * (tile.rows - 1)) : result.keys - 1;
  result.blocks = last / tiling.shape.key_rows + 1;
  if (length < shape.padded_segment) {
    const int filled = 1 + (at_most(shape.padded_segment, stretch.document_length) - 1) / shape.dilation;
    zero_keys += filled > result.keys ? filled - result.keys : 0;
  }
  return result;
}

// Which keys outside a tile's cell its rows see: all, or when causal those before (tiles of queries) or behind it
// (tiles of keys, which meet queries).
enum class Sight { all, before, behind };

// Keys [stop, go_on) of the last part of a tile are met elsewhere: what is before them stays, what is behind becomes a
// part of its own, as far as the tile's rows see either. (If only that is left, it takes the place of the whole.)
ANNULUS_HOST_DEVICE void leave_out(const Tiling& tiling, int stop, int go_on, Sight sight, Tile& tile) {
  TileBranch& part = tile.branches[tile.branch_count - 1];
  const bool has_before = stop > 0 && sight != Sight::behind;
  const bool has_behind = go_on < part.keys && sight != Sight::before;
  tile.total_blocks -= part.blocks;
  if (has_before && has_behind) tile.branches[tile.branch_count++] = part;
  if (!has_before && !has_behind) --tile.branch_count;
  if (has_behind) {
    TileBranch& behind = tile.branches[tile.branch_count - 1];
    behind.keys -= go_on;
    behind.first -= go_on;
    behind.key_begin += go_on * tiling.branches[behind.branch].dilation;
    behind.blocks = divide_up(behind.keys, tiling.shape.key_rows);
    tile.total_blocks += behind.blocks;
  }
  if (has_before) {
    part.keys = stop;
    part.blocks = divide_up(stop, tiling.shape.key_rows);
    tile.total_blocks += part.blocks;
  }
}

// The parts of a tile. Branches that cover it and follow each other are a chain, the one that begins with the densest:
// each leaves out the segment of the one before.
ANNULUS_HOST_DEVICE void gather_parts(const Tiling& tiling, const Stretch& stretch, Sight sight, Tile& tile) {
  tile.total_blocks = 0;
  tile.branch_count = 0;
  tile.zero_keys = 0;
  tile.folded = 0;
  if (tile.rows == 0) return;
  const Sweep sweep = tiling.sweeps[tile.sweep];
  const int at = tile.position - stretch.document_begin;
  int longest = 0;  // segment of the chain
  for (int i = 0; i < sweep.branch_count; ++i) {
    const int branch = sweep.first_branch + i;
    const TileBranch part = locate_branch(tiling, stretch, tile, at, branch, tile.zero_keys);
    if (part.blocks == 0) continue;
    tile.branches[tile.branch_count++] = part;
    tile.total_blocks += part.blocks;
    const bool follows = (tile.folded & ~tiling.branches[branch].follows) == 0;
    const bool has_room = tile.branch_count + sweep.branch_count - i <= kMaxSweepBranches;  // for two parts
    if (!tiling.folds || !follows || !has_room) continue;
    if (tile.folded != 0) {
      const int begin = at / longest * longest, end = at_most(begin + longest, stretch.document_length);
      const int first = part.key_begin - stretch.document_begin, dilation = tiling.branches[branch].dilation;
      leave_out(tiling, begin > first ? divide_up(begin - first, dilation) : 0,
                end > first ? divide_up(end - first, dilation) : 0, sight, tile);
    }
    tile.folded = static_cast<std::uint8_t>(tile.folded | 1u << i);
    longest = tiling.branches[branch].segment;
  }
  if (sight == Sight::before && tile.branch_count > 1) {  // last comes what has a causal edge: see attend_sm90.cuh
    const TileBranch first = tile.branches[0];
    tile.branches[0] = tile.branches[tile.branch_count - 1];
    tile.branches[tile.branch_count - 1] = first;
  }
}

// How often a key of a part counts: once for the part's own branch, and once for each sparser one of the chain that has
// it. The same kCountPeriod keys further.
ANNULUS_HOST_DEVICE int key_count(const Tiling& tiling, const Tile& tile, const TileBranch& part, int key) {
  const int first_branch = tiling.sweeps[tile.sweep].first_branch, own = part.branch - first_branch;
  int count = 1;
  if ((tile.folded >> own & 1) == 0) return count;
  for (int i = own + 1; tile.folded >> i != 0; ++i) {
    const int shift = tiling.branches[first_branch + i].twos - tiling.branches[part.branch].twos;
    if ((tile.folded >> i & 1) != 0 && ((key - part.first) & ((1 << shift) - 1)) == 0) ++count;
  }
  return count;
}

// Where rows see what lies behind them alone, those from `first` on: the first block that a tile meets.
ANNULUS_HOST_DEVICE int first_met_block(bool causal, int first, int block_rows) {
  return causal && first > 0 ? first / block_rows : 0;
}

// Tile `index` of a stretch, without its parts.
ANNULUS_HOST_DEVICE void place(const Tiling& tiling, const Stretch& stretch, unsigned index, Tile& tile) {
  const Sweep sweep = tiling.sweeps[stretch.sweep];
  const auto take = [&index](int count) {
    const unsigned rest = index % static_cast<unsigned>(count);
    index /= static_cast<unsigned>(count);
    return static_cast<int>(rest);
  };
  int block = stretch.order == TileOrder::blocks_first ? take(stretch.blocks) : 0;
  int residue = stretch.order == TileOrder::blocks_first ? take(stretch.residues) : 0;
  const int inner = take(stretch.inner_cells);
  tile.sweep = stretch.sweep;
  tile.stride = sweep.stride;
  tile.step = sweep.step;
  tile.continues = sweep.continues;
  tile.is_last = sweep.is_last;
  tile.wait_set = stretch.wait_set;
  tile.wait_count = stretch.wait_count;
  tile.signal_set = stretch.signal_set;
  tile.head = stretch.first_head + take(stretch.heads);
  const int cell = stretch.first_cell + take(stretch.outer_cells) * stretch.inner_cells + inner;
  tile.batch = stretch.first_batch + take(stretch.batches);
  if (stretch.order == TileOrder::residues_last) {
    block = take(stretch.blocks);
    residue = static_cast<int>(index);
  } else if (stretch.order != TileOrder::blocks_first) {
    residue = take(stretch.residues);
    block = static_cast<int>(index);
    if (stretch.order == TileOrder::blocks_back) block = stretch.blocks - 1 - block;
  }
  if (tiling.causal) block = stretch.blocks - 1 - block;  // the longest first

  const int cell_begin = stretch.grid_begin + cell * sweep.cell;
  const int cell_length = at_most(sweep.cell, stretch.grid_end - cell_begin);
  const int anchor = tiling.anchors[static_cast<std::int64_t>(stretch.sweep) * tiling.heads + tile.head];
  const int first = residue * sweep.step + anchor;
  const int rows_before = block * tiling.shape.query_rows;
  const int rows = first < cell_length ? divide_up(cell_length - first, sweep.stride) - rows_before : 0;
  tile.rows = rows < 0 ? 0 : at_most(rows, tiling.shape.query_rows);
  const int run = cell_begin + residue * sweep.step + sweep.stride * rows_before;
  const int at = run + anchor;
  tile.position = stretch.document_begin + at;
  tile.clear_begin = stretch.document_begin + run;
  tile.cell_end = stretch.document_begin + cell_begin + cell_length;
  tile.state_row = stretch.state_row + static_cast<std::int64_t>(tile.head - stretch.first_head) * stretch.state_span +
                   (tile.position - stretch.state_position);
}

// The same with its parts: keys that its queries see.
ANNULUS_HOST_DEVICE void locate(const Tiling& tiling, const Stretch& stretch, unsigned index, Tile& tile) {
  place(tiling, stretch, index, tile);
  gather_parts(tiling, stretch, tiling.causal ? Sight::before : Sight::all, tile);
}

// Neither rows to attend nor rows to clear.
ANNULUS_HOST_DEVICE bool has_nothing_to_do(const Tile& tile) {
  return tile.is_last ? tile.rows == 0 && tile.step == 1 : tile.total_blocks == 0;
}

// The stretch of a tile, looked for from `from` on: readers walk forward.
ANNULUS_HOST_DEVICE int find_stretch(const Stretch* stretches, int count, std::int64_t tile, int from) {
  int reach = 1;
  while (from + reach < count && stretches[from + reach].first_tile <= tile) {
    from += reach;
    reach *= 2;
  }
  while (reach > 1) {  // the answer lies in [from, from + reach)
    reach /= 2;
    if (from + reach < count && stretches[from + reach].first_tile <= tile) from += reach;
  }
  return from;
}

}  // namespace annulus::cuda
