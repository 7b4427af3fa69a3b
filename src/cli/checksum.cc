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

template <class Bits>
std::uint64_t part_sum(const void* data, std::int64_t begin, std::int64_t end) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t sum = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
    sum += mix(bits + (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u);
  }
  return sum;
}

}  // namespace

std::uint64_t checksum(const void* data, std::int64_t element_bytes, std::int64_t count, int threads) {
  std::atomic<std::uint64_t> sum = 0;
  ThreadPool::shared().run((count + kGrain - 1) / kGrain, threads, [&](std::int64_t grain, int) {
    const std::int64_t begin = grain * kGrain;
    const std::int64_t end = std::min(count, begin + kGrain);
    sum += element_bytes == 2 ? part_sum<std::uint16_t>(data, begin, end) : part_sum<std::uint32_t>(data, begin, end);
  });
  return sum;
}

std::string checksum_text(std::uint64_t value) {
  std::string text(16, '0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = "0123456789abcdef"[(value >> (60 - 4 * i)) & 15];
  return text;
}

}  // namespace annulus::cli
