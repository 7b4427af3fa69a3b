// Blocks: how work is dealt to threads. A block is a range of positions of one head that never leaves its span; whoever
// computes a block keeps its fp32 results in scratch until all branches have been through, so no partial result ever
// goes to memory.
//
// Block sizes only decide who computes a row, never what comes out of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/context.h"

namespace annulus::cpu {

struct Block {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  const Span* span = nullptr;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

class Blocks {
 public:
  // A block's scratch of one fp32 row a position is 1 MiB, and less where the tiles of a large head need the room: all
  // scratch of a thread stays below 4 MiB.
  static std::int64_t max_rows(std::int64_t head_dim) {
    return (262'144 - 384 * std::max<std::int64_t>(0, head_dim - 256)) / padded(head_dim);
  }

  Blocks(const Context& context, std::int64_t heads) : context_(context), heads_(heads) {
    rows_ = aligned_rows(context.problem);
    count_blocks();
    // Few long blocks leave threads idle at the end.
    while (count() < 4 * context.threads && rows_ > kFewestRows) {
      rows_ = (rows_ + 1) / 2;
      count_blocks();
    }
  }

  std::int64_t count() const { return first_block_.back() * context_.problem.batch * heads_; }

  Block operator[](std::int64_t index) const {
    Block block;
    block.head = index % heads_;
    index /= heads_;
    block.batch = index / first_block_.back();
    index %= first_block_.back();
    const auto above = std::upper_bound(first_block_.begin(), first_block_.end(), index);
    const std::int64_t span = above - first_block_.begin() - 1;
    block.span = &context_.plan.spans[static_cast<std::size_t>(span)];
    block.begin = block.span->begin + (index - first_block_[static_cast<std::size_t>(span)]) * rows_;
    block.end = std::min(block.begin + rows_, block.span->end);
    return block;
  }

 private:
  static constexpr std::int64_t kFewestRows = 256;

  // The longest segments that fit a block decide its length: keys of a segment that lies in one block are packed once.
  static std::int64_t aligned_rows(const Problem& problem) {
    const std::int64_t most = max_rows(problem.head_dim);
    std::int64_t segment = 1;
    for (const Branch& branch : problem.pattern.branches)
      if (branch.segment <= most) segment = std::max(segment, branch.segment);
    return most / segment * segment;
  }

  void count_blocks() {
    first_block_.assign(1, 0);
    for (const Span& span : context_.plan.spans)
      first_block_.push_back(first_block_.back() + (span.end - span.begin + rows_ - 1) / rows_);
  }

  const Context& context_;
  std::int64_t heads_;
  std::int64_t rows_ = 0;
  std::vector<std::int64_t> first_block_;  // of each span, and the total
};

}  // namespace annulus::cpu
