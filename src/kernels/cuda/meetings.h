// Lists of meetings (meeting.h), made on the host: for every branch, the groups that some queries and some keys have in
// common.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "kernels/cuda/meeting.h"
#include "kernels/row_source.h"
#include "plan/plan.h"

namespace annulus::cuda {

struct MeetingList {
  int branch = 0;
  bool aligned = false;  // to 16 bytes: every row, and its length
  std::vector<MeetingTile> tiles;
  std::vector<MeetingPart> parts;
};

struct MeetingRules {
  MeetingRules(const Problem& problem_, const Plan& plan_) : problem(problem_), plan(plan_) {}

  const Problem& problem;
  const Plan& plan;
  bool of_keys = false;  // tiles of keys, for dk and dv
  int tile_rows = 64;
  int block_rows = 64;
  std::int64_t state_rows = 0;                // of a head, in the rank's memory
  std::span<const std::int64_t> state_first;  // of each source of queries
  // Groups that are computed elsewhere: of this branch, source of queries, source of keys, with these positions.
  std::function<bool(int branch, std::size_t queries, std::size_t keys, const Rows& group)> skips;
};

// Runs count from the tensors of the first source on. The lists run one after the other: rows of results are disjoint
// only within a list.
std::vector<MeetingList> list_meetings(const MeetingRules& rules, std::span<const QuerySource> queries,
                                       std::span<const KeySource> keys);

}  // namespace annulus::cuda
