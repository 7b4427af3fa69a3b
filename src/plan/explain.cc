// A plan for people: one line a task, long plans cut in the middle.
#include <algorithm>
#include <sstream>

#include "plan/plan.h"

namespace annulus {
namespace {

constexpr std::size_t kMaxTasksShown = 32;

std::string text(const Task& task) {
  std::ostringstream out;
  out << "  branch " << task.branch << ": [" << task.begin << ", " << task.end() << ")";
  if (task.count > 1)
    out << " in " << task.count << " segments of " << task.length;
  else
    out << " in one segment";
  if (task.padded_rows > 0) out << ", filled up to " << task.padded_rows << " rows a class by zero keys";
  return out.str();
}

}  // namespace

std::string explain(const Plan& plan, const Problem& problem) {
  std::ostringstream out;
  out << problem.tokens << " tokens, " << problem.heads << " heads (" << problem.kv_heads << " for keys and values) of "
      << problem.head_dim << ", batch " << problem.batch << ", " << name(problem.dtype)
      << (problem.causal ? ", causal" : "") << ", phase " << name(problem.pattern.phase) << ", gradient "
      << name(problem.pattern.gradient) << "\n";
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    out << "branch " << i << ": segment " << branch.segment << ", dilation " << branch.dilation << ", heads ["
        << branch.first_head << ", " << branch.first_head + branch.head_count << ")\n";
  }
  out << plan.spans.size() << (plan.spans.size() == 1 ? " document, " : " documents, ") << plan.tasks.size()
      << (plan.tasks.size() == 1 ? " task" : " tasks") << ", " << count_pairs(problem) << " pairs\n";
  const std::size_t shown = std::min(plan.tasks.size(), kMaxTasksShown);
  for (std::size_t i = 0; i < shown; ++i) out << text(plan.tasks[i]) << "\n";
  if (shown < plan.tasks.size()) out << "  ... and " << plan.tasks.size() - shown << " more\n";
  return out.str();
}

}  // namespace annulus
