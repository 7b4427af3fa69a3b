// From tasks to groups, by arithmetic: a group is one dense attention between strided rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/phase.h"
#include "plan/task.h"

namespace annulus {

struct SegmentRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// The segments of a task that may have both some of the queries and some of the keys: those that reach at least to the
// later first row and begin at most at the earlier last one.
inline SegmentRange shared_segments(const Task& task, const Rows& queries, const Rows& keys) {
  if (queries.empty() || keys.empty()) return {};
  const std::int64_t first_row = std::max(queries.first, keys.first) - task.begin;
  const std::int64_t last_row = std::min(queries.last(), keys.last()) - task.begin;
  if (last_row < 0) return {};
  const std::int64_t from = std::max<std::int64_t>(first_row, 0) / task.length;
  const std::int64_t to = std::min(last_row / task.length, task.count - 1);
  return {from, std::max<std::int64_t>(to - from + 1, 0)};
}

// Calls f(class, queries, keys) for every group of the task in these classes that has both queries and keys among the
// given ones.
template <class F>
void for_each_group(const Task& task, std::int64_t dilation, const Classes& classes, const Rows& queries,
                    const Rows& keys, F f) {
  const SegmentRange segments = shared_segments(task, queries, keys);
  const std::int64_t last_class = std::min(classes.first + classes.count, task.length);
  for (std::int64_t segment = segments.first; segment < segments.first + segments.count; ++segment)
    for (std::int64_t c = classes.first; c < last_class; ++c) {
      const Rows rows = task.rows(segment, c, dilation);
      const Rows group_queries = intersect(rows, queries);
      const Rows group_keys = intersect(rows, keys);
      if (!group_queries.empty() && !group_keys.empty()) f(c, group_queries, group_keys);
    }
}

}  // namespace annulus
