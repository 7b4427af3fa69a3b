// Blocks: how work is dealt to threads. A block is a run of rows of one head that never leaves its span; whoever
// computes a block keeps its fp32 results in scratch until all branches have been through, so no partial result goes to
// memory while a step lasts.
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
  Rows positions;
  std::int64_t first_row = 0;  // of this rank's memory; the others follow it

  std::int64_t count() const { return positions.count; }
  // Rows of this rank's memory.
  Rows memory() const { return {first_row, 1, positions.count}; }
  // Those of the block that hold these positions, counted from its first.
  Rows find(const Rows& rows) const { return memory_rows(rows, positions); }
};

class Blocks {
 public:
  // A block's scratch of one fp32 row a position is 1 MiB, and less where the tiles of a large head need the room: all
  // scratch of a thread stays below 4 MiB.
  static std::int64_t max_rows(std::int64_t head_dim) {
    return (262'144 - 384 * std::max<std::int64_t>(0, head_dim - 256)) / padded(head_dim);
  }

  Blocks(const Context& context, std::int64_t heads) : context_(context), heads_(heads) {
    find_runs();
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
    const auto r = static_cast<std::size_t>(std::upper_bound(first_block_.begin(), first_block_.end(), index) -
                                            first_block_.begin() - 1);
    const Run& run = runs_[r];
    const std::int64_t begin = (index - first_block_[r]) * rows_ - lead(run);
    const std::int64_t first = std::max<std::int64_t>(begin, 0);
    const std::int64_t last = std::min(begin + rows_, run.positions.count);
    block.span = run.span;
    block.positions = {run.positions[first], last - first == 1 ? 1 : run.positions.stride, last - first};
    block.first_row = run.first_row + first;
    return block;
  }

 private:
  static constexpr std::int64_t kFewestRows = 256;

  // The rows of one span that lie in one piece of this rank.
  struct Run {
    const Span* span = nullptr;
    Rows positions;
    std::int64_t first_row = 0;
  };

  void find_runs() {
    std::int64_t first_row = 0;
    for (const Rows& piece : context_.shard.pieces) {
      for (const Span& span : context_.plan.spans) {
        const Rows positions = cut(piece, span.begin, span.end);
        if (!positions.empty()) runs_.push_back({&span, positions, first_row + lower_index(piece, span.begin)});
      }
      first_row += piece.count;
    }
  }

  // The longest segments that fit a block decide its length: keys of a segment that lies in one block are packed once.
  static std::int64_t aligned_rows(const Problem& problem) {
    const std::int64_t most = max_rows(problem.head_dim);
    std::int64_t segment = 1;
    for (const Branch& branch : problem.pattern.branches)
      if (branch.segment <= most) segment = std::max(segment, branch.segment);
    return most / segment * segment;
  }

  // Blocks begin where segments do, wherever the run begins: the first one may be shorter.
  std::int64_t lead(const Run& run) const {
    return run.positions.stride == 1 ? (run.positions.first - run.span->begin) % rows_ : 0;
  }

  void count_blocks() {
    first_block_.assign(1, 0);
    for (const Run& run : runs_)
      first_block_.push_back(first_block_.back() + (run.positions.count + lead(run) + rows_ - 1) / rows_);
  }

  const Context& context_;
  std::int64_t heads_;
  std::int64_t rows_ = 0;
  std::vector<Run> runs_;
  std::vector<std::int64_t> first_block_;  // of each run, and the total
};

}  // namespace annulus::cpu
