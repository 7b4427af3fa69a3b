// What every backward kernel is given. Tiles are those of queries (tiling.h) or of keys (key_tiles.h).
#pragma once

#include "kernels/cuda/key_tiles.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/regions.h"

namespace annulus::cuda {

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

}  // namespace annulus::cuda
