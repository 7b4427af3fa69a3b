// The causal edge between rows whose strides divide one another, held against the positions themselves.
#include "kernels/diagonal.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/draw_case.h"

namespace annulus {
namespace {

using support::draw_between;

RC_GTEST_PROP(DiagonalProperty, SeesWhatDoesNotLieBehind, ()) {
  const std::int64_t unit = draw_between(1, 5), factor = draw_between(1, 4);
  const bool sparse_queries = support::draw_bool();
  const auto draw = [&](std::int64_t stride) {
    const std::int64_t count = draw_between(1, 12);
    return Rows{draw_between(0, 60), count == 1 ? 1 : stride, count};
  };
  const Rows queries = draw(sparse_queries ? unit * factor : unit);
  const Rows keys = draw(sparse_queries ? unit : unit * factor);
  const std::int64_t i0 = draw_between(0, queries.count - 1), j0 = draw_between(0, keys.count - 1);
  const Diagonal diagonal = Diagonal::between(queries, keys).from(i0, j0);
  const std::int64_t query_count = queries.count - i0, key_count = keys.count - j0;
  bool any = false, all = true;
  for (std::int64_t i = 0; i < query_count; ++i)
    for (std::int64_t j = 0; j < key_count; ++j) {
      const bool sees = keys[j0 + j] <= queries[i0 + i];
      RC_ASSERT((j < diagonal.visible_keys(i, key_count)) == sees);
      RC_ASSERT((i >= diagonal.first_query(j, query_count)) == sees);
      any = any || sees;
      all = all && sees;
    }
  RC_ASSERT(diagonal.hides_all(query_count) == !any);
  RC_ASSERT(diagonal.hides_none(key_count) == all);
}

TEST(Diagonal, NoneHidesNothingWhereverItIsCountedFrom) {
  const Diagonal none = Diagonal().from(1 << 20, 1 << 30);
  EXPECT_EQ(none.visible_keys(0, 1000), 1000);
  EXPECT_EQ(none.first_query(1 << 30, 10), 0);
  EXPECT_TRUE(none.hides_none(1 << 30));
  EXPECT_FALSE(none.hides_all(1));
}

}  // namespace
}  // namespace annulus
