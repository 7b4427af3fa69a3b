// The algebra of Rows against sets: whatever is said in progressions must be true of the positions themselves.
#include "plan/rows.h"

#include <numeric>
#include <set>
#include <stdexcept>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/draw_case.h"

namespace annulus {
namespace {

using support::draw_between;
using Wide = __int128;
using Set = std::set<std::int64_t>;

constexpr std::int64_t kFar = std::int64_t{1} << 60;  // the most tokens that a problem may have

Set set_of(const Rows& rows) {
  Set positions;
  for (std::int64_t i = 0; i < rows.count; ++i) positions.insert(rows[i]);
  return positions;
}

bool contains(const Rows& rows, std::int64_t position) {
  if (rows.empty() || position < rows.first) return false;
  const Wide distance = static_cast<Wide>(position) - rows.first;
  return distance % rows.stride == 0 && distance / rows.stride < rows.count;
}

// A draw costs a microsecond, so a case of a property is many of them.
template <class F>
void repeat(F f) {
  for (int round = 0; round < 50; ++round) f();
}

Rows draw_small() { return {draw_between(0, 60), draw_between(1, 12), draw_between(0, 20)}; }

// Rows that pass through `meeting`, with as few as one row on either side.
Rows draw_through(std::int64_t meeting, std::int64_t stride, std::int64_t most) {
  const std::int64_t before = draw_between(0, std::min(most, meeting / stride));
  return {meeting - before * stride, stride, before + draw_between(1, most)};
}

TEST(Rows, NothingIsEmptyAndNextToNothingIsNot) {
  EXPECT_TRUE(Rows{}.empty());
  const Rows rows{7, 3, 4};
  EXPECT_FALSE(rows.empty());
  EXPECT_EQ(rows[0], 7);
  EXPECT_EQ(rows[3], 16);
  EXPECT_EQ(rows.last(), 16);
  EXPECT_EQ(rows.shifted(5), (Rows{12, 3, 4}));
}

RC_GTEST_PROP(RowsProperty, ProgressionIsAResidueClass, ()) {
  repeat([] {
    const std::int64_t begin = draw_between(0, 50);
    const std::int64_t end = begin + draw_between(0, 50);
    const std::int64_t stride = draw_between(1, 60);
    const std::int64_t offset = draw_between(0, stride - 1);
    Set want;
    for (std::int64_t t = begin; t < end; ++t)
      if ((t - begin) % stride == offset) want.insert(t);
    const Rows rows = progression(begin, end, offset, stride);
    RC_ASSERT(set_of(rows) == want);
    RC_ASSERT(rows.empty() || rows.stride == (rows.count == 1 ? 1 : stride));
  });
}

TEST(Rows, ProgressionOfHugeNumbers) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_TRUE(progression(5, 10, kMost - 1, kMost).empty());
  EXPECT_EQ(progression(0, kFar, kFar - 1, kMost), (Rows{kFar - 1, 1, 1}));
  EXPECT_EQ(progression(0, kFar, 3, kFar / 4), (Rows{3, kFar / 4, 4}));
  EXPECT_EQ(progression(kFar - 10, kFar, 1, 4), (Rows{kFar - 9, 4, 3}));
}

RC_GTEST_PROP(RowsProperty, LowerIndexCountsTheRowsBefore, ()) {
  repeat([] {
    const Rows rows = draw_small();
    const std::int64_t position = draw_between(-5, 320);
    std::int64_t before = 0;
    for (const std::int64_t t : set_of(rows)) before += t < position ? 1 : 0;
    RC_ASSERT(lower_index(rows, position) == before);
  });
}

RC_GTEST_PROP(RowsProperty, CutKeepsWhatLiesInside, ()) {
  repeat([] {
    const Rows rows = draw_small();
    const std::int64_t begin = draw_between(-3, 300);
    const std::int64_t end = draw_between(-3, 300);  // may lie before begin
    Set want;
    for (const std::int64_t t : set_of(rows))
      if (begin <= t && t < end) want.insert(t);
    const Rows inside = cut(rows, begin, end);
    RC_ASSERT(set_of(inside) == want);
    RC_ASSERT(inside.empty() || inside.stride == (inside.count == 1 ? 1 : rows.stride));
  });
}

RC_GTEST_PROP(RowsProperty, CutOfHugeNumbers, ()) {
  repeat([] {
    const Rows rows = draw_through(kFar - draw_between(0, kFar / 2), draw_between(1, kFar / 64), 16);
    const std::int64_t begin = rows.first + draw_between(0, 16) * rows.stride + draw_between(-1, 1);
    const std::int64_t end = begin + draw_between(0, 16) * rows.stride + draw_between(0, 1);
    Set want;
    for (const std::int64_t t : set_of(rows))
      if (begin <= t && t < end) want.insert(t);
    RC_ASSERT(set_of(cut(rows, begin, end)) == want);
  });
}

RC_GTEST_PROP(RowsProperty, PiecesOfACutAreTheWhole, ()) {
  repeat([] {
    const Rows rows = draw_small();
    const std::int64_t middle = draw_between(0, 300);
    Set pieces = set_of(cut(rows, 0, middle));
    pieces.merge(set_of(cut(rows, middle, 1000)));
    RC_ASSERT(pieces == set_of(rows));
    RC_ASSERT(cut(rows, 0, middle).count + cut(rows, middle, 1000).count == rows.count);
  });
}

void check_intersection(const Rows& a, const Rows& b, const Set& want) {
  const Rows both = intersect(a, b);
  RC_ASSERT(set_of(both) == want);
  RC_ASSERT(set_of(intersect(b, a)) == want);
  if (both.count > 1) RC_ASSERT(both.stride == std::lcm(a.stride, b.stride));
}

RC_GTEST_PROP(RowsProperty, IntersectionOfAnyStrides, ()) {
  repeat([] {
    const Rows a = draw_small(), b = draw_small();
    const Set in_a = set_of(a), in_b = set_of(b);
    Set want;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::inserter(want, want.end()));
    check_intersection(a, b, want);
  });
}

RC_GTEST_PROP(RowsProperty, IntersectionOfHugeNumbers, ()) {
  repeat([] {
    // One has few rows, the other up to 2^60 of them; they often meet. Strides share a factor as often as not.
    const std::int64_t factor = *rc::gen::element<std::int64_t>(1, 6, 1 << 20, (std::int64_t{1} << 40) - 1);
    const std::int64_t meeting = kFar - draw_between(0, kFar / 2);
    const std::int64_t few_stride = factor * draw_between(1, kFar / 32 / factor);
    const std::int64_t many_stride = factor * draw_between(1, 1000);
    const Rows few = draw_through(meeting, few_stride, 16);
    Rows many = draw_through(meeting, many_stride, kFar / many_stride / 2);
    many.first += draw_between(0, 1) * draw_between(0, 5);
    Set want;
    for (const std::int64_t t : set_of(few))
      if (contains(many, t)) want.insert(t);
    check_intersection(few, many, want);
  });
}

RC_GTEST_PROP(RowsProperty, IntersectionOfStridesWhoseMultipleDoesNotFit, ()) {
  repeat([] {
    const std::int64_t meeting = kFar - draw_between(0, 1000);
    const Rows a = draw_through(meeting, kFar / 8 + draw_between(0, 1000), 4);
    const Rows b = draw_through(meeting, kFar / 8 + draw_between(0, 1000), 4);
    Set want;
    for (const std::int64_t t : set_of(a))
      if (contains(b, t)) want.insert(t);
    RC_ASSERT(set_of(intersect(a, b)) == want);
  });
}

RC_GTEST_PROP(RowsProperty, ASingleRowHasNoStride, ()) {
  repeat([] {
    const Rows rows = draw_small();
    const std::int64_t position = draw_between(0, 300);
    const Rows single{position, draw_between(1, kFar), 1};
    const Set want = contains(rows, position) ? Set{position} : Set{};
    RC_ASSERT(set_of(intersect(rows, single)) == want);
    RC_ASSERT(set_of(intersect(single, rows)) == want);
  });
}

RC_GTEST_PROP(RowsProperty, MemoryRowsAndPositionsAreInverse, ()) {
  repeat([] {
    const bool far = support::draw_bool();
    const Rows owned{draw_between(0, far ? kFar / 2 : 50), draw_between(1, far ? kFar / 64 : 9), draw_between(1, 30)};
    const std::int64_t first = draw_between(0, owned.count - 1);
    const std::int64_t stride = draw_between(1, 7);
    const Rows memory{first, stride, draw_between(0, 1 + (owned.count - 1 - first) / stride)};
    const Rows where = positions(memory, owned);
    RC_ASSERT(where.count == memory.count);
    for (std::int64_t i = 0; i < memory.count; ++i) RC_ASSERT(where[i] == owned[memory[i]]);
    const Rows back = memory_rows(where, owned);
    RC_ASSERT(set_of(back) == set_of(memory));
  });
}

RC_GTEST_PROP(RowsProperty, OnlyOwnedRowsHaveAPlaceInMemory, ()) {
  repeat([] {
    const Rows owned{draw_between(0, 20), draw_between(1, 6), draw_between(1, 20)};
    const Rows rows{draw_between(0, 60), draw_between(1, 12), draw_between(1, 8)};
    bool all_owned = true;
    for (const std::int64_t t : set_of(rows)) all_owned = all_owned && contains(owned, t);
    if (!all_owned) {
      RC_ASSERT_THROWS_AS(memory_rows(rows, owned), std::logic_error);
      return;
    }
    const Rows memory = memory_rows(rows, owned);
    for (std::int64_t i = 0; i < rows.count; ++i) RC_ASSERT(owned[memory[i]] == rows[i]);
  });
}

TEST(Rows, NoRowsStayNoRows) {
  const Rows some{3, 2, 5};
  EXPECT_TRUE(cut(Rows{}, 0, 100).empty());
  EXPECT_TRUE(intersect(Rows{}, some).empty());
  EXPECT_TRUE(intersect(some, Rows{}).empty());
  EXPECT_TRUE(memory_rows(Rows{}, some).empty());
  EXPECT_TRUE(positions(Rows{}, some).empty());
  EXPECT_EQ(lower_index(Rows{}, 5), 0);
}

}  // namespace
}  // namespace annulus
