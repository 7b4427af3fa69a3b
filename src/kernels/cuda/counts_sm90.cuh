// How often keys count (tiling.h), as the columns of S lie in a thread of wgmma: element i is of row (i / 2) % 2, and
// of column 8 (i / 4) + 2 (lane % 4) + i % 2. A key that counts n times has the weight n exp2(x) = exp2(x + log2 n),
// and x has a maximum or an LSE subtracted anyway: both are one addition, made once a block.
#pragma once

#include "kernels/cuda/tiling.h"

namespace annulus::cuda::sm90 {

// Without kCounts every key counts once, and registers are saved.
template <bool kCounts>
class Counts {
  static constexpr int kColumns = kCounts ? 4 : 1;  // modulo 16
  static_assert(kCountPeriod == 16);

 public:
  struct Offsets {
    float of_row[2][kColumns];
    __device__ __forceinline__ float of(int i) const {
      return of_row[(i >> 1) & 1][kCounts ? (i >> 1 & 2) | (i & 1) : 0];
    }
  };

  // Those of a part whose blocks begin with a whole number of periods.
  __device__ __forceinline__ void take(const Tiling& tiling, const Tile& tile, const TileBranch& part, int lane) {
    if constexpr (kCounts)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        log2_[c] = __log2f(static_cast<float>(key_count(tiling, tile, part, c / 2 * 8 + (lane & 3) * 2 + (c & 1))));
  }

  // What is to be added to the logits of the thread's two rows, from which x and y are subtracted.
  __device__ __forceinline__ Offsets minus(float x, float y) const {
    Offsets result;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      result.of_row[0][c] = kCounts ? log2_[c] - x : -x;
      result.of_row[1][c] = kCounts ? log2_[c] - y : -y;
    }
    return result;
  }

 private:
  float log2_[kColumns] = {};
};

}  // namespace annulus::cuda::sm90
