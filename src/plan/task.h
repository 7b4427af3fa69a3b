// Task: dense attention between strided rows, and the same thing again for a run of segments and of classes.
//
// A task stands for segments.count * classes.count * heads.count groups. Group (s, c, h) attends
// queries.shifted(s * segments.step + c * classes.step) to keys shifted alike, in head heads[h]. A run of whole segments is one
// task, so a plan's size does not grow with the number of tokens; kernels turn tasks into tiles by arithmetic.
#pragma once

#include <cstdint>

#include "plan/rows.h"

namespace annulus {

struct Repeat {
  std::int64_t count = 1;
  std::int64_t step = 0;

  bool operator==(const Repeat&) const = default;
};

struct Task {
  int branch = 0;
  Rows queries;  // of the first group
  Rows keys;
  Rows heads;
  Repeat segments;
  Repeat classes;
  std::int64_t zero_keys = 0;  // keys with logit 0 and value 0 beside the real ones (pad_like_torchscale)

  bool operator==(const Task&) const = default;
};

}  // namespace annulus
