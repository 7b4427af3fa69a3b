// The instructions of src/kernels/cuda/wgmma_gradient_sm90.cuh on a pretend GPU.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device.h"

namespace annulus::cuda::ptx {

template <class T, int kAlongA, int kAlongB, int kCount>
void multiply_both(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulates) {
  machine::issue({.columns = 2 * kCount,
                  .is_fp16 = std::is_same_v<T, __half>,
                  .accumulates = accumulates,
                  .a_is_shared = true,
                  .a = {a, kAlongA == 1},
                  .b = {b, kAlongB == 1}},
                 d, nullptr);
}
template <class T, int kAlongA, int kAlongB, int kCount>
void multiply_first(float (&d)[kCount], std::uint64_t a, std::uint64_t b) {
  multiply_both<T, kAlongA, kAlongB>(d, a, b, false);
}
template <class T, int kAlongA, int kAlongB, int kCount>
void multiply_next(float (&d)[kCount], std::uint64_t a, std::uint64_t b) {
  multiply_both<T, kAlongA, kAlongB>(d, a, b, true);
}

template <int kCount>
void multiply_numbers(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b) {
  machine::Product product;
  product.columns = 2 * kCount;
  product.accumulates = false;
  product.b = {b};
  machine::issue(product, d, a);
}

}  // namespace annulus::cuda::ptx
