// Rows: an arithmetic progression of positions, the one shape that everything in Annulus has.
//
// A branch's queries and keys are Rows (docs/semantics.md, eq. 3). Cut by a range they are still Rows; two Rows
// intersect in Rows, whatever their strides; seen through the memory of whoever owns every s-th position they are Rows
// again.
#pragma once

#include <cstdint>

namespace annulus {

struct Rows {
  std::int64_t first = 0;
  std::int64_t stride = 1;  // >= 1; 1 for a single row
  std::int64_t count = 0;

  constexpr bool empty() const { return count == 0; }
  constexpr std::int64_t operator[](std::int64_t i) const { return first + i * stride; }
  constexpr std::int64_t last() const { return first + (count - 1) * stride; }  // not for empty rows
  constexpr Rows shifted(std::int64_t by) const { return {first + by, stride, count}; }

  bool operator==(const Rows&) const = default;
};

// The positions of [begin, end) that are congruent to `begin + offset` modulo stride, for 0 <= offset < stride.
Rows progression(std::int64_t begin, std::int64_t end, std::int64_t offset, std::int64_t stride);

// The index of the first row at or behind `position`; rows.count when there is none.
std::int64_t lower_index(const Rows& rows, std::int64_t position);

// The rows inside [begin, end).
Rows cut(const Rows& rows, std::int64_t begin, std::int64_t end);

// The positions that both have. For strides a and b the result has stride lcm(a, b), found by the Chinese remainder
// theorem.
Rows intersect(const Rows& a, const Rows& b);

// Where `rows` lie in a memory that holds exactly the positions `owned`, in order. Every row must be owned.
Rows memory_rows(const Rows& rows, const Rows& owned);

// The inverse: the positions of these rows of that memory.
Rows positions(const Rows& memory, const Rows& owned);

}  // namespace annulus
