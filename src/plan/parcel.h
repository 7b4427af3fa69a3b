// Parcel: keys and values that one rank hands to another, and how they lie when packed.
//
// A plain parcel is some of an owner's rows with all key/value heads. A parcel of a branch holds, for each key/value
// head, only the rows of one segment whose class one of its query heads takes: that is 1 / r of the rows where each
// head takes one class.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "plan/rows.h"

namespace annulus {

inline constexpr int kEveryBranch = -1;

struct Parcel {
  int owner = 0;
  Rows rows;                       // positions, within one piece of the owner
  int branch = kEveryBranch;       // a plain parcel serves every branch
  std::int64_t segment_begin = 0;  // of a branch's parcel: the segment that its rows lie in
  std::int64_t segment_length = 0;

  bool operator==(const Parcel&) const = default;
};

// A run of head rows (head_dim elements each) in a packed parcel: vector first + i * stride holds position rows[i] of
// one key/value head.
struct Place {
  Rows rows;
  std::int64_t first = 0;
  std::int64_t stride = 1;
};

// Reads parcels of a resolved problem. Packed order: plain, [row][key/value head]; of a branch, [key/value
// head][class][row], the rows of a head that takes every class in order of position.
class ParcelReader {
 public:
  explicit ParcelReader(const Problem& problem) : problem_(problem) {}

  std::int64_t vectors(const Parcel& parcel) const;  // head rows, of keys; as many of values
  std::int64_t bytes(const Parcel& parcel) const;    // of keys and values

  // Everything that the parcel has for one key/value head. Empty places are left out.
  std::vector<Place> places(const Parcel& parcel, std::int64_t kv_head) const;
  // The keys of one class of one segment; `group` are its rows.
  Place find(const Parcel& parcel, std::int64_t kv_head, std::int64_t phase_class, const Rows& group) const;

 private:
  std::int64_t vectors_of_head(const Parcel& parcel, std::int64_t kv_head) const;
  template <class F>
  void for_each_place(const Parcel& parcel, std::int64_t kv_head, F f) const;

  const Problem& problem_;
};

}  // namespace annulus
