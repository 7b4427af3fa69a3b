#include "plan/rows.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace annulus {
namespace {

// x with a * x = gcd(a, m) (mod m), 0 <= x < m.
std::int64_t inverse(std::int64_t a, std::int64_t m) {
  std::int64_t old_r = a % m, r = m, old_x = 1, x = 0;
  while (r != 0) {
    const std::int64_t quotient = old_r / r;
    old_r = std::exchange(r, old_r - quotient * r);
    old_x = std::exchange(x, old_x - quotient * x);
  }
  return ((old_x % m) + m) % m;
}

// A single row has stride 1: a larger one means nothing, and would overflow sums that take it for a step.
Rows with_count(std::int64_t first, std::int64_t stride, std::int64_t count) {
  return {first, count == 1 ? 1 : stride, count};
}

Rows make_rows(std::int64_t first, std::int64_t stride, std::int64_t end) {
  return first < end ? with_count(first, stride, 1 + (end - 1 - first) / stride) : Rows{};
}

}  // namespace

Rows progression(std::int64_t begin, std::int64_t end, std::int64_t offset, std::int64_t stride) {
  // Compare before adding: offset may be as large as an int64 allows.
  return offset < end - begin ? make_rows(begin + offset, stride, end) : Rows{};
}

std::int64_t lower_index(const Rows& rows, std::int64_t position) {
  if (position <= rows.first) return 0;
  return std::min(rows.count, 1 + (position - 1 - rows.first) / rows.stride);
}

Rows cut(const Rows& rows, std::int64_t begin, std::int64_t end) {
  const std::int64_t from = lower_index(rows, begin);
  const std::int64_t to = lower_index(rows, end);
  return from < to ? with_count(rows[from], rows.stride, to - from) : Rows{};
}

Rows intersect(const Rows& a, const Rows& b) {
  if (a.empty() || b.empty()) return {};
  const std::int64_t begin = std::max(a.first, b.first);
  const std::int64_t end = std::min(a.last(), b.last()) + 1;
  if (begin >= end) return {};
  if (a.stride == 1 || a.count == 1) return cut(b, begin, end);
  if (b.stride == 1 || b.count == 1) return cut(a, begin, end);
  const std::int64_t common = std::gcd(a.stride, b.stride);
  const std::int64_t distance = b.first - a.first;
  if (distance % common != 0) return {};
  // a.first + i * a.stride = b.first (mod b.stride): divide by the common factor, then i is unique modulo b.stride /
  // common. The product may not fit 64 bits although the position that it stands for does.
  const std::int64_t modulus = b.stride / common;
  const std::int64_t wanted = ((distance / common) % modulus + modulus) % modulus;
  const auto i =
      static_cast<std::int64_t>(static_cast<__int128>(wanted) * inverse(a.stride / common, modulus) % modulus);
  const __int128 stride = static_cast<__int128>(a.stride) * modulus;
  __int128 first = a.first + static_cast<__int128>(i) * a.stride;
  if (first < begin) first += (begin - first + stride - 1) / stride * stride;
  if (first >= end) return {};
  const auto start = static_cast<std::int64_t>(first);
  if (stride > end - 1 - start) return {start, 1, 1};  // before it is cut to 64 bits
  return make_rows(start, static_cast<std::int64_t>(stride), end);
}

Rows memory_rows(const Rows& rows, const Rows& owned) {
  if (rows.empty()) return {};
  const bool fits = rows.first >= owned.first && rows.last() <= owned.last() &&
                    (rows.first - owned.first) % owned.stride == 0 &&
                    (rows.count == 1 || rows.stride % owned.stride == 0);
  if (!fits) throw std::logic_error("memory_rows: rows that are not owned");
  return with_count((rows.first - owned.first) / owned.stride, rows.stride / owned.stride, rows.count);
}

Rows positions(const Rows& memory, const Rows& owned) {
  if (memory.empty()) return {};
  if (memory.count == 1) return {owned[memory.first], 1, 1};
  return {owned[memory.first], memory.stride * owned.stride, memory.count};
}

}  // namespace annulus
