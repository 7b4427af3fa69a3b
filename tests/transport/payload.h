// Messages for the tests: bytes that every rank can work out, scattered through memory so that packing has work to do.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "annulus/strided_block.h"

namespace annulus {

using Bytes = std::vector<std::byte>;

// Byte `offset` of the message that `key` names.
inline std::byte payload_byte(std::uint64_t key, std::uint64_t offset) {
  std::uint64_t x = (key + 1) * 0x9e3779b97f4a7c15 + (offset >> 3) * 0xbf58476d1ce4e5b9;
  x ^= x >> 31;
  x *= 0x94d049bb133111eb;
  return static_cast<std::byte>(x >> (8 * (offset & 7)));
}

inline Bytes payload(std::uint64_t key, std::size_t bytes) {
  Bytes all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = payload_byte(key, i);
  return all;
}

// The offset of the first byte that differs, or -1.
inline std::int64_t first_wrong(std::span<const std::byte> got, std::uint64_t key) {
  for (std::size_t i = 0; i < got.size(); ++i)
    if (got[i] != payload_byte(key, i)) return static_cast<std::int64_t>(i);
  return -1;
}

// A message in the memory of its sender: blocks with random strides and gaps, whose packed form is payload(key, bytes).
class ScatteredMessage {
 public:
  ScatteredMessage(std::uint64_t key, std::int64_t bytes) : random_(key * 7919 + 1) {
    while (bytes > 0) bytes -= add_block(bytes);
    fill(key);
  }

  const std::vector<StridedBlock>& blocks() const { return blocks_; }

 private:
  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }

  // A block of at most `bytes`; its strides leave gaps, or none, between runs.
  std::int64_t add_block(std::int64_t bytes) {
    constexpr std::array<std::int64_t, 8> kRuns{1, 2, 4, 8, 16, 64, 200, 4096};
    StridedBlock block;
    block.run_bytes = std::min(bytes, draw(0, 3) == 0 ? bytes : kRuns[static_cast<std::size_t>(draw(0, 7))]);
    std::int64_t left = bytes / block.run_bytes, extent = block.run_bytes;
    for (std::size_t i = block.axes.size(); i-- > 0;) {
      const std::int64_t most = i == 0 ? left : std::min<std::int64_t>(left, i == 3 ? 1000 : 5);
      block.axes[i] = {.count = draw(1, most), .stride_bytes = extent + (draw(0, 1) == 0 ? 0 : draw(1, 40))};
      left /= block.axes[i].count;
      extent = block.axes[i].count * block.axes[i].stride_bytes;
    }
    memory_.emplace_back(static_cast<std::size_t>(extent));
    block.data = memory_.back().data();
    blocks_.push_back(block);
    return block.bytes();
  }

  // Walks the blocks by the definition, one byte at a time: shares nothing with pack().
  void fill(std::uint64_t key) {
    std::uint64_t offset = 0;
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      const auto& [data, axes, run_bytes] = blocks_[b];
      for (std::int64_t i0 = 0; i0 < axes[0].count; ++i0)
        for (std::int64_t i1 = 0; i1 < axes[1].count; ++i1)
          for (std::int64_t i2 = 0; i2 < axes[2].count; ++i2)
            for (std::int64_t i3 = 0; i3 < axes[3].count; ++i3)
              for (std::int64_t j = 0; j < run_bytes; ++j) {
                const std::int64_t at = i0 * axes[0].stride_bytes + i1 * axes[1].stride_bytes +
                                        i2 * axes[2].stride_bytes + i3 * axes[3].stride_bytes + j;
                memory_[b][static_cast<std::size_t>(at)] = payload_byte(key, offset++);
              }
    }
  }

  std::mt19937_64 random_;
  std::vector<Bytes> memory_;
  std::vector<StridedBlock> blocks_;
};

}  // namespace annulus
