// Matrix products of one warp by mma.sync, as backward needs them: 16 rows of a tile against a block of rows in shared
// memory.
//
// Accumulators are m16n8 fragments: a lane has columns 2 (lane % 4) and the next one of rows lane / 4 and lane / 4 + 8.
// 16-bit types multiply as they are. fp32 is split into two TF32 numbers, and three of the four products are summed:
// the fourth is below fp32's own rounding. (TF32 has the range of fp32, which gradients may need.)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/ptx_mma.cuh"

namespace annulus::cuda::mma::gradients {

// Rows in shared memory are kDim elements and a gap of 16 bytes, so that fragments come without bank conflicts.
template <class T, int kDim>
inline constexpr int kRowElements = kDim + 16 / static_cast<int>(sizeof(T));

template <class T, int kDim, int kKeys>
struct Products {
  static constexpr int kRow = kRowElements<T, kDim>;
  static constexpr int kTiles = 1;  // of 16 rows

  // S += Q K^T. `queries` are the warp's own rows.
  __device__ static void scores(float (&s)[kTiles][kKeys / 8][4], const T* queries, const T* keys, int lane) {
#pragma unroll
    for (int k = 0; k < kDim; k += 16) {
      std::uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        ptx::load_matrix_x4(a[t], queries + (16 * t + lane % 16) * kRow + k + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < kKeys; n += 16) {
        std::uint32_t b[4];
        ptx::load_matrix_x4(b, keys + (n + lane / 16 * 8 + lane % 8) * kRow + k + lane / 8 % 2 * 8);
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
        ptx::load_matrix_x4_transposed(b, values + (k + lane / 8 % 2 * 8 + lane % 8) * kRow + n + lane / 16 * 8);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          ptx::mma_m16n8k16<T>(o[t][n / 8], a[t], b[0], b[1]);
          ptx::mma_m16n8k16<T>(o[t][n / 8 + 1], a[t], b[2], b[3]);
        }
      }
    }
  }
};

template <int kDim, int kKeys>
struct Products<float, kDim, kKeys> {
  static constexpr int kRow = kRowElements<float, kDim>;
  static constexpr int kTiles = 1;
  // Tensor cores cut their sums instead of rounding them, which adds up: they sum no more than so many products, the
  // rest is added in fp32.
  static constexpr int kChunk = kDim % 64 == 0 ? 64 : 32;
  static_assert(kDim % kChunk == 0 && kKeys <= 64);

  // x = high + low, but for 2^-23 of it. The tensor cores look at the upper 19 bits alone: both are rounded to those by
  // integers, which is faster than the conversion. (Cut instead of rounded, low would bias every sum.)
  struct Split {
    std::uint32_t high, low;
    Split() = default;
    __device__ explicit Split(float x) {
      high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
      low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u;
    }
  };

  // One of the three products, small ones first: low * high, high * low, high * high.
  template <int kTerm>
  __device__ static void multiply_add(float (&d)[4], const Split (&a)[4], const Split (&b)[2]) {
    constexpr bool kLowA = kTerm == 0, kLowB = kTerm == 1;
    ptx::mma_m16n8k8(d, kLowA ? a[0].low : a[0].high, kLowA ? a[1].low : a[1].high, kLowA ? a[2].low : a[2].high,
                     kLowA ? a[3].low : a[3].high, kLowB ? b[0].low : b[0].high, kLowB ? b[1].low : b[1].high);
  }
  // All of them for kColumns columns of accumulators: neighbours in the order of issue do not depend on each other.
  template <int kColumns>
  __device__ static void multiply_add(float (&d)[kTiles][kColumns][4], const Split (&a)[kTiles][4],
                                      const Split (&b)[kColumns][2]) {
    const auto add_term = [&]<int kTerm>() {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_add<kTerm>(d[t][n], a[t], b[n]);
    };
    add_term.template operator()<0>();
    add_term.template operator()<1>();
    add_term.template operator()<2>();
  }

  __device__ static void add(float (&sum)[4], const float (&part)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];
  }

  __device__ static void scores(float (&s)[kTiles][kKeys / 8][4], const float* queries, const float* keys, int lane) {
    const float* query = queries + lane / 4 * kRow + lane % 4;
    const float* key = keys + lane / 4 * kRow + lane % 4;
#pragma unroll 1
    for (int begin = 0; begin < kDim; begin += kChunk) {
      float part[kTiles][kKeys / 8][4] = {};
#pragma unroll
      for (int k = begin; k < begin + kChunk; k += 8) {
        Split a[kTiles][4], b[kKeys / 8][2];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) b[n][h] = Split(key[8 * n * kRow + k + 4 * h]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[t][i] = Split(query[(16 * t + i % 2 * 8) * kRow + k + i / 2 * 4]);
        multiply_add(part, a, b);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) add(s[t][n], part[t][n]);
    }
  }

  // The summed index may run in any order: a lane's scores belong to keys 2 (lane % 4) and the next one, so its values
  // come from those rows, and P goes from accumulators to operands where it is.
  __device__ static void add_values(float (&o)[kTiles][kDim / 8][4], const float (&p)[kTiles][kKeys / 8][4],
                                    const float* values, int lane) {
    const float* value = values + 2 * (lane % 4) * kRow + lane / 4;
    constexpr int kColumns = 4, kPart = kKeys < 32 ? kKeys : 32;  // what registers hold, split
#pragma unroll
    for (int first = 0; first < kKeys / 8; first += kPart / 8) {
      Split a[kPart / 8][kTiles][4];
#pragma unroll
      for (int k = 0; k < kPart / 8; ++k)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[k][t][i] = Split(p[t][first + k][i % 2 * 2 + i / 2]);
#pragma unroll
      for (int n = 0; n < kDim / 8; n += kColumns) {
        float part[kTiles][kColumns][4] = {};
#pragma unroll
        for (int k = 0; k < kPart / 8; ++k) {
          Split b[kColumns][2];
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) b[c][h] = Split(value[(8 * (first + k) + h) * kRow + 8 * (n + c)]);
          multiply_add(part, a[k], b);
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) add(o[t][n + c], part[t][c]);
      }
    }
  }
};

}  // namespace annulus::cuda::mma::gradients
