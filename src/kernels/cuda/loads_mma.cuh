// Rows of a tensor to shared memory, by all threads of a block.
#pragma once

#include <cstdint>

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
      const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to + row * kRow + chunk * kUnit));
      const T* source = row < count ? from + row * stride + chunk * kUnit : from;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
                   "r"(row < count ? 16 : 0)
                   : "memory");
    });
  } else {
    for_each_dealt<kThreads>(most, head_dim, [&](int row, int element) {
      to[row * kRow + element] = row < count ? from[row * stride + element] : static_cast<T>(0.0f);
    });
  }
}
__device__ __forceinline__ void commit_loads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_loads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace annulus::cuda::mma
