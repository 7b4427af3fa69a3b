// Matrix products of one warp by mma.sync: kTiles times 16 query rows against a block of keys in shared memory.
//
// Accumulators are m16n8 fragments: a lane has columns 2 (lane % 4) and the next one of rows lane / 4 and lane / 4 + 8.
// 16-bit types multiply as they are; fp32 comes as two planes of fp16 (split.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ptx_mma.cuh"
#include "kernels/cuda/split.cuh"

namespace annulus::cuda::mma {

// Rows in shared memory are kDim elements and a gap of 16 bytes, so that fragments come without bank conflicts.
template <int kDim>
inline constexpr int kRowElements = kDim + 8;

// Where the fragments of one ldmatrix lie, from the first row and column on: 16 rows by 16 elements of queries; of
// keys, 16 columns of scores; of values, 16 keys by 16 columns.
template <int kRow>
__device__ __forceinline__ int query_place(int lane) {
  return lane % 16 * kRow + lane / 16 * 8;
}
template <int kRow>
__device__ __forceinline__ int key_place(int lane) {
  return (lane / 16 * 8 + lane % 8) * kRow + lane / 8 % 2 * 8;
}
template <int kRow>
__device__ __forceinline__ int value_place(int lane) {
  return (lane / 8 % 2 * 8 + lane % 8) * kRow + lane / 16 * 8;
}

template <class T, int kDim, int kKeys, int kTiles>
struct Products {
  static constexpr int kRow = kRowElements<kDim>;

  // S += Q K^T. `queries` are the warp's own rows.
  __device__ static void scores(float (&s)[kTiles][kKeys / 8][4], const T* queries, const T* keys, int lane) {
#pragma unroll
    for (int k = 0; k < kDim; k += 16) {
      std::uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) ptx::load_matrix_x4(a[t], queries + 16 * t * kRow + k + query_place<kRow>(lane));
#pragma unroll
      for (int n = 0; n < kKeys; n += 16) {
        std::uint32_t b[4];
        ptx::load_matrix_x4(b, keys + n * kRow + k + key_place<kRow>(lane));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          ptx::mma_m16n8k16<T>(s[t][n / 8], a[t], b[0], b[1]);
          ptx::mma_m16n8k16<T>(s[t][n / 8 + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  // O += P V
  __device__ static void add_values(float (&o)[kTiles][kDim / 8][4], const float (&p)[kTiles][kKeys / 8][4],
                                    const T* values, int lane) {
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      const int j = k / 8;
      std::uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        a[t][0] = ptx::pack<T>(p[t][j][0], p[t][j][1]);
        a[t][1] = ptx::pack<T>(p[t][j][2], p[t][j][3]);
        a[t][2] = ptx::pack<T>(p[t][j + 1][0], p[t][j + 1][1]);
        a[t][3] = ptx::pack<T>(p[t][j + 1][2], p[t][j + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kDim; n += 16) {
        std::uint32_t b[4];
        ptx::load_matrix_x4_transposed(b, values + k * kRow + n + value_place<kRow>(lane));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          ptx::mma_m16n8k16<T>(o[t][n / 8], a[t], b[0], b[1]);
          ptx::mma_m16n8k16<T>(o[t][n / 8 + 1], a[t], b[2], b[3]);
        }
      }
    }
  }
};

// The same for fp32. Tensor cores cut their sums instead of rounding them, which adds up: they sum no more than 64
// products, the rest is added in fp32.
template <int kDim, int kKeys, int kTiles>
struct SplitProducts {
  static constexpr int kRow = kRowElements<kDim>;
  static constexpr int kChunk = kDim % 64 == 0 ? 64 : 32;
  static_assert(kDim % kChunk == 0);

  struct Fragment {  // of both planes
    std::uint32_t high[4], low[4];
  };

  // Small products first.
  template <int kColumns>
  __device__ static void multiply_add(float (&d)[kTiles][kColumns][4], int column, const Fragment (&a)[kTiles],
                                      const Fragment& b) {
    const auto add = [&](int half) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        ptx::mma_m16n8k16<__half>(d[t][column + half], a[t].low, b.high[2 * half], b.high[2 * half + 1]);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        ptx::mma_m16n8k16<__half>(d[t][column + half], a[t].high, b.low[2 * half], b.low[2 * half + 1]);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        ptx::mma_m16n8k16<__half>(d[t][column + half], a[t].high, b.high[2 * half], b.high[2 * half + 1]);
    };
    add(0);
    add(1);
  }

  // The second planes lie query_plane and kKeys * kRow elements behind the first ones.
  __device__ static void scores(float (&s)[kTiles][kKeys / 8][4], const __half* queries, int query_plane,
                                const __half* keys, int lane) {
#pragma unroll
    for (int begin = 0; begin < kDim; begin += kChunk) {
      float part[kTiles][kKeys / 8][4] = {};
#pragma unroll
      for (int k = begin; k < begin + kChunk; k += 16) {
        Fragment a[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const __half* at = queries + 16 * t * kRow + k + query_place<kRow>(lane);
          ptx::load_matrix_x4(a[t].high, at);
          ptx::load_matrix_x4(a[t].low, at + query_plane);
        }
#pragma unroll
        for (int n = 0; n < kKeys; n += 16) {
          const __half* at = keys + n * kRow + k + key_place<kRow>(lane);
          Fragment b;
          ptx::load_matrix_x4(b.high, at);
          ptx::load_matrix_x4(b.low, at + kKeys * kRow);
          multiply_add(part, n / 8, a, b);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[t][n][i] += part[t][n][i];
    }
  }

  // O += W V, where row r of W stands for down[r] times itself: rows 2t and 2t + 1 are those of tile t.
  __device__ static void add_values(float (&o)[kTiles][kDim / 8][4], const float (&w)[kTiles][kKeys / 8][4],
                                    const float (&down)[2 * kTiles], const __half* values, int lane) {
    constexpr int kPart = kKeys < 32 ? kKeys : 32, kColumns = 4;  // what registers hold
#pragma unroll
    for (int first = 0; first < kKeys; first += kPart) {
      Fragment a[kPart / 16][kTiles];
#pragma unroll
      for (int k = 0; k < kPart / 16; ++k)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float(&pair)[4] = w[t][first / 8 + 2 * k + i / 2];
            const SplitPair split(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            a[k][t].high[i] = split.high;
            a[k][t].low[i] = split.low;
          }
#pragma unroll
      for (int n = 0; n < kDim / 8; n += kColumns) {
        float part[kTiles][kColumns][4] = {};
#pragma unroll
        for (int k = 0; k < kPart / 16; ++k)
#pragma unroll
          for (int c = 0; c < kColumns; c += 2) {
            const __half* at = values + (first + 16 * k) * kRow + 8 * (n + c) + value_place<kRow>(lane);
            Fragment b;
            ptx::load_matrix_x4_transposed(b.high, at);
            ptx::load_matrix_x4_transposed(b.low, at + kKeys * kRow);
            multiply_add(part, c, a[k], b);
          }
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[t][n + c][i] = fmaf(part[t][c][i], down[2 * t + i / 2], o[t][n + c][i]);
      }
    }
  }
};

}  // namespace annulus::cuda::mma
