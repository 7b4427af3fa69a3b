// A plan for people: one line a task, long plans cut in the middle.
#include <algorithm>
#include <sstream>

#include "plan/plan.h"

namespace annulus {
namespace {

constexpr std::size_t kMaxTasksShown = 32;

std::string text(const Rows& rows) {
  std::ostringstream out;
  if (rows.count == 1)
    out << rows.first;
  else
    out << rows.first << ", " << rows[1] << (rows.count > 2 ? ", ..., " + std::to_string(rows.last()) : "");
  return out.str();
}

std::string text(const Task& task) {
  std::ostringstream out;
  out << "  branch " << task.branch << ": " << task.queries.count << " x " << task.keys.count << " rows {" << text(task.queries)
      << "}, heads {" << text(task.heads) << "}";
  if (task.segments.count > 1) out << ", " << task.segments.count << " segments " << task.segments.step << " apart";
  if (task.classes.count > 1) out << ", " << task.classes.count << " classes";
  if (task.zero_keys > 0) out << ", " << task.zero_keys << " zero keys";
  return out.str();
}

}  // namespace

std::string explain(const Plan& plan, const Problem& problem) {
  std::ostringstream out;
  out << problem.tokens << " tokens, " << problem.heads << " heads (" << problem.kv_heads << " for keys and values) of "
      << problem.head_dim << ", batch " << problem.batch << ", " << name(problem.dtype) << (problem.causal ? ", causal" : "")
      << ", phase " << name(problem.pattern.phase) << ", gradient " << name(problem.pattern.gradient) << "\n";
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    out << "branch " << i << ": segment " << branch.segment << ", dilation " << branch.dilation << ", heads [" << branch.first_head
        << ", " << branch.first_head + branch.head_count << ")\n";
  }
  out << plan.spans.size() << (plan.spans.size() == 1 ? " document, " : " documents, ") << plan.tasks.size()
      << (plan.tasks.size() == 1 ? " task" : " tasks") << ", " << count_pairs(problem) << " pairs\n";
  const std::size_t shown = std::min(plan.tasks.size(), kMaxTasksShown);
  for (std::size_t i = 0; i < shown; ++i) out << text(plan.tasks[i]) << "\n";
  if (shown < plan.tasks.size()) out << "  ... and " << plan.tasks.size() - shown << " more\n";
  return out.str();
}

}  // namespace annulus
