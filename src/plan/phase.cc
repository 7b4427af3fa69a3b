#include "plan/phase.h"

#include <algorithm>

namespace annulus {

Classes classes_of(const Problem& problem, int branch_index, std::int64_t head) {
  const Branch& branch = problem.pattern.branches[static_cast<std::size_t>(branch_index)];
  if (head < branch.first_head || head >= branch.first_head + branch.head_count) return {};
  const std::int64_t block = 1 + (problem.heads - 1) / branch.dilation;  // ceil(H / r)
  switch (problem.pattern.phase) {
    case Phase::by_head:
      return {head % branch.dilation, 1};
    case Phase::by_head_block:
      return {head / block, 1};
    case Phase::every:
      return {0, branch.dilation};
    case Phase::table:
      return {branch.classes[static_cast<std::size_t>(head - branch.first_head)], 1};
  }
  return {};
}

std::vector<Takers> takers_of(const Problem& problem, int branch, std::int64_t kv_head) {
  std::vector<Takers> result;
  const std::int64_t sharers = problem.heads / problem.kv_heads;
  for (std::int64_t head = kv_head * sharers; head < (kv_head + 1) * sharers; ++head) {
    const Classes classes = classes_of(problem, branch, head);
    if (classes.count == 0) continue;
    const auto same =
        std::find_if(result.begin(), result.end(), [&](const Takers& takers) { return takers.classes == classes; });
    if (same != result.end())
      same->heads.push_back(head);
    else
      result.push_back({classes, {head}});
  }
  return result;
}

}  // namespace annulus
