#include "reference/keys.h"

#include <algorithm>
#include <cstddef>

namespace annulus::reference {
namespace {

// For a >= 0; a huge b must not overflow.
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace

KeySets::KeySets(const Problem& problem) : problem_(problem), branches_(problem.pattern.branches.size()) {
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    for (std::size_t d = 0; d + 1 < problem.documents.size(); ++d) {
      locate(branch, problem.documents[d], problem.documents[d + 1], branches_[i]);
    }
    if (!problem.pattern.pad_like_torchscale || problem.causal) continue;
    for (std::size_t d = 0; d + 1 < problem.documents.size(); ++d) {
      count_zero_keys(branch, problem.documents[d], problem.documents[d + 1], branches_[i]);
    }
  }
}

// Equations 1 and 2.
void KeySets::locate(const Branch& branch, std::int64_t document_begin, std::int64_t document_end,
                     BranchPositions& out) const {
  const std::int64_t w = branch.segment;
  for (std::int64_t t = document_begin; t < document_end; ++t) {
    const std::int64_t a = document_begin + (t - document_begin) / w * w;
    const std::int64_t e = w < document_end - a ? a + w : document_end;  // min(a + w, d1), where a + w may not fit
    out.segment_begin.push_back(a);
    out.segment_end.push_back(e);
    out.position_class.push_back((t - a) % branch.dilation);
  }
}

// Section 5: torchscale pads a short last segment up to the length of the others, and the padding stays in the softmax.
void KeySets::count_zero_keys(const Branch& branch, std::int64_t document_begin, std::int64_t document_end,
                              BranchPositions& out) const {
  const std::int64_t padded = ceil_div(std::min(branch.segment, document_end - document_begin), branch.dilation);
  for (std::int64_t t = document_begin; t < document_end; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const auto a = static_cast<std::size_t>(out.segment_begin[at]);
    const auto e = static_cast<std::size_t>(out.segment_end[at]);
    std::int64_t zero_keys = 0;
    if (static_cast<std::int64_t>(e - a) < branch.segment) {
      const auto begin = out.position_class.begin();
      zero_keys = padded - std::count(begin + static_cast<std::ptrdiff_t>(a), begin + static_cast<std::ptrdiff_t>(e),
                                      out.position_class[at]);
    }
    out.zero_keys.push_back(zero_keys);
  }
}

// The phase rules of section 2.
bool KeySets::takes_part(const Branch& branch, std::int64_t position_class, std::int64_t head) const {
  if (head < branch.first_head || head >= branch.first_head + branch.head_count) return false;
  switch (problem_.pattern.phase) {
    case Phase::by_head:
      return position_class == head % branch.dilation;
    case Phase::by_head_block:
      return position_class == head / ceil_div(problem_.heads, branch.dilation);
    case Phase::every:
      return true;
    case Phase::table:
      return position_class == branch.classes[static_cast<std::size_t>(head - branch.first_head)];
  }
  return false;
}

// Equation 3, for every branch.
void KeySets::collect(std::int64_t t, std::int64_t head, RowKeys& row) const {
  row.key.clear();
  row.branch.clear();
  row.zero_keys.assign(branches_.size(), 0);

  struct Segment {
    std::int64_t begin, end, wanted_class;
    const std::int64_t* position_class;
    int branch;
  };
  std::vector<Segment> seen;
  const auto at = static_cast<std::size_t>(t);
  std::int64_t lowest = t;
  std::int64_t highest = t + 1;
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    const BranchPositions& positions = branches_[i];
    if (!takes_part(problem_.pattern.branches[i], positions.position_class[at], head)) continue;
    seen.push_back({.begin = positions.segment_begin[at],
                    .end = positions.segment_end[at],
                    .wanted_class = positions.position_class[at],
                    .position_class = positions.position_class.data(),
                    .branch = static_cast<int>(i)});
    lowest = std::min(lowest, positions.segment_begin[at]);
    highest = std::max(highest, positions.segment_end[at]);
    if (!positions.zero_keys.empty()) row.zero_keys[i] = positions.zero_keys[at];
  }
  for (std::int64_t k = lowest; k < highest; ++k) {
    if (problem_.causal && k > t) break;
    for (const Segment& segment : seen) {
      if (segment.begin <= k && k < segment.end && segment.position_class[k] == segment.wanted_class) {
        row.key.push_back(k);
        row.branch.push_back(segment.branch);
      }
    }
  }
}

}  // namespace annulus::reference
