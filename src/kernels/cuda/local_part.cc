#include "kernels/cuda/local_part.h"

#include <algorithm>
#include <numeric>

namespace annulus::cuda {
namespace {

// Whether tasks of the plan have every position of [begin, end).
bool has_all(const Plan& plan, int branch, std::int64_t begin, std::int64_t end) {
  std::int64_t covered = 0;
  for (const Task& task : plan.tasks)
    if (task.branch == branch)
      covered += std::max<std::int64_t>(0, std::min(task.end(), end) - std::max(task.begin, begin));
  return covered == end - begin;
}

// The first position of the piece from which on all segments of these branches begin within it.
std::int64_t fresh_begin(const Problem& problem, const Span& document, const std::vector<int>& branches,
                         std::int64_t begin) {
  const std::int64_t within = begin - document.begin, length = document.end - document.begin;
  std::int64_t unit = 1;
  for (const int b : branches) {
    const std::int64_t segment = std::min(problem.pattern.branches[static_cast<std::size_t>(b)].segment, length);
    const std::int64_t more = segment / std::gcd(unit, segment);
    unit = more > length / unit ? length : unit * more;
  }
  return document.begin + std::min((within + unit - 1) / unit * unit, length);
}

// Whether the piece lies within one segment of the branch, at a place where its classes begin anew: to the piece's own
// rows it is a segment that begins with them.
bool spans(const annulus::Branch& branch, const Span& document, std::int64_t begin, std::int64_t end) {
  const std::int64_t within = (begin - document.begin) % branch.segment;
  return end <= document.end && end - begin <= branch.segment - within && within % branch.dilation == 0;
}

LocalPart make_part(const Problem& problem, const Plan& plan, const std::vector<int>& branches, std::int64_t begin,
                    std::int64_t end) {
  LocalPart part;
  part.begin = begin;
  part.end = end;
  part.branches = branches;
  part.problem = problem;
  part.problem.tokens = end - begin;
  part.problem.documents = {0};
  for (const Span& span : plan.spans)
    if (const std::int64_t to = std::min(span.end, end) - begin; to > part.problem.documents.back())
      part.problem.documents.push_back(to);
  part.problem.pattern.branches.clear();
  for (const int b : branches)
    part.problem.pattern.branches.push_back(problem.pattern.branches[static_cast<std::size_t>(b)]);
  part.problem.pattern.pad_like_torchscale = false;
  part.plan = make_plan(part.problem);
  return part;
}

}  // namespace

bool LocalPart::has(int branch) const { return std::ranges::find(branches, branch) != branches.end(); }

std::vector<LocalPart> find_local_parts(const Problem& problem, const Plan& plan, const Shard& shard) {
  std::vector<LocalPart> parts;
  std::int64_t first_row = 0;
  for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
    const Rows& piece = shard.pieces[i];
    const std::int64_t row = first_row;
    first_row += piece.count;
    if (piece.empty() || piece.stride != 1) continue;
    const std::int64_t begin = piece.first, end = piece.first + piece.count;
    const auto document = std::ranges::find_if(plan.spans, [&](const Span& span) { return begin < span.end; });
    if (document == plan.spans.end()) continue;
    std::vector<int> branches;
    for (int b = 0; b < static_cast<int>(problem.pattern.branches.size()); ++b)
      if (has_all(plan, b, begin, end)) branches.push_back(b);
    std::vector<int> ending;  // within the piece
    for (const int b : branches)
      if (!spans(problem.pattern.branches[static_cast<std::size_t>(b)], *document, begin, end)) ending.push_back(b);
    // The longest segments are the first to be left out, if they would leave little.
    while (!branches.empty()) {
      const bool all_begin = fresh_begin(problem, *document, ending, begin) == begin;
      const std::int64_t fresh = all_begin ? begin : fresh_begin(problem, *document, branches, begin);
      if (fresh - begin <= (end - begin) / 2 && fresh < end) {
        LocalPart part = make_part(problem, plan, branches, fresh, end);
        part.piece = i;
        part.first_row = row + fresh - begin;
        parts.push_back(std::move(part));
        break;
      }
      const int longest = *std::ranges::max_element(
          branches, {}, [&](int b) { return problem.pattern.branches[static_cast<std::size_t>(b)].segment; });
      std::erase(branches, longest);
      std::erase(ending, longest);
    }
  }
  return parts;
}

}  // namespace annulus::cuda
