// What every backward kernel is given.
//
// Tiles are those of tiling.h, of queries or of keys. A tile of keys is a tile of queries with the parts exchanged:
// keys first, first + stride, ... of one cell lie in one segment and one class of every branch of a sweep, so the
// queries that see them are, branch by branch, the rows of one group. TileBranch then counts queries where it says
// keys.
#pragma once

#include "kernels/cuda/launch.h"

namespace annulus::cuda {

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
  float* dq_sums = nullptr;                      // [batch, heads, tokens, head_dim], for kernels that add to dq
  float factor = 1;                              // of dq and dk
  float value_factor = 1;                        // of dv
  bool causal = false;                           // tilings of keys do not say so: their order is that of the queries
};

// All rows of one kind, row by row; see gradient_rows.cu.
struct GradientRowLaunch {
  RowLaunch rows;
  GradientLaunch gradient;        // its common part is that of `rows`
  std::int64_t delta_stride = 0;  // from one branch of the problem to the next; 0: eq. 7
};

// The first block of queries that a tile of keys meets, blocks of `rows`.
ANNULUS_HOST_DEVICE int first_block(const TileBranch& part, bool causal, int rows) {
  return causal ? part.first / rows : 0;
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
