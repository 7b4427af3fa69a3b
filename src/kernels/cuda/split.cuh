// fp32 on 16-bit tensor cores: a number is the sum of two fp16 numbers, high and low, and of the four products of two
// numbers three are made. That is twice as fast as three TF32 products, whose two parts have as many bits.
//
// fp16 has little range, so all numbers that are split together, a row, are first brought to the top of it by a power
// of two: the largest lies in [2^13, 2^14). What is lost is then 2^-22 of a number, or 2^-38 of its row's largest one,
// whatever is more. NaN and infinity stay what they are, or become NaN.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace annulus::cuda {

// Powers of two, both normal whatever `largest` is.
struct RowScale {
  float up, down;
  __device__ explicit RowScale(float largest) {
    const unsigned exponent = __float_as_uint(largest) >> 23 & 0xff;
    const unsigned power = min(127 + 127 + 13 - exponent, 253u);
    up = __uint_as_float(power << 23);
    down = __uint_as_float((254 - power) << 23);
  }
};

// Two numbers, x in the lower halves.
struct SplitPair {
  std::uint32_t high, low;
  __device__ SplitPair(float x, float y) : high(ptx::pack<__half>(x, y)) {
    const float2 back = __half22float2(reinterpret_cast<const __half2&>(high));
    low = ptx::pack<__half>(x - back.x, y - back.y);
  }
};

// `most` rows to two planes of kRow elements a row, one after the other, by a block of kThreads threads, eight a row;
// rows from `count` on and columns from head_dim on become zero. `down[row]` undoes the row's scale.
template <int kDim, int kRow, int kThreads>
__device__ __forceinline__ void split_rows(__half* to, float* down, const float* from, std::int64_t stride, int count,
                                           int most, int head_dim, bool aligned) {
  constexpr int kChunks = kDim / 32;  // of four elements, a lane
  const int lane = static_cast<int>(threadIdx.x) % 8;
  for (int row = static_cast<int>(threadIdx.x) / 8; row < most; row += kThreads / 8) {
    const float* source = from + row * stride;
    float4 x[kChunks];
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int first = 4 * (lane + 8 * c);
      const auto element = [&](int i) { return row < count && first + i < head_dim ? source[first + i] : 0.0f; };
      if (aligned)
        x[c] = row < count && first < head_dim ? *reinterpret_cast<const float4*>(source + first) : float4{};
      else
        x[c] = {element(0), element(1), element(2), element(3)};
      largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x[c].x), fabsf(x[c].y))), fmaxf(fabsf(x[c].z), fabsf(x[c].w)));
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    const RowScale scale(largest);
    if (lane == 0) down[row] = scale.down;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const SplitPair a(x[c].x * scale.up, x[c].y * scale.up), b(x[c].z * scale.up, x[c].w * scale.up);
      __half* place = to + row * kRow + 4 * (lane + 8 * c);
      *reinterpret_cast<uint2*>(place) = {a.high, b.high};
      *reinterpret_cast<uint2*>(place + most * kRow) = {a.low, b.low};
    }
  }
}

}  // namespace annulus::cuda
