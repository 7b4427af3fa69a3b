// Local parts: of the rows that a rank has, runs in which the pattern is that of a short sequence of its own. There the
// kernels that take all branches at once serve a rank too; what is cut by the ends of a shard is left to meetings.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace annulus::cuda {

// Positions [begin, end) of a piece, where the segments of some branches begin afresh. One that has the whole piece in
// it may be among them: the piece's own rows meet as if it began and ended with them; what it has of others' rows is
// left to meetings.
struct LocalPart {
  std::size_t piece = 0;
  std::int64_t first_row = 0;  // of `begin`, in the rank's memory
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<int> branches;  // of the problem; in the order of the part's own
  Problem problem;            // resolved
  Plan plan;

  bool has(int branch) const;
};

// At most one a piece. Branches whose segments the plan does not have all of are in none.
std::vector<LocalPart> find_local_parts(const Problem& problem, const Plan& plan, const Shard& shard);

}  // namespace annulus::cuda
