// bf16 as CUDA has it, as far as src/kernels/cuda uses it.
#pragma once

#include <bit>

#include "numeric/half.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
  __nv_bfloat16() = default;
  explicit constexpr __nv_bfloat16(std::uint16_t bits_of_it) : bits(bits_of_it) {}
  explicit __nv_bfloat16(float x) : bits(annulus::from_float<annulus::BFloat16>(x).bits) {}
  operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
