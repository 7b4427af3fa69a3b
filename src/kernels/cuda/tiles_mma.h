// Tiles of the generic kernel: sizes and their reasons.
#pragma once

#include "kernels/cuda/tiling.h"

namespace annulus::cuda::mma {

// `split`: fp32, whose products take two planes of fp16 (split.cuh).
struct MmaConfig {
  bool split = false;
  int dim = 0;        // head size, filled up
  bool wide = false;  // one block on a multiprocessor instead of two
  int warps = 4;

  // Two tiles of 16 rows a warp share what it reads of keys and values; beyond 128 elements registers allow only one.
  ANNULUS_HOST_DEVICE constexpr int row_tiles() const { return dim <= 128 ? 2 : 1; }
  ANNULUS_HOST_DEVICE constexpr int query_rows() const { return warps * 16 * row_tiles(); }
  ANNULUS_HOST_DEVICE constexpr int threads() const { return warps * 32; }
  // 16-bit types: queries, and two slots of keys and values. fp32: queries, keys and values as two planes, one slot of
  // keys and values as they come, and the scales of rows.
  ANNULUS_HOST_DEVICE constexpr int shared_bytes(int keys) const {
    const int row_bytes = 2 * (dim + 8);
    const int rows = query_rows() + 2 * keys;
    return split ? rows * (2 * row_bytes + 4) + 2 * keys * 4 * (dim + 4) : (rows + 2 * keys) * row_bytes;
  }
  // Keys a block: as many as shared memory (227 KiB of a multiprocessor of sm_90) and registers hold.
  ANNULUS_HOST_DEVICE constexpr int key_rows() const {
    int keys = split && dim > 64 ? 32 : 64;
    while (keys > 16 && shared_bytes(keys) > (wide ? 224 : 113) * 1024) keys /= 2;
    return keys;
  }
};

// fp32 beyond 64 elements is bound by shared memory: 256 rows to a block of keys read it least often. Devices with less
// shared memory get what the others get.
ANNULUS_HOST_DEVICE constexpr MmaConfig make_config(bool split, int dim, bool wide) {
  return wide ? MmaConfig{split, dim, true, 8} : MmaConfig{split, dim, false, 4};
}
ANNULUS_HOST_DEVICE constexpr bool may_be_wide(bool split, int dim) { return split && dim > 64 && dim <= 128; }

}  // namespace annulus::cuda::mma
