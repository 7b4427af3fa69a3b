// Diagonal: the causal edge of a tile. Query i sees key j if key j does not lie behind it.
//
// Queries and keys of a group walk with the same stride, or with strides of which one divides the other: where only
// every s-th position of one of them is at hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "plan/rows.h"

namespace annulus {

inline constexpr std::int64_t kNoDiagonal = std::numeric_limits<std::int64_t>::max() / 4;

struct Diagonal {
  std::int64_t offset = kNoDiagonal;
  std::int64_t rise = 1;  // query i sees key j if j * run <= i * rise + offset
  std::int64_t run = 1;

  Diagonal() = default;
  Diagonal(std::int64_t offset_, std::int64_t rise_ = 1, std::int64_t run_ = 1)  // NOLINT(google-explicit-constructor)
      : offset(offset_), rise(rise_), run(run_) {}

  // In units of the finer stride. A single row has no stride of its own.
  static Diagonal between(const Rows& queries, const Rows& keys) {
    const std::int64_t query_stride = queries.count > 1 ? queries.stride : keys.stride;
    const std::int64_t key_stride = keys.count > 1 ? keys.stride : query_stride;
    const std::int64_t unit = std::min(query_stride, key_stride);
    return {floor_divide(queries.first - keys.first, unit), query_stride / unit, key_stride / unit};
  }

  // Counted from query i and key j on.
  Diagonal from(std::int64_t i, std::int64_t j) const {
    return offset == kNoDiagonal ? *this : Diagonal(offset + i * rise - j * run, rise, run);
  }

  // How many of the first key_count keys query i sees.
  std::int64_t visible_keys(std::int64_t i, std::int64_t key_count) const {
    return std::clamp<std::int64_t>(floor_divide(i * rise + offset, run) + 1, 0, key_count);
  }
  // The first of query_count queries that sees key j.
  std::int64_t first_query(std::int64_t j, std::int64_t query_count) const {
    return std::clamp<std::int64_t>(-floor_divide(offset - j * run, rise), 0, query_count);
  }
  // Whether the last of query_count queries, and with it every other, sees no key at all.
  bool hides_all(std::int64_t query_count) const { return (query_count - 1) * rise + offset < 0; }
  // Whether every query sees key_count keys.
  bool hides_none(std::int64_t key_count) const { return (key_count - 1) * run <= offset; }

 private:
  static std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
    if (b == 1) return a;
    return a >= 0 ? a / b : -((b - 1 - a) / b);
  }
};

}  // namespace annulus
