// From tasks to groups, by arithmetic: a group is one dense attention between strided rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/task.h"

namespace annulus {

inline bool takes_part(const Rows& heads, std::int64_t head) {
  return head >= heads.first && head <= heads.last() && (head - heads.first) % heads.stride == 0;
}

enum class Side { queries, keys };

// Calls f(queries, keys) for every group of the task that has rows in [begin, end) on the given side; that side is cut to the range,
// the other one is whole. Their first rows tell how far the cut one starts inside the group.
template <class F>
void for_each_group(const Task& task, Side side, std::int64_t begin, std::int64_t end, F f) {
  const Rows& near = side == Side::queries ? task.queries : task.keys;
  for (std::int64_t c = 0; c < task.classes.count; ++c) {
    const std::int64_t shift = c * task.classes.step;
    const std::int64_t step = task.segments.step;
    const std::int64_t before = begin - (near.last() + shift);
    const std::int64_t from = before > 0 ? (before + step - 1) / step : 0;
    const std::int64_t room = end - 1 - (near.first + shift);
    const std::int64_t to = room < 0 ? 0 : std::min(task.segments.count, room / step + 1);
    for (std::int64_t s = from; s < to; ++s) {
      Rows queries = task.queries.shifted(shift + s * step);
      Rows keys = task.keys.shifted(shift + s * step);
      Rows& cut_side = side == Side::queries ? queries : keys;
      cut_side = cut(cut_side, begin, end);
      if (!cut_side.empty()) f(queries, keys);
    }
  }
}

// Query i sees key j of a group if j <= i + diagonal: both walk with the same stride.
inline std::int64_t diagonal_of(const Rows& queries, const Rows& keys) {
  // Rounds down: a negative distance that is not a multiple cannot occur, both are of one class.
  return (queries.first - keys.first) / keys.stride;
}

}  // namespace annulus
