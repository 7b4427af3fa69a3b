// What every backward kernel is given.
//
// Tiles are those of tiling.h, of queries or of keys. A tile of keys is a tile of queries with the parts exchanged:
// keys first, first + stride, ... of one cell lie in one segment and one class of every branch of a sweep, so the
// queries that see them are, branch by branch, the rows of one group. TileBranch then counts queries where it says
// keys.
#pragma once

#include "kernels/cuda/launch.h"

namespace annulus::cuda {

// How the sums of dq of one head lie: rows in the order of their residue modulo `stride`, in groups of 8; a group as
// [16 columns][row][column]. What the threads of a warp add at once, 8 neighbouring rows of a block of queries by 16
// columns, is then one run of memory, and two where the block begins within a group.
//
// Two rows by 16 columns are a line of the cache, and an addition costs as many requests as it touches lines. So where
// branches have several dilations, the rows that share a line are 2 or 4 apart instead of 1: additions at dilations up
// to that fill whole lines, those at larger ones the half of each.
struct SumLayout {
  int stride = 1;                  // the dilation where there is one branch; else 1
  int residue_rows = 0;            // of one residue, up to a multiple of 8
  int rows = 0;                    // of all
  unsigned order = kOrderOfPair1;  // the place in its group of row i, in bits 4 i to 4 i + 3

  static constexpr unsigned kOrderOfPair1 = 0x76543210, kOrderOfPair2 = 0x75643120, kOrderOfPair4 = 0x75316420;

  SumLayout() = default;
  // Of positions [0, count). `pair`: how far apart the rows of a line are, 1, 2 or 4.
  SumLayout(std::int64_t count, int stride_, int pair)
      : stride(stride_),
        residue_rows(static_cast<int>(((count + stride_ - 1) / stride_ + 7) / 8 * 8)),
        rows(stride * residue_rows),
        order(pair == 4   ? kOrderOfPair4
              : pair == 2 ? kOrderOfPair2
                          : kOrderOfPair1) {}
  ANNULUS_HOST_DEVICE int row(int position) const { return position % stride * residue_rows + position / stride; }
  // The row of a group of 8 that has a place.
  ANNULUS_HOST_DEVICE int row_at(int place) const {
    int row = 0;
    while (static_cast<int>(order >> row * 4 & 7) != place) ++row;
    return row;
  }
  // Of the first of 16 columns, in floats.
  ANNULUS_HOST_DEVICE std::int64_t place(int row, int head_dim, int column) const {
    const int at = static_cast<int>(order >> (row & 7) * 4 & 7);
    return static_cast<std::int64_t>(row & ~7) * head_dim + at * 16 + column * 8;
  }
};

// One of the regions below.
struct Region {
  static constexpr int kNone = -1;

  unsigned tiles = 0;  // that it has
  int slot = 0;        // where its sums of dq lie: memory for those of one region; and
  int before = kNone;  // whose were there before
};

// Windows of the sequence whose queries and keys meet no others, each key/value head for itself: a region. Its dq is
// whole when its tiles have ended, whatever else still runs.
//
// So regions may share memory for their sums of dq: slots of one region each, a few more than are under way together.
// Who rounds a region leaves zeros in its slot, and tiles of the next region there wait for that before they add. The
// sums then never leave the cache, and need memory for these few regions alone.
//
// What goes at the rate of memory takes a region by runs: up to kRunRows rows of one query head, neighbours in the sums
// of dq.
struct Regions {
  static constexpr int kRunRows = 64;

  std::int64_t length = 0;  // of a window, in positions
  int windows = 1;
  int kv_heads = 1;
  int runs = 0;                   // of a region; some may be empty
  std::int64_t count = 0;         // of all batches
  const Region* table = nullptr;  // [batch, window, kv head]
  const int* order = nullptr;     // in which they are rounded: that of their first tiles
  unsigned* ended = nullptr;      // [region]: tiles that have ended; null: nobody asks
  unsigned* rounded = nullptr;    // [region]: runs that have been rounded; null: every region has a slot of its own

  Regions() = default;
  Regions(std::int64_t tokens, std::int64_t length_, std::int64_t batch, std::int64_t kv_heads_, std::int64_t sharers,
          int stride)
      : length(length_),
        windows(static_cast<int>((tokens + length_ - 1) / length_)),
        kv_heads(static_cast<int>(kv_heads_)),
        runs(static_cast<int>(sharers * stride * (((length_ + stride - 1) / stride + kRunRows - 1) / kRunRows))),
        count(batch * windows * kv_heads_) {}
  ANNULUS_HOST_DEVICE std::int64_t index(std::int64_t batch, std::int64_t position, int kv_head) const {
    return (batch * windows + position / length) * kv_heads + kv_head;
  }
};

// Rows [first, first + rows) of a residue modulo SumLayout::stride, of one head: row i is position
// i * stride + residue.
struct Run {
  std::int64_t region = 0, batch = 0, first = 0;
  std::int64_t begin = 0;  // position, of the region
  int head = 0, residue = 0, rows = 0;

  ANNULUS_HOST_DEVICE Run(const Regions& regions, int sharers, std::int64_t tokens, int stride, std::int64_t region_,
                          int run)
      : region(region_) {
    const int window = static_cast<int>(region / regions.kv_heads % regions.windows);
    const int kv_head = static_cast<int>(region % regions.kv_heads);
    batch = region / regions.kv_heads / regions.windows;
    head = kv_head * sharers + run % sharers;
    residue = run / sharers % stride;
    begin = window * regions.length;
    const std::int64_t end = begin + regions.length < tokens ? begin + regions.length : tokens;
    first = (begin - residue + stride - 1) / stride + std::int64_t{run / sharers / stride} * Regions::kRunRows;
    const std::int64_t left = (end - residue + stride - 1) / stride - first;
    rows = left < 0 ? 0 : left < Regions::kRunRows ? static_cast<int>(left) : Regions::kRunRows;
  }
  // Where it begins in a layout of the sequence, and in one of the window.
  ANNULUS_HOST_DEVICE int row(const SumLayout& layout) const {
    return residue * layout.residue_rows + static_cast<int>(first);
  }
  ANNULUS_HOST_DEVICE int row_in_window(const SumLayout& layout) const {
    return layout.row(static_cast<int>(first * layout.stride + residue - begin));
  }
};

struct GradientLaunch {
  Launch common;  // out is not used; state: [row, head_dim] of dq, or [row, 2 head_dim] of dk and dv
  const void* dout = nullptr;
  const void* forward_out = nullptr;  // for Delta, as the next two
  Strides forward_out_stride;
  float out_factor = 1;  // 1 / the output's scale
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  Strides dout_stride, dq_stride, dk_stride, dv_stride;
  const float* lse = nullptr;                    // [batch, heads, tokens]
  float* delta = nullptr;                        // [.., batch, heads, tokens]: eq. 7 or 8, without the output's scale
  std::int64_t delta_offset[kMaxBranches] = {};  // of a branch of the tiling; eq. 7 has one Delta for all
  // For kernels that add to dq: [slot, sharers] of `sums`, which is of a window; or without regions [batch, heads], and
  // of the sequence. See place_sums.
  float* dq_sums = nullptr;
  SumLayout sums;
  // As dq_sums, a number a row, of one branch: how many tiles of keys have added to the block of queries that begins
  // there, where they do it one after the other. Each waits for its turn (turn_of). Null: in any order.
  unsigned* tiles_added = nullptr;
  // LSE and Delta as the Hopper kernel reads them, in the order of the sums: rows of a block lie side by side. The same
  // as above where that is the order of the positions, else copies.
  const float* ordered_lse = nullptr;  // [batch, heads, number_rows]
  const float* ordered_delta = nullptr;
  SumLayout numbers;  // of the sequence
  std::int64_t number_rows = 0;
  float* lse_copy = nullptr;  // for who makes Delta; null: none are wanted
  float* delta_copy = nullptr;
  Regions regions;
  float factor = 1;                 // of dq and dk
  float value_factor = 1;           // of dv
  bool causal = false;              // tilings of keys do not say so: their order is that of the queries
  float* sums_of_meetings[2] = {};  // what meetings add to: dq; or dk and dv. Without the factors
};

// Where the sums of dq of one head lie: behind `first` numbers, in g.sums by positions from `begin` on.
struct SumPlace {
  std::int64_t first = 0;
  std::int64_t begin = 0;
};
ANNULUS_HOST_DEVICE SumPlace place_sums(const GradientLaunch& g, std::int64_t batch, int head, std::int64_t region,
                                        std::int64_t region_begin) {
  const std::int64_t head_floats = static_cast<std::int64_t>(g.sums.rows) * g.common.head_dim;
  if (g.regions.table == nullptr) return {(batch * g.common.heads + head) * head_floats, 0};
  const std::int64_t slot = g.regions.table[region].slot;
  return {(slot * g.common.sharers + head % g.common.sharers) * head_floats, region_begin};
}

// All rows of one kind, row by row; see gradient_rows.cu.
struct GradientRowLaunch {
  RowLaunch rows;
  GradientLaunch gradient;        // its common part is that of `rows`
  std::int64_t delta_stride = 0;  // from one branch of the problem to the next; 0: eq. 7
};

// The first block of queries that a tile of keys meets, blocks of `rows`.
ANNULUS_HOST_DEVICE int first_block(const TileBranch& part, bool causal, int rows) {
  return first_met_block(causal, part.first, rows);
}

// Where tiles of a group add to dq one after the other: how many come before a tile at the block of queries that begins
// at row `query` of the group. From the last tile on, those are the tiles that see the block and have later keys.
ANNULUS_HOST_DEVICE int turn_of(TileOrder order, const TileBranch& part, int query, int key_rows) {
  const int tile = part.first / key_rows;
  return order == TileOrder::blocks_back ? query / key_rows - tile : tile;
}

// The parts of a tile of keys as one query head has them.
ANNULUS_HOST_DEVICE void take_head(const Tiling& tiling, const Stretch& stretch, bool causal, int head, Tile& tile) {
  tile.head = head;
  gather_parts(tiling, stretch, causal ? Sight::behind : Sight::all, tile);
  tile.total_blocks = 0;
  for (int b = 0; b < tile.branch_count; ++b) {
    TileBranch& part = tile.branches[b];
    part.blocks -= first_block(part, causal, tiling.shape.key_rows);
    tile.total_blocks += part.blocks;
  }
}

}  // namespace annulus::cuda
