#include "exec/branch_deltas.h"

#include <algorithm>

namespace annulus {
namespace {

Problem problem_of(Problem problem, std::size_t branch) {
  problem.pattern.branches = {problem.pattern.branches[branch]};
  problem.pattern.gradient = Gradient::exact;
  return problem;
}

}  // namespace

BranchAlone::BranchAlone(const Problem& whole, std::size_t branch)
    : problem(problem_of(whole, branch)), plan(make_plan(problem)) {}

BranchDeltas::BranchDeltas(const Problem& problem, const Options& options, const std::vector<Rows>& queries) {
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    branches_.push_back(std::make_unique<BranchAlone>(problem, i));
    const BranchAlone& alone = *branches_.back();
    kernels_.push_back(make_kernels(alone.problem, alone.plan, options, {queries, true, true}));
  }
}

std::int64_t BranchDeltas::workspace_bytes() const {
  std::int64_t most = 0;
  for (const auto& kernels : kernels_) most = std::max(most, total_bytes(kernels->workspace(Pass::forward)));
  return most;
}

void BranchDeltas::make(const Kernels& target, const BackwardArgs& args, const KeySource& keys, const TensorView& out,
                        std::span<std::byte> workspace) const {
  for (std::size_t i = 0; i < kernels_.size(); ++i) {
    kernels_[i]->stream = target.stream;
    kernels_[i]->poll = target.poll;
    kernels_[i]->forward(
        {.q = args.q, .k = args.k, .v = args.v, .out = out, .lse = {}, .workspace = workspace, .stream = args.stream},
        {.sources = {&keys, 1}});
    target.delta(args, static_cast<int>(i), out);
  }
}

}  // namespace annulus
