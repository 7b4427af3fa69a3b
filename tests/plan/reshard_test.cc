// Segments that are dealt out, on all ranks at once: what is left and what is dealt out are together every pair, once.
#include "plan/reshard.h"

#include <map>
#include <tuple>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "plan/phase.h"
#include "support/describe.h"
#include "support/draw_case.h"
#include "support/draw_sharding.h"

namespace annulus {
namespace {

using Pair = std::tuple<std::int64_t, std::int64_t, int, std::int64_t>;  // query, key, branch, head
using Pairs = std::map<Pair, int>;

void add_pairs(const Problem& problem, const Rows& queries, const Rows& keys, int branch, std::int64_t head,
               Pairs& pairs) {
  for (std::int64_t q = 0; q < queries.count; ++q)
    for (std::int64_t k = 0; k < keys.count; ++k)
      if (!problem.causal || keys[k] <= queries[q]) ++pairs[{queries[q], keys[k], branch, head}];
}

// All pairs of the plan between the rows of `pieces`.
void add_pairs(const Problem& problem, const Plan& plan, const std::vector<Rows>& pieces, Pairs& pairs) {
  for (const Task& task : plan.tasks) {
    const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
    for (std::int64_t head = 0; head < problem.heads; ++head) {
      const Classes classes = classes_of(problem, task.branch, head);
      for (std::int64_t s = 0; s < task.count; ++s)
        for (std::int64_t c = classes.first; c < std::min(classes.first + classes.count, task.length); ++c) {
          const Rows group = task.rows(s, c, dilation);
          for (const Rows& queries : pieces)
            for (const Rows& keys : pieces)
              add_pairs(problem, intersect(group, queries), intersect(group, keys), task.branch, head, pairs);
        }
    }
  }
}

RC_GTEST_PROP(ReshardProperty, EveryPairIsComputedOnce, ()) {
  Problem problem = support::draw_problem(24, 1);
  problem.pattern.gradient = Gradient::exact;
  problem.pattern.pad_like_torchscale = false;
  const Sharding sharding = support::draw_sharding(problem.tokens, 6);
  if (!can_reshard(problem, sharding)) return;
  const Plan plan = make_plan(problem);
  const std::vector<bool> all(problem.pattern.branches.size(), true);
  Pairs want, got;
  add_pairs(problem, plan, {Rows{0, 1, problem.tokens}}, want);
  for (int rank = 0; rank < sharding.ranks; ++rank) {
    const std::vector<SharedSegment> segments = shared_segments_of(problem, sharding, all, rank);
    add_pairs(problem, without(plan, segments), pieces_of(sharding, problem.tokens, rank), got);
    for (const Unit& unit : units_of(problem, segments))
      if (unit.computer == rank)
        for (const std::int64_t head : unit.heads) add_pairs(problem, unit.rows, unit.rows, unit.branch, head, got);
    // Whoever shares a segment knows it as this rank does, and so who computes what of it.
    for (const SharedSegment& segment : segments)
      for (const int other : segment.ranks) {
        const std::vector<SharedSegment> theirs = shared_segments_of(problem, sharding, all, other);
        RC_ASSERT(std::any_of(theirs.begin(), theirs.end(), [&](const SharedSegment& s) {
          return s.branch == segment.branch && s.begin == segment.begin && s.end == segment.end &&
                 s.ranks == segment.ranks;
        }));
      }
  }
  if (got != want)
    RC_FAIL(std::to_string(sharding.ranks) + " ranks, " + std::string(name(sharding.layout)) + ": " +
            support::describe(problem));
}

}  // namespace
}  // namespace annulus
