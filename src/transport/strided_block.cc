#include "annulus/strided_block.h"

#include <algorithm>
#include <cstring>

namespace annulus {
namespace {

// A run of a size known to the compiler is a load and a store; a call of memcpy would take several times as long.
template <std::size_t kBytes>
std::byte* copy_short_runs(const std::byte* from, Axis axis, std::byte* to) {
  for (std::int64_t i = 0; i < axis.count; ++i, from += axis.stride_bytes, to += kBytes) std::memcpy(to, from, kBytes);
  return to;
}

std::byte* copy_runs(const std::byte* from, Axis axis, std::int64_t run_bytes, std::byte* to) {
  switch (run_bytes) {
    case 2:
      return copy_short_runs<2>(from, axis, to);
    case 4:
      return copy_short_runs<4>(from, axis, to);
    case 8:
      return copy_short_runs<8>(from, axis, to);
    case 16:
      return copy_short_runs<16>(from, axis, to);
    case 32:
      return copy_short_runs<32>(from, axis, to);
    case 64:
      return copy_short_runs<64>(from, axis, to);
    default:
      break;
  }
  for (std::int64_t i = 0; i < axis.count; ++i, from += axis.stride_bytes, to += run_bytes)
    std::memcpy(to, from, static_cast<std::size_t>(run_bytes));
  return to;
}

// Appends the bytes [first, end) of a block whose axes before `axis` have one index: whole runs of that axis as one
// block, and what is left of the indices at both ends by the axes inside.
void append_part(StridedBlock block, std::size_t axis, std::int64_t first, std::int64_t end,
                 std::vector<StridedBlock>& parts) {
  if (first == end) return;
  if (axis == block.axes.size()) {
    parts.push_back({.data = block.data + first, .run_bytes = end - first});
    return;
  }
  const Axis along = block.axes[axis];
  const std::int64_t inner = block.bytes() / along.count;
  const std::byte* const data = block.data;
  const auto with = [&](std::int64_t index, std::int64_t count) {
    block.data = data + index * along.stride_bytes;
    block.axes[axis].count = count;
    return block;
  };
  std::int64_t from = first / inner;
  const std::int64_t to = end / inner;
  if (from == to) return append_part(with(from, 1), axis + 1, first % inner, end % inner, parts);
  if (first % inner != 0) append_part(with(from++, 1), axis + 1, first % inner, inner, parts);
  if (from < to) parts.push_back(with(from, to - from));
  if (end % inner != 0) append_part(with(to, 1), axis + 1, 0, end % inner, parts);
}

}  // namespace

StridedBlock with_longest_runs(StridedBlock block) {
  std::array<Axis, 4> axes{};
  std::size_t free = axes.size();  // axes[free...] are taken
  for (std::size_t i = axes.size(); i-- > 0;) {
    const Axis axis = block.axes[i];
    if (axis.count == 1) continue;
    if (free == axes.size() && axis.stride_bytes == block.run_bytes)
      block.run_bytes *= axis.count;
    else if (free < axes.size() && axis.stride_bytes == axes[free].count * axes[free].stride_bytes)
      axes[free].count *= axis.count;
    else
      axes[--free] = axis;
  }
  block.axes = axes;
  return block;
}

std::vector<StridedBlock> part_of(std::span<const StridedBlock> blocks, std::int64_t first, std::int64_t bytes) {
  std::vector<StridedBlock> parts;
  for (const StridedBlock& block : blocks) {
    const std::int64_t size = block.bytes();
    const std::int64_t taken = std::min(size - std::min(first, size), bytes);
    if (taken > 0) append_part(block, 0, first, first + taken, parts);
    first = std::max<std::int64_t>(first - size, 0);
    bytes -= std::max<std::int64_t>(taken, 0);
  }
  return parts;
}

std::int64_t total_bytes(std::span<const StridedBlock> blocks) {
  std::int64_t bytes = 0;
  for (const StridedBlock& block : blocks) bytes += block.bytes();
  return bytes;
}

std::byte* pack(const StridedBlock& block, std::byte* packed) {
  PackCursor cursor({&block, 1});
  const std::span piece(packed, static_cast<std::size_t>(cursor.remaining_bytes()));
  cursor.pack(piece);
  return packed + piece.size();
}

PackCursor::PackCursor(std::span<const StridedBlock> blocks) : blocks_(blocks), remaining_bytes_(total_bytes(blocks)) {
  enter_block();
}

void PackCursor::enter_block() {
  while (!blocks_.empty() && blocks_.front().bytes() == 0) blocks_ = blocks_.subspan(1);
  if (!blocks_.empty()) block_ = with_longest_runs(blocks_.front());
  index_ = {};
}

const std::byte* PackCursor::run() const {
  const std::byte* at = block_.data;
  for (std::size_t i = 0; i < index_.size(); ++i) at += index_[i] * block_.axes[i].stride_bytes;
  return at;
}

// `runs` never reach beyond the end of the innermost axis.
void PackCursor::advance_runs(std::int64_t runs) {
  index_.back() += runs;
  for (std::size_t i = index_.size() - 1; index_[i] == block_.axes[i].count; --i) {
    if (i == 0) {
      blocks_ = blocks_.subspan(1);
      enter_block();
      return;
    }
    index_[i] = 0;
    ++index_[i - 1];
  }
}

void PackCursor::pack(std::span<std::byte> piece) {
  std::byte* to = piece.data();
  std::int64_t left = static_cast<std::int64_t>(piece.size());
  remaining_bytes_ -= left;
  while (left > 0) {
    const std::int64_t whole_runs = std::min(block_.axes.back().count - index_.back(), left / block_.run_bytes);
    if (run_offset_ == 0 && whole_runs > 0) {
      to = copy_runs(run(), {whole_runs, block_.axes.back().stride_bytes}, block_.run_bytes, to);
      left -= whole_runs * block_.run_bytes;
      advance_runs(whole_runs);
      continue;
    }
    const std::int64_t part = std::min(block_.run_bytes - run_offset_, left);
    std::memcpy(to, run() + run_offset_, static_cast<std::size_t>(part));
    to += part;
    left -= part;
    run_offset_ += part;
    if (run_offset_ == block_.run_bytes) {
      run_offset_ = 0;
      advance_runs(1);
    }
  }
}

}  // namespace annulus
