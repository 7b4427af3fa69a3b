// The phase rules of docs/semantics.md, section 2: which classes of a branch take part in which head.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"

namespace annulus {

// The classes [first, first + count) of a branch; count 0: the head does not take part.
struct Classes {
  std::int64_t first = 0;
  std::int64_t count = 0;

  bool operator==(const Classes&) const = default;
};

// Takes a resolved problem, as all of these do.
Classes classes_of(const Problem& problem, int branch, std::int64_t head);

// Query heads that take the same classes.
struct Takers {
  Classes classes;
  std::vector<std::int64_t> heads;
};

// All classes that the query heads of one key/value head take in a branch, no class twice.
std::vector<Takers> takers_of(const Problem& problem, int branch, std::int64_t kv_head);

}  // namespace annulus
