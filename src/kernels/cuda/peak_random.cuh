// Numbers for the peak loops: uniform in (-1, 1), from a hash of their index.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

namespace annulus::cuda {

__device__ __forceinline__ float hashed_number(std::uint32_t index) {
  std::uint32_t x = index * 0x9e3779b9u + 0x7f4a7c15u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return static_cast<float>(static_cast<std::int32_t>(x ^ x >> 16)) * 0x1p-31f;
}
template <class T>
__device__ __forceinline__ std::uint32_t hashed_pair(std::uint32_t index) {
  return ptx::pack<T>(hashed_number(2 * index), hashed_number(2 * index + 1));
}

}  // namespace annulus::cuda
