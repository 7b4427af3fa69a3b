// Tiles of keys, for dK and dV: the schedule of tiles of queries with the parts exchanged.
//
// A tile belongs to a key/value head and meets all query heads that share it, so that dK and dV are summed in
// registers. When causal, the first keys have the most queries: they come first, in chunks of heads whose sums of dQ
// fit the cache.
#pragma once

#include "kernels/cuda/gradient_launch.h"
#include "kernels/cuda/schedule.h"

namespace annulus::cuda {

// `rules.shape` has the keys of a tile as query_rows and the queries of a block as key_rows.
Schedule make_key_schedule(const Problem& problem, const Plan& plan, const ScheduleRules& rules);

// The window of a problem's regions (gradient_launch.h), long enough for whole runs at SumLayout::stride.
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

}  // namespace annulus::cuda
