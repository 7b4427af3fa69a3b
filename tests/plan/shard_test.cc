// Layouts: every position has one owner, whatever does not divide.
#include "plan/shard.h"

#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/draw_case.h"
#include "support/refusal.h"

namespace annulus {
namespace {

using support::draw_between;

RC_GTEST_PROP(ShardProperty, EveryPositionHasOneOwner, ()) {
  const std::int64_t tokens = draw_between(0, 60);
  Sharding sharding;
  sharding.ranks = static_cast<int>(draw_between(1, 9));
  sharding.layout = *rc::gen::element(Layout::contiguous, Layout::zigzag, Layout::striped);
  if (sharding.layout == Layout::contiguous && support::draw_bool()) {
    sharding.boundaries = {0, tokens};
    for (int i = 1; i < sharding.ranks; ++i) sharding.boundaries.push_back(draw_between(0, tokens));
    std::sort(sharding.boundaries.begin(), sharding.boundaries.end());
  }
  sharding = resolve(sharding, tokens);
  std::vector<int> owners(static_cast<std::size_t>(tokens));
  for (int rank = 0; rank < sharding.ranks; ++rank)
    for (const Rows& piece : pieces_of(sharding, tokens, rank)) {
      RC_ASSERT(piece.count > 0);
      for (std::int64_t i = 0; i < piece.count; ++i) ++owners.at(static_cast<std::size_t>(piece[i]));
    }
  for (const int count : owners) RC_ASSERT(count == 1);
}

TEST(Shard, EvenPartsDifferByAtMostOneRow) {
  for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped})
    for (const std::int64_t tokens : {0, 1, 7, 100, 1009}) {
      const Sharding sharding = resolve({.ranks = 8, .layout = layout, .boundaries = {}}, tokens);
      std::vector<std::int64_t> counts;
      for (int rank = 0; rank < 8; ++rank) counts.push_back(count_rows(pieces_of(sharding, tokens, rank)));
      const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
      EXPECT_LE(*most - *least, layout == Layout::zigzag ? 2 : 1) << name(layout) << " " << tokens;
      EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), tokens);
    }
}

TEST(Shard, ZigzagPairsTheFirstBlockWithTheLast) {
  const Sharding sharding = resolve({.ranks = 2, .layout = Layout::zigzag, .boundaries = {}}, 8);
  EXPECT_EQ(pieces_of(sharding, 8, 0), (std::vector<Rows>{{0, 1, 2}, {6, 1, 2}}));
  EXPECT_EQ(pieces_of(sharding, 8, 1), (std::vector<Rows>{{2, 1, 2}, {4, 1, 2}}));
}

TEST(Shard, ManyRanksAreSampled) {
  EXPECT_EQ(sample_ranks(resolve(Sharding{.ranks = 5}, 100), 100), (std::vector<int>{0, 1, 2, 3, 4}));
  Sharding many{.ranks = 100};
  for (int i = 0; i <= 100; ++i) many.boundaries.push_back(i <= 77 ? 0 : i == 78 ? 90 : 100);
  EXPECT_EQ(sample_ranks(resolve(many, 100), 100), (std::vector<int>{0, 1, 49, 50, 77, 98, 99})) << "77 is the largest";
}

TEST(Shard, RefusesWhatIsNoSharding) {
  EXPECT_THROW(resolve({.ranks = 0, .layout = Layout::striped, .boundaries = {}}, 8), InvalidArgument);
  EXPECT_THROW(resolve({.ranks = 2, .layout = Layout::zigzag, .boundaries = {0, 4, 8}}, 8), InvalidArgument);
  EXPECT_THROW(resolve({.ranks = 2, .layout = Layout::contiguous, .boundaries = {0, 8}}, 8), InvalidArgument);
  EXPECT_THROW(resolve({.ranks = 2, .layout = Layout::contiguous, .boundaries = {0, 5, 4}}, 4), InvalidArgument);
  EXPECT_THROW(resolve({.ranks = 2, .layout = Layout::contiguous, .boundaries = {0, 5, 9}}, 8), InvalidArgument);
  EXPECT_THROW(resolve({.ranks = 2, .layout = Layout::contiguous, .boundaries = {1, 5, 8}}, 8), InvalidArgument);
  EXPECT_THROW(parse_layout("diagonal"), InvalidArgument);
}

}  // namespace
}  // namespace annulus
