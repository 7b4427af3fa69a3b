// Every one of the 65,536 patterns of both types, and the two doubles on either side of every rounding boundary.
#include "numeric/half.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace annulus {
namespace {

constexpr std::uint32_t kPatterns = 65536;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
constexpr DType kDType = std::is_same_v<T, BFloat16> ? DType::bf16 : DType::fp16;

// What the bits mean, by the definition of the format and with none of the code under test.
double meaning(std::uint16_t bits, int exponent_bits, int fraction_bits) {
  const double sign = (bits >> 15) != 0 ? -1 : 1;
  const int biased = (bits & 0x7fff) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (biased == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * kInfinity;
  if (biased == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, biased - bias - fraction_bits);
}

template <class T>
double meaning(T x) {
  return std::is_same_v<T, BFloat16> ? meaning(x.bits, 8, 7) : meaning(x.bits, 5, 10);
}

template <class T>
T from_bits(std::uint32_t bits) {
  return {static_cast<std::uint16_t>(bits)};
}

template <class T>
class HalfTest : public testing::Test {};
using HalfTypes = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(HalfTest, HalfTypes);

TYPED_TEST(HalfTest, EveryPatternMeansWhatTheFormatSays) {
  for (std::uint32_t i = 0; i < kPatterns; ++i) {
    const auto x = from_bits<TypeParam>(i);
    const double expected = meaning(x);
    const double got = to_float(x);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << i;
    } else {
      ASSERT_EQ(got, expected) << i;
      ASSERT_EQ(std::signbit(got), std::signbit(expected)) << i;
    }
  }
}

TYPED_TEST(HalfTest, EveryPatternSurvivesTheRoundTrip) {
  for (std::uint32_t i = 0; i < kPatterns; ++i) {
    const auto x = from_bits<TypeParam>(i);
    const float value = to_float(x);
    const TypeParam by_float = from_float<TypeParam>(value);
    const TypeParam by_double = from_double<TypeParam>(value);
    ASSERT_EQ(by_float, by_double) << i;
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(by_float))) << i;
      ASSERT_EQ(by_float.bits >> 15, x.bits >> 15) << i;
    } else {
      ASSERT_EQ(by_float, x) << i;
      ASSERT_EQ(round_to(kDType<TypeParam>, static_cast<double>(value)), static_cast<double>(value)) << i;
    }
  }
}

// Between neighbours a < b: the middle goes to the even one, anything beside the middle to the nearer one.
TYPED_TEST(HalfTest, RoundsCorrectlyAroundEveryBoundary) {
  for (std::uint32_t sign : {0u, 0x8000u}) {
    for (std::uint32_t i = 0;; ++i) {
      const auto below = from_bits<TypeParam>(sign | i);
      const auto above = from_bits<TypeParam>(sign | (i + 1));
      if (std::isinf(meaning(below))) break;
      // Infinity takes the place of the next power of two.
      const double low = meaning(below);
      const double high =
          std::isinf(meaning(above)) ? std::copysign(std::ldexp(1.0, std::ilogb(low) + 1), low) : meaning(above);
      const double middle = (low + high) / 2;
      const auto even = (i & 1) == 0 ? below : above;
      const double down = std::nextafter(middle, low);
      const double up = std::nextafter(middle, high);
      ASSERT_EQ(from_double<TypeParam>(middle), even) << i;
      ASSERT_EQ(from_double<TypeParam>(down), below) << i;
      ASSERT_EQ(from_double<TypeParam>(up), above) << i;
      ASSERT_EQ(from_double<TypeParam>(std::nextafter(high, low)), above) << i;
      ASSERT_EQ(from_double<TypeParam>(std::nextafter(low, high)), below) << i;

      // All middles are floats too (bf16 subnormals: float subnormals).
      const auto middle_float = static_cast<float>(middle);
      ASSERT_EQ(static_cast<double>(middle_float), middle) << i;
      ASSERT_EQ(from_float<TypeParam>(middle_float), even) << i;
      ASSERT_EQ(from_float<TypeParam>(std::nextafter(middle_float, static_cast<float>(low))), below) << i;
      ASSERT_EQ(from_float<TypeParam>(
                    std::nextafter(middle_float, std::copysign(std::numeric_limits<float>::infinity(), middle_float))),
                above)
          << i;
    }
  }
}

TYPED_TEST(HalfTest, ADoubleIsRoundedOnce) {
  // Just above the middle of two neighbours of 1: float would round it onto the middle, and then down to even.
  const double step = ulp(kDType<TypeParam>, 1.0);
  const double value = std::nextafter(1 + step / 2, 2.0);
  EXPECT_EQ(round_to(kDType<TypeParam>, value), 1 + step);
  EXPECT_EQ(to_float(from_float<TypeParam>(static_cast<float>(value))), 1.0f);
}

TYPED_TEST(HalfTest, TheEndsOfTheRange) {
  const DType dtype = kDType<TypeParam>;
  const double smallest = meaning(from_bits<TypeParam>(1));
  EXPECT_EQ(round_to(dtype, smallest / 2), 0);
  EXPECT_EQ(round_to(dtype, std::nextafter(smallest / 2, 1.0)), smallest);
  EXPECT_EQ(round_to(dtype, smallest / 4), 0);
  EXPECT_EQ(round_to(dtype, std::numeric_limits<double>::denorm_min()), 0);
  EXPECT_TRUE(std::signbit(round_to(dtype, -std::numeric_limits<double>::denorm_min())));
  EXPECT_EQ(round_to(dtype, std::numeric_limits<double>::max()), kInfinity);
  EXPECT_EQ(round_to(dtype, -kInfinity), -kInfinity);
  EXPECT_EQ(from_float<TypeParam>(std::numeric_limits<float>::max()).bits & 0x7fff, format_of(dtype).infinity());
  EXPECT_EQ(ulp(dtype, 0.0), smallest);
  EXPECT_EQ(ulp(dtype, smallest), smallest);
  EXPECT_EQ(max_finite(dtype) + ulp(dtype, max_finite(dtype)), std::ldexp(1.0, std::ilogb(max_finite(dtype)) + 1));
}

TYPED_TEST(HalfTest, NaNsStayQuietNaNs) {
  const auto signalling = std::bit_cast<float>(0x7f800001u);  // its payload vanishes when cut off
  const auto negative = std::bit_cast<float>(0xff800001u);
  EXPECT_TRUE(std::isnan(meaning(from_float<TypeParam>(signalling))));
  EXPECT_TRUE(std::isnan(meaning(from_float<TypeParam>(negative))));
  EXPECT_EQ(from_float<TypeParam>(negative).bits >> 15, 1);
  EXPECT_TRUE(std::isnan(round_to(kDType<TypeParam>, std::bit_cast<double>(0x7ff0000000000001ull))));
  const int quiet = 1 << (format_of(kDType<TypeParam>).fraction_bits - 1);
  EXPECT_NE(from_float<TypeParam>(signalling).bits & quiet, 0);
}

template <class T>
void check_any_float(std::uint32_t bits) {
  const auto x = std::bit_cast<float>(bits);
  RC_ASSERT(from_float<T>(x) == from_double<T>(static_cast<double>(x)));
}

// The bits, so that zeros and NaNs count too.
TEST(Half, RoundingAFloatIsStoringIt) {
  const auto bits_of = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  // 13 bits are cut off where a result is normal, up to 11 more where it is not: all middles and their neighbours.
  for (std::uint32_t upper = 0; upper < (1u << 20); ++upper)
    for (const std::uint32_t lower : {0u, 1u, 0xfffu}) {
      const auto x = std::bit_cast<float>(upper << 12 | lower);
      if (bits_of(round_to(DType::fp16, x)) != bits_of(to_float(from_float<Float16>(x)))) FAIL() << bits_of(x);
    }
}

RC_GTEST_PROP(Half, FloatAndDoubleAgreeOnFloats, ()) {
  const auto bits = *rc::gen::arbitrary<std::uint32_t>();
  if (std::isnan(std::bit_cast<float>(bits))) return;  // widening a signalling NaN may change its payload
  check_any_float<BFloat16>(bits);
  check_any_float<Float16>(bits);
}

RC_GTEST_PROP(Half, RoundToFloatIsTheCast, ()) {
  const auto x = std::bit_cast<double>(*rc::gen::arbitrary<std::uint64_t>());
  const double rounded = round_to(DType::fp32, x);
  if (std::isnan(x)) {
    RC_ASSERT(std::isnan(rounded));
  } else {
    RC_ASSERT(std::bit_cast<std::uint32_t>(static_cast<float>(x)) == encode(x, format_of(DType::fp32)));
  }
}

static_assert(to_float(from_float<Float16>(1.0f)) == 1.0f);
static_assert(round_to(DType::bf16, 1.0 + 0x1p-9) == 1.0);

}  // namespace
}  // namespace annulus
