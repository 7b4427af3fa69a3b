// Task: a run of equal segments of one branch. Everything else follows by arithmetic.
//
// A segment, a class and a head that takes it are one group: dense attention between the rows progression(begin, begin
// + length, class, dilation). A run of whole segments is one task, whatever its length, and neither heads nor classes
// are listed: a plan's size does not grow with tokens, heads or dilations. Kernels cut groups to the rows that they
// have at hand.
#pragma once

#include <cstdint>

#include "plan/rows.h"

namespace annulus {

struct Task {
  int branch = 0;
  std::int64_t begin = 0;   // of the first segment
  std::int64_t length = 0;  // of each of them, and the way from one to the next
  std::int64_t count = 0;
  std::int64_t padded_rows =
      0;  // pad_like_torchscale: every class is filled up to so many rows by keys with logit 0 and value 0

  std::int64_t end() const { return begin + length * count; }
  Rows rows(std::int64_t segment, std::int64_t phase_class, std::int64_t dilation) const {
    const std::int64_t start = begin + segment * length;
    return progression(start, start + length, phase_class, dilation);
  }

  bool operator==(const Task&) const = default;
};

}  // namespace annulus
