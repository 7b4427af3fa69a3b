// The generator: the published vectors of Philox, the moments and the tails of a normal distribution, and that nothing
// but (seed, tensor, index) matters.
#include "cli/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "numeric/half.h"

namespace annulus::cli {
namespace {

std::vector<float> draw(std::uint64_t seed, Stream stream, std::int64_t count, int threads) {
  std::vector<float> values(static_cast<std::size_t>(count));
  fill_normal(seed, stream, DType::fp32, values.data(), count, threads);
  return values;
}

TEST(Random, PhiloxGivesThePublishedVectors) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, AValueDependsOnSeedTensorAndIndexAlone) {
  const auto all = draw(7, Stream::k, 100'003, 1);
  EXPECT_EQ(draw(7, Stream::k, 100'003, 2), all);
  EXPECT_EQ(draw(7, Stream::k, 100'003, 5), all);
  for (const std::int64_t index : {0, 1, 2, 3, 4, 16'383, 16'384, 99'999, 100'002})
    EXPECT_EQ(normal_value(7, Stream::k, index), all[static_cast<std::size_t>(index)]) << index;
  auto prefix = all;
  prefix.resize(1'001);
  EXPECT_EQ(draw(7, Stream::k, 1'001, 3), prefix);
}

TEST(Random, SeedsTensorsAndFarIndicesDiffer) {
  const auto base = draw(1, Stream::q, 64, 1);
  EXPECT_NE(draw(2, Stream::q, 64, 1), base);
  EXPECT_NE(draw(1ull << 32 | 1, Stream::q, 64, 1), base);
  for (const Stream other : {Stream::k, Stream::v, Stream::dout}) EXPECT_NE(draw(1, other, 64, 1), base);
  EXPECT_NE(normal_value(1, Stream::q, std::int64_t{1} << 34), base[0]);
}

TEST(Random, TheValuesAreThoseOfEveryMachine) {
  // Written down once: they change only when the generator does, and then every recorded checksum changes with them.
  EXPECT_EQ(normal_value(0, Stream::q, 0), -0x1.d96d6p-1f);
  EXPECT_EQ(normal_value(0, Stream::q, 1), -0x1.fb7666p-1f);
  EXPECT_EQ(normal_value(0, Stream::dout, 123'456'789'012), 0x1.1ca6a2p+0f);
  EXPECT_EQ(normal_value(1, Stream::q, 3), 0x1.fe6e18p-3f);
}

TEST(Random, BoxMullerAgreesWithTheLibrary) {
  for (std::int64_t index = 0; index < 40'000; index += 2) {
    const PhiloxCounter bits = philox4x32({static_cast<std::uint32_t>(index / 4), 0, 2, 0}, {5, 0});
    const std::size_t pair = index % 4 == 0 ? 0 : 2;
    const auto uniform = static_cast<float>((bits[pair] >> 1) | 1);
    const double radius = std::sqrt(-2 * std::log(static_cast<double>(uniform) * 0x1p-31));
    // The angle is in [-pi/4, 7 pi/4): the fraction of a quadrant is taken as signed.
    const std::uint32_t quadrant = bits[pair + 1] >> 30;
    const auto fraction = static_cast<std::int32_t>(bits[pair + 1] << 2);
    const double angle = (quadrant + 0.5 * static_cast<double>(fraction) * 0x1p-31) * std::acos(-1.0) / 2;
    EXPECT_NEAR(normal_value(5, Stream::v, index), radius * std::cos(angle), 1e-6);
    EXPECT_NEAR(normal_value(5, Stream::v, index + 1), radius * std::sin(angle), 1e-6);
  }
}

TEST(Random, MomentsAreNormal) {
  const std::int64_t count = 4'000'000;
  const auto values = draw(3, Stream::q, count, 2);
  double sum = 0, sum2 = 0, sum3 = 0, sum4 = 0, product = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    sum += x;
    sum2 += x * x;
    sum3 += x * x * x;
    sum4 += x * x * x * x;
    product += x * static_cast<double>(values[(i + 1) % values.size()]);
  }
  const auto n = static_cast<double>(count);
  // Five standard deviations of each estimate.
  EXPECT_NEAR(sum / n, 0, 5 * std::sqrt(1 / n));
  EXPECT_NEAR(sum2 / n, 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(sum3 / n, 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(sum4 / n, 3, 5 * std::sqrt(96 / n));
  EXPECT_NEAR(product / n, 0, 5 * std::sqrt(1 / n));
}

TEST(Random, TheDistributionFunctionIsNormal) {
  const std::int64_t count = 1'000'000;
  auto values = draw(11, Stream::dout, count, 2);
  std::sort(values.begin(), values.end());
  double distance = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double expected = 0.5 * std::erfc(-static_cast<double>(values[i]) / std::sqrt(2.0));
    distance = std::max(distance, std::abs(expected - (static_cast<double>(i) + 0.5) / static_cast<double>(count)));
  }
  EXPECT_LT(distance, 1.95 / std::sqrt(static_cast<double>(count)));  // Kolmogorov's test at 0.1 %
  EXPECT_GT(values.back(), 4.0f);
  EXPECT_LT(values.back(), 6.7f);
}

TEST(Random, NarrowTypesAreTheRoundedValues) {
  const std::int64_t count = 1'003;
  std::vector<BFloat16> bf16(static_cast<std::size_t>(count));
  std::vector<Float16> fp16(static_cast<std::size_t>(count));
  fill_normal(9, Stream::v, DType::bf16, bf16.data(), count, 2);
  fill_normal(9, Stream::v, DType::fp16, fp16.data(), count, 2);
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = normal_value(9, Stream::v, i);
    EXPECT_EQ(bf16[static_cast<std::size_t>(i)], from_float<BFloat16>(value)) << i;
    EXPECT_EQ(fp16[static_cast<std::size_t>(i)], from_float<Float16>(value)) << i;
  }
}

TEST(Random, NothingIsWrittenForNoElements) { fill_normal(0, Stream::q, DType::fp32, nullptr, 0, 4); }

}  // namespace
}  // namespace annulus::cli
