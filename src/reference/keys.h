// Who sees whom: equations 1 to 3 of docs/semantics.md, asked of one query and one key at a time.
//
// Nothing here knows of progressions, strides or ranges of groups: those are the plan's way to say the same, and this
// is what the plan is held against.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"

namespace annulus::reference {

// The keys that one query attends to in one head: the multiset of eq. 4, a key once for every branch that reaches it.
struct RowKeys {
  std::vector<std::int64_t> key;        // position, rising
  std::vector<int> branch;              // of the same entry
  std::vector<std::int64_t> zero_keys;  // by branch: keys with logit 0 and value 0 beside them (pad_like_torchscale)

  bool covered() const { return !key.empty(); }
};

class KeySets {
 public:
  // Takes a resolved problem, which must outlive this.
  explicit KeySets(const Problem& problem);

  void collect(std::int64_t t, std::int64_t head, RowKeys& row) const;

 private:
  // By position.
  struct BranchPositions {
    std::vector<std::int64_t> segment_begin;   // a(t)
    std::vector<std::int64_t> segment_end;     // e(t)
    std::vector<std::int64_t> position_class;  // c(t)
    std::vector<std::int64_t> zero_keys;       // empty: none
  };

  void locate(const Branch& branch, std::int64_t document_begin, std::int64_t document_end, BranchPositions& out) const;
  void count_zero_keys(const Branch& branch, std::int64_t document_begin, std::int64_t document_end,
                       BranchPositions& out) const;
  bool takes_part(const Branch& branch, std::int64_t position_class, std::int64_t head) const;

  const Problem& problem_;
  std::vector<BranchPositions> branches_;
};

}  // namespace annulus::reference
