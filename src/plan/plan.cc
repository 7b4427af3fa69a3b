#include "plan/plan.h"

#include <algorithm>

namespace annulus {
namespace {

// Section 5: rows that torchscale's padding fills a class up to. Only short last segments have such rows.
std::int64_t padded_rows(const Problem& problem, const Branch& branch, std::int64_t length,
                         std::int64_t document_length) {
  if (!problem.pattern.pad_like_torchscale || problem.causal || length >= branch.segment) return 0;
  return 1 + (std::min(branch.segment, document_length) - 1) / branch.dilation;
}

// Eq. 1 in the document [begin, end): a run of whole segments, then the shorter last one.
void add_document(const Problem& problem, int index, std::int64_t begin, std::int64_t end, std::vector<Task>& tasks) {
  const Branch& branch = problem.pattern.branches[static_cast<std::size_t>(index)];
  const std::int64_t length = std::min(branch.segment, end - begin);
  const std::int64_t whole = (end - begin) / length;
  tasks.push_back({index, begin, length, whole, padded_rows(problem, branch, length, end - begin)});
  const std::int64_t rest = end - begin - whole * length;
  if (rest > 0) tasks.push_back({index, end - rest, rest, 1, padded_rows(problem, branch, rest, end - begin)});
}

}  // namespace

Plan make_plan(const Problem& problem) {
  Plan plan;
  for (std::size_t d = 0; d + 1 < problem.documents.size(); ++d) {
    const std::int64_t begin = problem.documents[d];
    const std::int64_t end = problem.documents[d + 1];
    if (begin == end) continue;
    const auto first_task = static_cast<std::int64_t>(plan.tasks.size());
    for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i)
      add_document(problem, static_cast<int>(i), begin, end, plan.tasks);
    plan.spans.push_back({begin, end, first_task, static_cast<std::int64_t>(plan.tasks.size())});
  }
  return plan;
}

bool has_branch_deltas(const Problem& problem) {
  const std::vector<Branch>& branches = problem.pattern.branches;
  const auto share_a_head = [](const Branch& a, const Branch& b) {
    return std::max(a.first_head, b.first_head) < std::min(a.first_head + a.head_count, b.first_head + b.head_count);
  };
  if (problem.pattern.gradient != Gradient::detached) return false;
  for (auto a = branches.begin(); a != branches.end(); ++a)
    if (std::any_of(a + 1, branches.end(), [&](const Branch& b) { return share_a_head(*a, b); })) return true;
  return false;
}

}  // namespace annulus
