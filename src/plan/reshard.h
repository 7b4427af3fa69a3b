// reshard: segments that several ranks share are dealt out by class. Each class of such a segment becomes whole on one
// of the ranks: queries, keys and values go there, results come back. No partial result of a group travels, and the
// causal load is even.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "plan/plan.h"
#include "plan/shard.h"

namespace annulus {

// One group, for all query heads that share its keys.
struct Unit {
  int branch = 0;
  int computer = 0;  // the rank that it becomes whole on
  std::int64_t kv_head = 0;
  std::vector<std::int64_t> heads;
  Rows rows;
};

struct SharedSegment {
  int branch = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<int> ranks;  // that have rows in it, at least two
};

// Whether segments of this problem can be dealt out at all: not striped ones, not where branches have a Delta each, not
// with the zero keys of torchscale.
bool can_reshard(const Problem& problem, const Sharding& sharding);

// Those of the chosen branches that this rank has rows in, in one order on all ranks. Takes resolved arguments.
std::vector<SharedSegment> shared_segments_of(const Problem& problem, const Sharding& sharding,
                                              const std::vector<bool>& branches, int rank);

std::vector<Unit> units_of(const Problem& problem, const std::vector<SharedSegment>& segments);

// The plan without these segments.
Plan without(const Plan& plan, const std::vector<SharedSegment>& segments);

}  // namespace annulus
