#include "cli/checksum.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/thread_pool.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kGrain = 1 << 16;

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of elements that are [first, first + count) of the whole.
template <class Bits>
std::uint64_t part_sum(const unsigned char* bytes, std::int64_t first, std::int64_t count) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
    sum += mix(bits + (static_cast<std::uint64_t>(first + i) + 1) * 0x9e3779b97f4a7c15u);
  }
  return sum;
}

}  // namespace

std::uint64_t checksum(const void* data, std::int64_t element_bytes, const ShardMap& shard, const RowShape& shape,
                       int threads) {
  if (shape.inner == 0) return 0;
  const auto* bytes = static_cast<const unsigned char*>(data);
  const std::int64_t rows = shape.outer * shard.rows();
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / shape.inner);
  std::atomic<std::uint64_t> sum = 0;
  ThreadPool::shared().run((rows + grain - 1) / grain, threads, [&](std::int64_t index, int) {
    std::uint64_t part = 0;
    shard.for_each_row(index * grain, std::min(rows, (index + 1) * grain), [&](std::int64_t here, std::int64_t there) {
      const unsigned char* row = bytes + here * shape.inner * element_bytes;
      part += element_bytes == 2 ? part_sum<std::uint16_t>(row, there * shape.inner, shape.inner)
                                 : part_sum<std::uint32_t>(row, there * shape.inner, shape.inner);
    });
    sum += part;
  });
  return sum;
}

std::uint64_t checksum(const void* data, std::int64_t element_bytes, std::int64_t count, int threads) {
  return checksum(data, element_bytes, whole_sequence(count), {1, 1}, threads);
}

std::string checksum_text(std::uint64_t value) {
  std::string text(16, '0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = "0123456789abcdef"[(value >> (60 - 4 * i)) & 15];
  return text;
}

}  // namespace annulus::cli
