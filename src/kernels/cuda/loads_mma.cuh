// Rows of a tensor to shared memory, by all threads of a block.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx_mma.cuh"

namespace annulus::cuda::mma {

// Calls f(row, i) for every i in [0, width) of every row in [0, rows), dealt to the threads of a block in order.
template <int kThreads, class F>
__device__ __forceinline__ void for_each_dealt(int rows, int width, F f) {
  const int rows_on = kThreads / width, on = kThreads % width;  // from one of a thread's turns to the next
  int row = static_cast<int>(threadIdx.x) / width, i = static_cast<int>(threadIdx.x) % width;
  while (row < rows) {
    f(row, i);
    row += rows_on;
    i += on;
    if (i >= width) {
      i -= width;
      ++row;
    }
  }
}

// `count` rows from `from` on to shared memory; of the `most` rows there the others become zero.
template <class T, int kRow, int kThreads>
__device__ __forceinline__ void load_rows(T* to, const T* from, std::int64_t stride, int count, int most, int head_dim,
                                          bool aligned) {
  constexpr int kUnit = 16 / static_cast<int>(sizeof(T));
  if (aligned) {
    for_each_dealt<kThreads>(most, head_dim / kUnit, [&](int row, int chunk) {
      ptx::copy_16(to + row * kRow + chunk * kUnit, row < count ? from + row * stride + chunk * kUnit : from,
                   row < count);
    });
  } else {
    for_each_dealt<kThreads>(most, head_dim, [&](int row, int element) {
      to[row * kRow + element] = row < count ? from[row * stride + element] : static_cast<T>(0.0f);
    });
  }
}

}  // namespace annulus::cuda::mma
