// Delta of eq. 8 for kernels that do not make it themselves. A branch's own output was never stored: each branch is
// computed once more, alone, over keys that are all at hand.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace annulus {

// One branch of a problem as a problem of its own.
struct BranchAlone {
  BranchAlone(const Problem& whole, std::size_t branch);

  Problem problem;
  Plan plan;
};

class BranchDeltas {
 public:
  BranchDeltas(const Problem& problem, const Options& options, const std::vector<Rows>& queries);

  std::int64_t workspace_bytes() const;
  // For `target`, a kernel of the whole problem and the same queries, in the workspace of `args`. `out` has room for
  // one branch's output: fp32, [batch, rows, heads, head_dim].
  void make(const Kernels& target, const BackwardArgs& args, const KeySource& keys, const TensorView& out,
            std::span<std::byte> workspace) const;

 private:
  std::vector<std::unique_ptr<BranchAlone>> branches_;
  std::vector<std::unique_ptr<Kernels>> kernels_;  // of each
};

}  // namespace annulus
