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

// A tensor [2, 7, 3]: whoever holds which rows, the parts add up to the sum of the whole.
TEST(Checksum, PartsOfShardsAddUp) {
  std::vector<std::uint32_t> whole(2 * 7 * 3);
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<std::uint32_t>(i * i * 2654435761u);
  const std::uint64_t expected = checksum(whole.data(), 4, static_cast<std::int64_t>(whole.size()), 2);
  for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped})
    for (const int ranks : {1, 2, 3, 9}) {
      const Sharding sharding = resolve(Sharding{.ranks = ranks, .layout = layout}, 7);
      std::uint64_t sum = 0;
      for (const ShardMap& shard : shard_maps(sharding, 7)) {
        std::vector<std::uint32_t> part;
        shard.for_each_row(0, 2 * shard.rows(), [&](std::int64_t, std::int64_t there) {
          for (std::int64_t e = 0; e < 3; ++e) part.push_back(whole[static_cast<std::size_t>(there * 3 + e)]);
        });
        sum += checksum(part.data(), 4, shard, {2, 3}, 2);
      }
      EXPECT_EQ(sum, expected) << name(layout) << " " << ranks;
    }
}

}  // namespace
}  // namespace annulus::cli
