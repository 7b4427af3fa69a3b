// The instructions of src/kernels/cuda/wgmma_sm90.cuh on a pretend GPU.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device.h"

namespace annulus::cuda::ptx {

template <class T, int kCount>
void multiply_shared(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate) {
  machine::issue({.columns = 2 * kCount,
                  .is_fp16 = std::is_same_v<T, __half>,
                  .accumulates = accumulate,
                  .a_is_shared = true,
                  .a = {a},
                  .b = {b}},
                 d, nullptr);
}

template <class T, int kCount>
void multiply_add(float (&d)[kCount], const std::uint32_t* a, std::uint64_t b) {
  machine::Product product;
  product.columns = 2 * kCount;
  product.is_fp16 = std::is_same_v<T, __half>;
  product.b = {b, true};
  machine::issue(product, d, a);
}

}  // namespace annulus::cuda::ptx
