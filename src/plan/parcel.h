// Parcel: keys and values that one rank hands to another, and how they lie when packed.
//
// A plain parcel is some of an owner's rows with all key/value heads. A parcel of a branch holds, for each key/value
// head, only the rows of one segment whose class one of its query heads takes: that is 1 / r of the rows where each
// head takes one class.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "plan/phase.h"
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
// one key/value head. The rows are those of some classes.
struct Place {
  Classes classes;
  Rows rows;
  std::int64_t first = 0;
  std::int64_t stride = 1;
};

// Reads parcels of a resolved problem. Packed order: plain, [row][key/value head]; of a branch, [key/value
// head][class][row], the rows of a head that takes every class in order of position.
class ParcelReader {
 public:
  explicit ParcelReader(const Problem& problem);

  std::int64_t vectors(const Parcel& parcel) const;  // head rows, of keys; as many of values
  std::int64_t bytes(const Parcel& parcel) const;    // of keys and values
  // The most that one of `parts` slices of the parcel can have.
  std::int64_t most_vectors(const Parcel& parcel, std::int64_t parts) const;

  // Everything that the parcel has, for each key/value head. Empty places are left out.
  std::vector<std::vector<Place>> places(const Parcel& parcel) const;

 private:
  // f(kv_head, classes, rows) in packed order. Parcels of a branch alone.
  template <class F>
  void for_each_run(const Parcel& parcel, F f) const;

  const Problem& problem_;
  std::vector<std::vector<Takers>> takers_;  // [branch, key/value head]
};

// Parcels of queries are packed as those of keys would be if every query head had keys of its own.
Problem problem_of_queries(Problem problem);

// Part i of `parts`, as even as whole rows allow: parts of a parcel together are the parcel.
Parcel slice(const Parcel& parcel, std::int64_t i, std::int64_t parts);

// Where those of the rows lie that one of these places has: rows of one class of one segment.
Place find(const std::vector<Place>& places, std::int64_t phase_class, const Rows& rows);

}  // namespace annulus
