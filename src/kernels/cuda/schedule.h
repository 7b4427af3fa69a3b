// From a problem to the tiles of one launch: which branches share a sweep, and in which order tiles are taken.
//
// Where one sweep takes all branches, no partial result ever leaves the registers. Segments need not nest for that:
// cells are cut where any of them ends. Where one sweep would waste work (causal tiles of a large stride reach over
// half-masked segments, tiles stay half empty) or dilations do not divide each other, a problem has several sweeps, the
// sparse ones first. State (m, l, acc in fp32) then passes through memory, a slab of rows at a time: slab s is in sweep
// i while slab s + 1 is in sweep i - 1, all in one launch, so that nobody waits for the end of a sweep and the memory
// stays bounded.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "kernels/cuda/tiling.h"
#include "plan/plan.h"

namespace annulus::cuda {

struct Schedule {
  Tiling tiling;  // its lists are null here: see classes and anchors
  std::vector<std::int32_t> classes;
  std::vector<std::int32_t> anchors;
  std::vector<int> branch_order;  // branch i of the tiling is branch branch_order[i] of the problem
  std::vector<Stretch> stretches;
  int sweep_count = 0;
  int set_count = 0;
  std::int64_t tile_count = 0;
  std::int64_t state_rows = 0;  // of all slabs that are in flight together
};

struct ScheduleRules {
  TileShape shape;
  int arrivals = 1;                             // signals of one tile
  bool folds = false;                           // the kernel can count a key several times
  std::int64_t state_bytes = 256ll << 20;       // aimed at; one head of one document is always there
  std::vector<std::vector<int>> forced_sweeps;  // for tests: branches of the problem, sweep by sweep
  // State of all rows stays in memory, [batch, heads, kept_rows], positions from kept_first on: every sweep goes on
  // from what is there and leaves it there. 0: results are written instead.
  std::int64_t kept_rows = 0;
  std::int64_t kept_first = 0;
  bool in_order = false;  // tiles of keys, one branch: each waits for the one before it in its group, block by block
};

// Whether the arithmetic of tiles holds the problem: few enough branches, positions in 31 bits.
bool can_schedule(const Problem& problem);

// Takes a resolved problem and its plan.
Schedule make_schedule(const Problem& problem, const Plan& plan, const ScheduleRules& rules);

}  // namespace annulus::cuda
