#include "cli/checksum.h"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

namespace annulus::cli {
namespace {

std::vector<float> ramp(std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) * 0.5f;
  return values;
}

std::uint64_t sum_of(const std::vector<float>& values, int threads = 1) {
  return checksum(values.data(), 4, static_cast<std::int64_t>(values.size()), threads);
}

TEST(Checksum, IsTheDocumentedSum) {
  // SplitMix64 seeded with 0 gives mix(0x9e3779b97f4a7c15) first: the published value for an element of all zero bits.
  const float zero = 0;
  EXPECT_EQ(checksum(&zero, 4, 1, 1), 0xe220a8397b1dcdafu);
  EXPECT_EQ(checksum(nullptr, 4, 0, 1), 0u);
  const std::uint16_t half[] = {0, 0};
  EXPECT_EQ(checksum(half, 2, 2, 1), 0xe220a8397b1dcdafu + 0x6e789e6aa1b965f4u);
}

TEST(Checksum, IsTheSameForEveryThreadCount) {
  const auto values = ramp(1'000'003);
  EXPECT_EQ(sum_of(values, 1), sum_of(values, 2));
  EXPECT_EQ(sum_of(values, 1), sum_of(values, 7));
}

TEST(Checksum, SeesOneBitAndTheOrder) {
  const auto values = ramp(1'000);
  auto flipped = values;
  flipped[500] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(flipped[500]) ^ 1u);
  EXPECT_NE(sum_of(values), sum_of(flipped));
  auto swapped = values;
  std::swap(swapped[1], swapped[2]);
  EXPECT_NE(sum_of(values), sum_of(swapped));
  auto negative_zero = values;
  negative_zero[0] = -0.0f;
  EXPECT_NE(sum_of(values), sum_of(negative_zero));
}

TEST(Checksum, TextHasSixteenDigits) {
  EXPECT_EQ(checksum_text(0), "0000000000000000");
  EXPECT_EQ(checksum_text(0x0123456789abcdefu), "0123456789abcdef");
}

}  // namespace
}  // namespace annulus::cli
