#include "plan/reshard.h"

#include <algorithm>

#include "plan/phase.h"

namespace annulus {
namespace {

// The ranks that have rows in [begin, end). Block i begins at start(i) and is owner(i)'s.
template <class Start, class Owner>
std::vector<int> owners_between(std::int64_t blocks, Start start, Owner owner, std::int64_t begin, std::int64_t end) {
  std::int64_t low = 0, high = blocks;  // the first block that ends behind `begin`
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (start(middle + 1) > begin)
      high = middle;
    else
      low = middle + 1;
  }
  std::vector<int> ranks;
  for (std::int64_t i = low; i < blocks && start(i) < end; ++i)
    if (start(i) < start(i + 1)) ranks.push_back(owner(i));
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<int> ranks_between(const Sharding& sharding, std::int64_t tokens, std::int64_t begin, std::int64_t end) {
  if (sharding.layout == Layout::contiguous)
    return owners_between(
        sharding.ranks, [&](std::int64_t i) { return sharding.boundaries[static_cast<std::size_t>(i)]; },
        [](std::int64_t i) { return static_cast<int>(i); }, begin, end);
  const std::int64_t blocks = 2 * std::int64_t{sharding.ranks};
  return owners_between(
      blocks, [&](std::int64_t i) { return block_begin(tokens, blocks, i); },
      [&](std::int64_t i) { return static_cast<int>(std::min(i, blocks - 1 - i)); }, begin, end);
}

}  // namespace

bool can_reshard(const Problem& problem, const Sharding& sharding) {
  return sharding.ranks > 1 && sharding.layout != Layout::striped && !has_branch_deltas(problem) &&
         !problem.pattern.pad_like_torchscale;
}

// A segment that reaches out of a piece holds its first or its last row.
std::vector<SharedSegment> shared_segments_of(const Problem& problem, const Sharding& sharding,
                                              const std::vector<bool>& branches, int rank) {
  std::vector<SharedSegment> result;
  const auto& bounds = problem.documents;
  for (std::size_t b = 0; b < branches.size(); ++b) {
    if (!branches[b]) continue;
    for (const Rows& piece : pieces_of(sharding, problem.tokens, rank))
      for (const std::int64_t position : {piece.first, piece.last()}) {
        const auto after = std::upper_bound(bounds.begin(), bounds.end(), position);
        const std::int64_t document = *(after - 1), document_end = *after;
        const std::int64_t length = std::min(problem.pattern.branches[b].segment, document_end - document);
        const std::int64_t begin = document + (position - document) / length * length;
        const std::int64_t end = std::min(begin + length, document_end);
        const bool known = std::any_of(result.begin(), result.end(), [&](const SharedSegment& other) {
          return other.branch == static_cast<int>(b) && other.begin == begin;
        });
        if (known) continue;
        std::vector<int> ranks = ranks_between(sharding, problem.tokens, begin, end);
        if (ranks.size() > 1) result.push_back({static_cast<int>(b), begin, end, std::move(ranks)});
      }
  }
  std::sort(result.begin(), result.end(), [](const SharedSegment& a, const SharedSegment& b) {
    return std::pair(a.branch, a.begin) < std::pair(b.branch, b.begin);
  });
  return result;
}

std::vector<Unit> units_of(const Problem& problem, const std::vector<SharedSegment>& segments) {
  std::vector<Unit> units;
  for (const SharedSegment& segment : segments) {
    const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(segment.branch)].dilation;
    std::size_t turn = 0;  // round robin
    for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head)
      for (const Takers& takers : takers_of(problem, segment.branch, kv_head))
        for (std::int64_t c = takers.classes.first;
             c < std::min(takers.classes.first + takers.classes.count, segment.end - segment.begin); ++c)
          units.push_back({segment.branch, segment.ranks[turn++ % segment.ranks.size()], kv_head, takers.heads,
                           progression(segment.begin, segment.end, c, dilation)});
  }
  return units;
}

Plan without(const Plan& plan, const std::vector<SharedSegment>& segments) {
  Plan result;
  for (const Span& span : plan.spans) {
    const auto first_task = static_cast<std::int64_t>(result.tasks.size());
    for (std::int64_t t = span.first_task; t < span.last_task; ++t) {
      Task task = plan.tasks[static_cast<std::size_t>(t)];
      // Segments are in order: cut the run before each of them.
      for (const SharedSegment& segment : segments) {
        if (segment.branch != task.branch || segment.begin < task.begin || segment.begin >= task.end()) continue;
        const std::int64_t before = (segment.begin - task.begin) / task.length;
        Task head = task;
        head.count = before;
        if (before > 0) result.tasks.push_back(head);
        task.begin = segment.end;
        task.count -= before + 1;
        if (task.count == 0) break;
      }
      if (task.count > 0) result.tasks.push_back(task);
    }
    result.spans.push_back({span.begin, span.end, first_task, static_cast<std::int64_t>(result.tasks.size())});
  }
  return result;
}

}  // namespace annulus
