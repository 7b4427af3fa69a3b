#include "annulus/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "annulus/errors.h"
#include "plan/phase.h"
#include "plan/plan.h"

namespace annulus {
namespace {

using std::to_string;

[[noreturn]] void refuse(const std::string& rule, const std::string& got, const std::string& remedy) {
  throw InvalidArgument(rule + "; got " + got + ": " + remedy);
}

void check_at_least(const char* what, std::int64_t value, std::int64_t least) {
  if (value < least)
    refuse(std::string(what) + " must be at least " + to_string(least), to_string(value), "give a larger one");
}

// Kernels take it as a float.
void check_finite(const char* what, double value, const char* remedy) {
  if (!std::isfinite(static_cast<float>(value)))
    refuse(std::string(what) + " must be finite, in fp32", to_string(value), remedy);
}

void check_sizes(const Problem& problem) {
  check_at_least("batch", problem.batch, 0);
  check_at_least("tokens", problem.tokens, 0);
  check_at_least("heads", problem.heads, 1);
  check_at_least("kv_heads", problem.kv_heads, 1);
  check_at_least("head_dim", problem.head_dim, 1);
  if (problem.heads % problem.kv_heads != 0)
    refuse("heads must be a multiple of kv_heads",
           to_string(problem.heads) + " heads and " + to_string(problem.kv_heads) + " kv_heads",
           "choose kv_heads that divides heads");
  // Offsets are counted in bytes in 64 bits, with room for sums of a few of them.
  const double bytes = 4.0 * static_cast<double>(problem.batch) * static_cast<double>(problem.tokens) *
                       static_cast<double>(problem.heads) * static_cast<double>(problem.head_dim);
  if (bytes > 0x1p60)
    refuse("batch * tokens * heads * head_dim must be at most 2^58",
           to_string(problem.batch) + " * " + to_string(problem.tokens) + " * " + to_string(problem.heads) + " * " +
               to_string(problem.head_dim),
           "give smaller sizes");
  if (problem.tokens > (std::int64_t{1} << 60))
    refuse("tokens must be at most 2^60", to_string(problem.tokens), "give fewer");
  (void)name(problem.dtype);
  check_finite("scale", *problem.scale, "leave it out for 1 / sqrt(head_dim)");
}

void check_branch(const Branch& branch, std::size_t index, const Problem& problem) {
  const std::string where = " of branch " + to_string(index);
  if (branch.segment < 1)
    refuse("the segment length" + where + " must be at least 1", to_string(branch.segment), "give a larger one");
  if (branch.dilation < 1)
    refuse("the dilation" + where + " must be at least 1", to_string(branch.dilation), "give a larger one");
  if (branch.first_head < 0 || branch.head_count < 0 || branch.first_head > problem.heads ||
      branch.head_count > problem.heads - branch.first_head)
    refuse("the heads" + where + " must lie in [0, " + to_string(problem.heads) + ")",
           "first_head " + to_string(branch.first_head) + ", head_count " + to_string(branch.head_count),
           "shorten the range");
  if (problem.pattern.phase != Phase::table) {
    if (!branch.classes.empty())
      refuse("classes are for the phase rule table alone",
             "classes" + where + " with " + std::string(name(problem.pattern.phase)),
             "leave them out or use the rule table");
    return;
  }
  if (branch.classes.size() != static_cast<std::size_t>(branch.head_count))
    refuse("the table" + where + " needs one class a head",
           to_string(branch.classes.size()) + " classes for " + to_string(branch.head_count) + " heads",
           "give as many classes as heads");
  for (const std::int64_t phase_class : branch.classes)
    if (phase_class < 0 || phase_class >= branch.dilation)
      refuse("a class" + where + " must lie in [0, " + to_string(branch.dilation) + ")", to_string(phase_class),
             "use a class below the dilation");
}

void check_documents(const Problem& problem) {
  const auto& bounds = problem.documents;
  const char* remedy = "give cu_seqlens as 0, end of document 0, ..., tokens";
  if (bounds.front() != 0) refuse("cu_seqlens must begin with 0", to_string(bounds.front()), remedy);
  for (std::size_t i = 1; i < bounds.size(); ++i)
    if (bounds[i] < bounds[i - 1])
      refuse("cu_seqlens must not fall",
             to_string(bounds[i - 1]) + " before " + to_string(bounds[i]) + " at index " + to_string(i), remedy);
  if (bounds.back() != problem.tokens)
    refuse("cu_seqlens must end with tokens = " + to_string(problem.tokens), to_string(bounds.back()), remedy);
}

}  // namespace

Problem resolve(Problem problem) {
  if (problem.kv_heads == 0) problem.kv_heads = problem.heads;
  if (!problem.scale) problem.scale = 1.0 / std::sqrt(static_cast<double>(std::max<std::int64_t>(problem.head_dim, 1)));
  check_sizes(problem);
  if (problem.documents.empty()) problem.documents = {0, problem.tokens};
  check_documents(problem);
  Pattern& pattern = problem.pattern;
  if (pattern.branches.empty())
    refuse("a pattern has at least one branch", "none", "give segment lengths and dilations");
  (void)name(pattern.phase);
  (void)name(pattern.gradient);
  check_finite("output_scale", pattern.output_scale, "use 1");
  for (std::size_t i = 0; i < pattern.branches.size(); ++i) {
    Branch& branch = pattern.branches[i];
    if (branch.head_count == kAllHeads && branch.first_head >= 0 && branch.first_head < problem.heads)
      branch.head_count = problem.heads - branch.first_head;
    check_branch(branch, i, problem);
  }
  return problem;
}

double count_pairs(const Problem& problem) {
  // Groups of n rows have n^2 pairs, or n (n + 1) / 2 when causal.
  const auto pairs_of = [&](std::int64_t rows, std::int64_t groups) {
    const auto n = static_cast<double>(rows);
    return static_cast<double>(std::max<std::int64_t>(groups, 0)) * (problem.causal ? n * (n + 1) / 2 : n * n);
  };
  double pairs = 0;
  for (const Task& task : make_plan(problem).tasks) {
    const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
    const std::int64_t longer = task.length % dilation;  // the first classes of a segment have one row more
    for (std::int64_t head = 0; head < problem.heads; ++head) {
      const Classes classes = classes_of(problem, task.branch, head);
      const std::int64_t last = classes.first + classes.count;
      const std::int64_t rows = task.length / dilation;
      pairs += static_cast<double>(task.count) * (pairs_of(rows + 1, std::min(last, longer) - classes.first) +
                                                  pairs_of(rows, last - std::max(classes.first, longer)));
    }
  }
  return pairs * static_cast<double>(problem.batch);
}

}  // namespace annulus
