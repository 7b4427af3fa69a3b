// Sums of dq: the order of their rows, and the regions of the sequence that have memory for them. Plain data and
// arithmetic for host and device; sum_plan.h makes it.
#pragma once

#include "kernels/cuda/tiling.h"

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

}  // namespace annulus::cuda
