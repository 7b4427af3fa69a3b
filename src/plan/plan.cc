#include "plan/plan.h"

#include <algorithm>

namespace annulus {
namespace {

// Heads that share the classes [first_class, first_class + class_count) of one branch.
struct Selection {
  Rows heads;
  std::int64_t first_class = 0;
  std::int64_t class_count = 1;
};

std::vector<Selection> select_by_table(const Branch& branch) {
  std::vector<Selection> selections;
  for (std::int64_t i = 0; i < branch.head_count; ++i) {
    const std::int64_t phase_class = branch.classes[static_cast<std::size_t>(i)];
    if (!selections.empty() && selections.back().first_class == phase_class)
      ++selections.back().heads.count;
    else
      selections.push_back({{branch.first_head + i, 1, 1}, phase_class, 1});
  }
  return selections;
}

// The phase rules of section 2. Every rule gives heads that are an arithmetic progression per class, so the result has at most
// min(r, H) entries.
std::vector<Selection> select(const Branch& branch, Phase phase, std::int64_t heads) {
  const std::int64_t begin = branch.first_head;
  const std::int64_t end = begin + branch.head_count;
  if (branch.head_count == 0) return {};
  if (phase == Phase::table) return select_by_table(branch);
  if (phase == Phase::every) return {{{begin, 1, branch.head_count}, 0, branch.dilation}};
  const std::int64_t block = 1 + (heads - 1) / branch.dilation;  // ceil(H / r)
  std::vector<Selection> selections;
  for (std::int64_t c = 0; c < std::min(branch.dilation, heads); ++c) {
    const Rows takers = phase == Phase::by_head ? progression(0, heads, c, branch.dilation)
                                                : Rows{c * block, 1, std::max<std::int64_t>(0, std::min(block, heads - c * block))};
    const Rows chosen = cut(takers, begin, end);
    if (!chosen.empty()) selections.push_back({chosen, c, 1});
  }
  return selections;
}

class BranchPlanner {
 public:
  BranchPlanner(const Problem& problem, int index, std::vector<Task>& tasks)
      : problem_(problem),
        branch_(problem.pattern.branches[static_cast<std::size_t>(index)]),
        index_(index),
        selections_(select(branch_, problem.pattern.phase, problem.heads)),
        tasks_(tasks) {}

  // Eq. 1: whole segments first, then the shorter last one, of the document [begin, end).
  void add_document(std::int64_t begin, std::int64_t end) {
    const std::int64_t length = std::min(branch_.segment, end - begin);
    const std::int64_t whole = (end - begin) / length;
    add_segments(begin, length, whole, end - begin);
    const std::int64_t rest_begin = begin + whole * length;
    if (rest_begin < end) add_segments(rest_begin, end - rest_begin, 1, end - begin);
  }

 private:
  void add_segments(std::int64_t begin, std::int64_t length, std::int64_t count, std::int64_t document_length) {
    for (const Selection& selection : selections_) {
      // Eq. 2: the first `length % r` classes of a segment have one row more than the others. Classes behind the end have none.
      const std::int64_t longer = length % branch_.dilation;
      const std::int64_t last = selection.first_class + selection.class_count;
      for (const auto& [from, to] : {std::pair(selection.first_class, std::min(last, longer)),
                                     std::pair(std::max(selection.first_class, longer), std::min(last, length))}) {
        if (from >= to) continue;
        const Rows rows = progression(begin, begin + length, from, branch_.dilation);
        Task task;
        task.branch = index_;
        task.queries = task.keys = rows;
        task.heads = selection.heads;
        task.segments = {count, length};
        task.classes = {to - from, 1};
        task.zero_keys = zero_keys(length, rows.count, document_length);
        tasks_.push_back(task);
      }
    }
  }

  // Section 5: what torchscale's padding leaves in the softmax of a short last segment.
  std::int64_t zero_keys(std::int64_t length, std::int64_t count, std::int64_t document_length) const {
    if (!problem_.pattern.pad_like_torchscale || problem_.causal || length >= branch_.segment) return 0;
    return 1 + (std::min(branch_.segment, document_length) - 1) / branch_.dilation - count;
  }

  const Problem& problem_;
  const Branch& branch_;
  int index_;
  std::vector<Selection> selections_;
  std::vector<Task>& tasks_;
};

}  // namespace

Plan make_plan(const Problem& problem) {
  Plan plan;
  std::vector<BranchPlanner> planners;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i)
    planners.emplace_back(problem, static_cast<int>(i), plan.tasks);
  for (std::size_t d = 0; d + 1 < problem.documents.size(); ++d) {
    const std::int64_t begin = problem.documents[d];
    const std::int64_t end = problem.documents[d + 1];
    if (begin == end) continue;
    const auto first_task = static_cast<std::int64_t>(plan.tasks.size());
    for (BranchPlanner& planner : planners) planner.add_document(begin, end);
    plan.spans.push_back({begin, end, first_task, static_cast<std::int64_t>(plan.tasks.size())});
  }
  return plan;
}

}  // namespace annulus
