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
struct SumLayout {
  int stride = 1;        // the dilation where there is one branch; else 1, which suits the densest
  int residue_rows = 0;  // of one residue
  int rows = 0;          // of all, up to a multiple of 8

  SumLayout() = default;
  SumLayout(std::int64_t tokens, int stride_)
      : stride(stride_),
        residue_rows(static_cast<int>((tokens + stride_ - 1) / stride_)),
        rows((stride * residue_rows + 7) / 8 * 8) {}
  ANNULUS_HOST_DEVICE int row(int position) const { return position % stride * residue_rows + position / stride; }
  // The other way; the tokens' number or more for a row that is none.
  ANNULUS_HOST_DEVICE int position(int row) const {
    const int residue = row / residue_rows;
    return residue < stride ? (row - residue * residue_rows) * stride + residue : rows;
  }
  // Of the first of 16 columns, in floats.
  ANNULUS_HOST_DEVICE static std::int64_t place(int row, int head_dim, int column) {
    return static_cast<std::int64_t>(row & ~7) * head_dim + (row & 7) * 16 + column * 8;
  }
};

struct GradientLaunch {
  Launch common;  // out is not used; state: [row, head_dim] of dq, or [row, 2 head_dim] of dk and dv
  const void* dout = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  Strides dout_stride, dq_stride, dk_stride, dv_stride;
  const float* lse = nullptr;                    // [batch, heads, tokens]
  float* delta = nullptr;                        // [.., batch, heads, tokens]: eq. 7 or 8, without the output's scale
  std::int64_t delta_offset[kMaxBranches] = {};  // of a branch of the tiling; eq. 7 has one Delta for all
  float* dq_sums = nullptr;                      // [batch, heads] of SumLayout, for kernels that add to dq
  SumLayout sums;
  // LSE and Delta as the Hopper kernel reads them, in the order of the sums: rows of a block lie side by side. The same
  // as above where that is the order of the positions, else copies.
  const float* ordered_lse = nullptr;  // [batch, heads, number_rows]
  const float* ordered_delta = nullptr;
  std::int64_t number_rows = 0;
  float* lse_copy = nullptr;  // for who makes Delta; null: none are wanted
  float* delta_copy = nullptr;
  float factor = 1;                 // of dq and dk
  float value_factor = 1;           // of dv
  bool causal = false;              // tilings of keys do not say so: their order is that of the queries
  float* sums_of_meetings[2] = {};  // what meetings add to: dq; or dk and dv. Without the factors
};

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

// The branches of a tile of keys as one query head has them.
ANNULUS_HOST_DEVICE void take_head(const Tiling& tiling, const Stretch& stretch, bool causal, int head, Tile& tile) {
  tile.head = head;
  tile.total_blocks = 0;
  tile.branch_count = 0;
  if (tile.rows == 0) return;
  const Sweep sweep = tiling.sweeps[tile.sweep];
  int zero_keys = 0;
  for (int b = 0; b < sweep.branch_count; ++b) {
    TileBranch part =
        locate_branch(tiling, stretch, tile, tile.position - stretch.document_begin, sweep.first_branch + b, zero_keys);
    if (part.blocks == 0) continue;
    part.blocks -= first_block(part, causal, tiling.shape.key_rows);
    tile.branches[tile.branch_count++] = part;
    tile.total_blocks += part.blocks;
  }
}

}  // namespace annulus::cuda
