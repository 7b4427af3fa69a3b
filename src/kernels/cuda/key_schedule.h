// Tiles of keys, for dK and dV: the schedule of tiles of queries with the parts exchanged.
//
// A tile belongs to a key/value head and meets all query heads that share it, so that dK and dV are summed in
// registers. When causal, the first keys have the most queries: they come first, in chunks of heads whose sums of dQ
// fit the cache.
#pragma once

#include "kernels/cuda/schedule.h"

namespace annulus::cuda {

// `rules.shape` has the keys of a tile as query_rows and the queries of a block as key_rows.
Schedule make_key_schedule(const Problem& problem, const Plan& plan, const ScheduleRules& rules);

}  // namespace annulus::cuda
