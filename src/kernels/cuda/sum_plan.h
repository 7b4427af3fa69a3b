// Where the Hopper backward kernel adds up dq: in what order the rows of a head lie, and which regions share memory for
// them (regions.h).
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "kernels/cuda/regions.h"
#include "kernels/cuda/schedule.h"
#include "plan/plan.h"

namespace annulus::cuda {

// Of one head of the sequence; the order of a region's rows is the same. It has no place for a sequence of a few rows
// in each of very many residues, which are filled up to 8: more than 2^31 - 1 rows in all.
bool has_sum_layout(const Problem& problem);
SumLayout sum_layout(const Problem& problem);

// The window of a problem's regions, long enough for whole runs at SumLayout::stride.
std::int64_t region_length(const Problem& problem, const Plan& plan, int stride);

// The regions of a schedule of keys, and how many slots they need for their sums of dq. `tiles_ahead`: so many tiles
// may begin before a region that has ended is rounded, and nobody waits; 0: every region has a slot of its own.
struct RegionTable {
  std::vector<Region> regions;
  std::vector<int> order;  // Regions::order
  int slots = 0;
  bool shares() const { return slots < static_cast<int>(regions.size()); }
};
RegionTable make_region_table(const Schedule& schedule, const Regions& regions, std::int64_t tokens,
                              std::int64_t tiles_ahead);

struct SumRules {
  bool deterministic = false;
  int blocks = 1;                 // that the device holds
  std::int64_t tiles_ahead = -1;  // negative: where sharing is fast
};

struct SumPlan {
  Regions regions;  // without addresses
  RegionTable table;
  SumLayout of_head;      // in a slot
  std::int64_t rows = 0;  // in memory
};
SumPlan plan_sums(const Problem& problem, const Plan& plan, const Schedule& schedule, const SumRules& rules);

}  // namespace annulus::cuda
