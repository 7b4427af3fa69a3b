// StridedBlock: bytes scattered through memory in a regular way, and how they lie when packed: the form in which rows
// travel.
//
// Rows of some heads of some segments of a tensor are four nested strides around a run of contiguous bytes. A message
// is a list of blocks, packed one behind the other; PackCursor packs it in pieces of any size, so that whoever moves
// it needs no memory for the whole.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace annulus {

struct Axis {
  std::int64_t count = 1;
  std::int64_t stride_bytes = 0;

  bool operator==(const Axis&) const = default;
};

struct StridedBlock {
  const std::byte* data = nullptr;
  std::array<Axis, 4> axes{};  // outermost first
  std::int64_t run_bytes = 0;

  bool operator==(const StridedBlock&) const = default;
  std::int64_t bytes() const { return axes[0].count * axes[1].count * axes[2].count * axes[3].count * run_bytes; }
};

std::int64_t total_bytes(std::span<const StridedBlock> blocks);

// The same bytes in the same order with runs as long as possible: an axis whose runs lie side by side becomes one run.
StridedBlock with_longest_runs(StridedBlock block);

// Blocks for the bytes [first, first + bytes) of the packed form.
std::vector<StridedBlock> part_of(std::span<const StridedBlock> blocks, std::int64_t first, std::int64_t bytes);

// Copies the block's bytes, in order, to `packed`; returns one behind the last.
std::byte* pack(const StridedBlock& block, std::byte* packed);

class PackCursor {
 public:
  PackCursor() = default;
  explicit PackCursor(std::span<const StridedBlock> blocks);  // which must outlive the cursor

  std::int64_t remaining_bytes() const { return remaining_bytes_; }

  // Packs the next piece.size() bytes; there must be that many.
  void pack(std::span<std::byte> piece);

 private:
  void enter_block();
  const std::byte* run() const;
  void advance_runs(std::int64_t runs);

  std::span<const StridedBlock> blocks_;  // the one being packed comes first
  StridedBlock block_;                    // that one, with neighbouring runs made one
  std::array<std::int64_t, 4> index_{};   // of the run being packed
  std::int64_t run_offset_ = 0;           // bytes of that run already packed
  std::int64_t remaining_bytes_ = 0;
};

}  // namespace annulus
