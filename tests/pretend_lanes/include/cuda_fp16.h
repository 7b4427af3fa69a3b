// fp16 as CUDA has it, as far as src/kernels/cuda uses it.
#pragma once

#include <vector>

#include "device.h"
#include "numeric/half.h"

inline const float* annulus_fp16_values() {  // of all 65,536
  static const auto values = [] {
    std::vector<float> all(1 << 16);
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = annulus::to_float(annulus::Float16{static_cast<std::uint16_t>(i)});
    return all;
  }();
  return values.data();
}

struct __half {
  std::uint16_t bits;
  __half() = default;
  explicit constexpr __half(std::uint16_t bits_of_it) : bits(bits_of_it) {}
  explicit __half(float x) : bits(annulus::from_float<annulus::Float16>(x).bits) {}
  operator float() const { return annulus_fp16_values()[bits]; }
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __low2float(__half2 x) { return x.x; }
inline float __high2float(__half2 x) { return x.y; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
