// The two 16-bit floating point types, as bits and nothing more: bf16 (8 exponent bits, 7 fraction bits) and IEEE
// binary16 (5 and 10). Conversions round to nearest, ties to even; subnormals and infinities are exact and a NaN stays
// a (quiet) NaN.
//
// A double is rounded once. Going through float would round twice, and a value just above a tie would then fall on it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "annulus/tensor.h"

namespace annulus {

struct BFloat16 {
  std::uint16_t bits;
  bool operator==(const BFloat16&) const = default;  // of the bits: -0 differs from 0, a NaN equals itself
};

struct Float16 {
  std::uint16_t bits;
  bool operator==(const Float16&) const = default;
};

// An IEEE binary format: a sign, `exponent_bits`, `fraction_bits`.
struct FloatFormat {
  int exponent_bits;
  int fraction_bits;

  constexpr int min_exponent() const { return 2 - (1 << (exponent_bits - 1)); }  // of the smallest normal number
  constexpr std::uint64_t sign() const { return std::uint64_t{1} << (exponent_bits + fraction_bits); }
  constexpr std::uint64_t infinity() const { return ((std::uint64_t{1} << exponent_bits) - 1) << fraction_bits; }
};

constexpr FloatFormat format_of(DType dtype) {
  if (dtype == DType::bf16) return {8, 7};
  if (dtype == DType::fp16) return {5, 10};
  return {8, 23};
}

// The bits of `value` in a narrower format. A carry out of the fraction runs into the exponent, which is just what
// rounding up to the next power of two, to the smallest normal number or to infinity means.
template <class Real>
constexpr std::uint64_t encode(Real value, FloatFormat to) {
  static_assert(std::is_same_v<Real, float> || std::is_same_v<Real, double>);
  using Bits = std::conditional_t<std::is_same_v<Real, float>, std::uint32_t, std::uint64_t>;
  constexpr FloatFormat from = std::is_same_v<Real, float> ? FloatFormat{8, 23} : FloatFormat{11, 52};

  const std::uint64_t bits = std::bit_cast<Bits>(value);
  const std::uint64_t magnitude = bits & (from.sign() - 1);
  const std::uint64_t sign = magnitude == bits ? 0 : to.sign();
  const int narrower_by = from.fraction_bits - to.fraction_bits;
  if (magnitude > from.infinity()) {
    const std::uint64_t payload = (magnitude & ((std::uint64_t{1} << from.fraction_bits) - 1)) >> narrower_by;
    return sign | to.infinity() | (std::uint64_t{1} << (to.fraction_bits - 1)) | payload;
  }
  if (magnitude == from.infinity()) return sign | to.infinity();

  // value = significand * 2^(exponent - from.fraction_bits)
  const auto biased = static_cast<int>(magnitude >> from.fraction_bits);
  const std::uint64_t hidden = std::uint64_t{biased != 0} << from.fraction_bits;
  const std::uint64_t significand = (magnitude & ((std::uint64_t{1} << from.fraction_bits) - 1)) | hidden;
  const int exponent = std::max(biased, 1) - 1 + from.min_exponent();
  const int steps_above = exponent - to.min_exponent();  // negative: subnormal there
  const int drop = narrower_by + std::max(0, -steps_above);
  if (drop > from.fraction_bits + 1) return sign;  // below half of the smallest number
  const std::uint64_t rest = significand & ((std::uint64_t{1} << drop) - 1);
  const std::uint64_t half = std::uint64_t{1} << (drop - 1);
  std::uint64_t kept = significand >> drop;
  kept += std::uint64_t{rest > half || (rest == half && (kept & 1) != 0)};
  const auto above = static_cast<std::uint64_t>(std::max(0, steps_above));
  return sign | std::min(kept + (above << to.fraction_bits), to.infinity());
}

constexpr float to_float(float x) { return x; }

constexpr float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

constexpr float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero and subnormals: multiples of 2^-24, exact in float
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const std::uint32_t rebias = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
}

// T is float, BFloat16 or Float16.
template <class T>
constexpr T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    // The upper half of the float, rounded by a carry: short enough for a compiler to vectorise.
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
  } else {
    static_assert(std::is_same_v<T, Float16>);
    return {static_cast<std::uint16_t>(encode(x, format_of(DType::fp16)))};
  }
}

template <class T>
constexpr T from_double(double x) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(x);
  } else {
    constexpr DType dtype = std::is_same_v<T, BFloat16> ? DType::bf16 : DType::fp16;
    static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
    return {static_cast<std::uint16_t>(encode(x, format_of(dtype)))};
  }
}

// `x` as `dtype` stores it: rounded once.
constexpr double round_to(DType dtype, double x) {
  if (dtype == DType::bf16) return to_float(from_double<BFloat16>(x));
  if (dtype == DType::fp16) return to_float(from_double<Float16>(x));
  return static_cast<float>(x);
}

// to_float(from_float<Float16>(x)) in a few selections, for loops that a compiler is to vectorise.
constexpr float round_to_fp16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits & 0x80000000u;
  const std::uint32_t magnitude = bits ^ sign;
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
  const float multiple = (std::bit_cast<float>(magnitude) + 0.5f) - 0.5f;  // of 2^-24, the unit of [0.5, 1)
  const auto subnormal = std::bit_cast<std::uint32_t>(multiple);
  const std::uint32_t beyond = magnitude > 0x7f800000u ? (magnitude & ~0x1fffu) | 0x400000u : 0x7f800000u;
  const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;        // below 2^-14
  return std::bit_cast<float>(sign | (magnitude < 0x477ff000u ? finite : beyond));  // 65520 is the first infinity
}

constexpr float round_to(DType dtype, float x) {
  if (dtype == DType::bf16) return to_float(from_float<BFloat16>(x));
  if (dtype == DType::fp16) return round_to_fp16(x);
  return x;
}

// The unit in the last place: how far apart the numbers of `dtype` lie at the magnitude of a finite x.
inline double ulp(DType dtype, double x) {
  const FloatFormat format = format_of(dtype);
  const int exponent = x == 0 ? format.min_exponent() : std::max(std::ilogb(x), format.min_exponent());
  return std::ldexp(1.0, exponent - format.fraction_bits);
}

// The largest finite number.
constexpr double max_finite(DType dtype) {
  if (dtype == DType::bf16) return to_float(BFloat16{0x7f7f});
  if (dtype == DType::fp16) return to_float(Float16{0x7bff});
  return std::numeric_limits<float>::max();
}

}  // namespace annulus
