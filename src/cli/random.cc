#include "cli/random.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/thread_pool.h"
#include "numeric/half.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kGrain = 1 << 14;  // elements; a multiple of the four that one counter gives

// ln(x) for a normal x > 0: x = 2^e * m with m in [1/sqrt(2), sqrt(2)), ln m = 2 artanh((m - 1) / (m + 1)) as its
// series.
float natural_log(float x) {
  constexpr std::int32_t kHalfRoot = 0x3f3504f3;  // the bits of 1/sqrt(2)
  const auto bits = std::bit_cast<std::int32_t>(x);
  const std::int32_t exponent = (bits - kHalfRoot) >> 23;
  const auto m = std::bit_cast<float>(bits - (exponent << 23));
  const float s = (m - 1) / (m + 1);
  const float s2 = s * s;
  const float series = 1 + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
  return static_cast<float>(exponent) * 0.693147181f + 2 * s * series;
}

struct Point {
  float x;
  float y;
};

// A point on the unit circle: the top two bits choose the quadrant, the others the angle within [-pi/4, pi/4).
Point circle(std::uint32_t bits) {
  const std::uint32_t quadrant = bits >> 30;
  const auto fraction = static_cast<std::int32_t>(bits << 2);  // of half a quadrant, in 1/2^31
  const float t = static_cast<float>(fraction) * (0.785398163f * 0x1p-31f);
  const float t2 = t * t;
  const float sine = t * (1 + t2 * (-1.0f / 6 + t2 * (1.0f / 120 + t2 * (-1.0f / 5040 + t2 * (1.0f / 362880)))));
  const float cosine = 1 + t2 * (-1.0f / 2 + t2 * (1.0f / 24 + t2 * (-1.0f / 720 + t2 * (1.0f / 40320))));
  const float x = (quadrant & 1) != 0 ? -sine : cosine;
  const float y = (quadrant & 1) != 0 ? cosine : sine;
  return (quadrant & 2) != 0 ? Point{-x, -y} : Point{x, y};
}

// Box and Muller: two uniform words give two independent normal values, at most 6.6 from zero.
Point normal_pair(std::uint32_t radius_bits, std::uint32_t angle_bits) {
  const auto positive = static_cast<std::int32_t>((radius_bits >> 1) | 1);
  const float radius = std::sqrt(std::abs(2 * natural_log(static_cast<float>(positive) * 0x1p-31f)));
  const Point point = circle(angle_bits);
  return {radius * point.x, radius * point.y};
}

// Elements [4 * block, 4 * block + 4) of a stream.
std::array<float, 4> normal_block(std::uint64_t seed, Stream stream, std::uint64_t block) {
  const PhiloxCounter bits = philox4x32({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                                         static_cast<std::uint32_t>(stream), 0},
                                        {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  const Point a = normal_pair(bits[0], bits[1]);
  const Point b = normal_pair(bits[2], bits[3]);
  return {a.x, a.y, b.x, b.y};
}

// Elements [first, first + count) of a stream.
template <class T>
void fill(std::uint64_t seed, Stream stream, std::int64_t first, std::int64_t count, T* data) {
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t index = first + i;
    const std::array<float, 4> values = normal_block(seed, stream, static_cast<std::uint64_t>(index) / 4);
    for (auto lane = static_cast<std::size_t>(index % 4); lane < 4 && i < count; ++lane, ++i)
      data[i] = from_float<T>(values[lane]);
  }
}

// f(T()) with the element type in question.
template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::fp32:
      return f(float());
    case DType::bf16:
      return f(BFloat16());
    case DType::fp16:
      return f(Float16());
  }
}

}  // namespace

PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0];
    const std::uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

float normal_value(std::uint64_t seed, Stream stream, std::int64_t index) {
  return normal_block(seed, stream, static_cast<std::uint64_t>(index) / 4)[static_cast<std::size_t>(index % 4)];
}

void fill_normal(std::uint64_t seed, Stream stream, DType dtype, void* data, const ShardMap& shard,
                 const RowShape& shape, int threads) {
  if (shape.inner == 0) return;
  const std::int64_t rows = shape.outer * shard.rows();
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / shape.inner);
  with_type(dtype, [&](auto type) {
    auto* elements = static_cast<decltype(type)*>(data);
    ThreadPool::shared().run((rows + grain - 1) / grain, threads, [&](std::int64_t index, int) {
      const std::int64_t begin = index * grain;
      shard.for_each_row(begin, std::min(rows, begin + grain), [&](std::int64_t here, std::int64_t there) {
        fill(seed, stream, there * shape.inner, shape.inner, elements + here * shape.inner);
      });
    });
  });
}

void fill_normal(std::uint64_t seed, Stream stream, DType dtype, void* data, std::int64_t count, int threads) {
  with_type(dtype, [&](auto type) {
    auto* elements = static_cast<decltype(type)*>(data);
    ThreadPool::shared().run((count + kGrain - 1) / kGrain, threads, [&](std::int64_t grain, int) {
      const std::int64_t begin = grain * kGrain;
      fill(seed, stream, begin, std::min(count - begin, kGrain), elements + begin);
    });
  });
}

}  // namespace annulus::cli
