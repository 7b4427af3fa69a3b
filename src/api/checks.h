// Checks of what callers hand over: the rules of docs/semantics.md for tensors, before anything is written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "annulus/problem.h"
#include "annulus/tensor.h"

namespace annulus {

// How many rows the tensors have: all tokens, on one rank.
struct RowCounts {
  std::int64_t queries = 0;
  std::int64_t keys = 0;
};

// All checks of one call.
void check(const ForwardArgs& args, const Problem& problem, const RowCounts& rows, std::size_t workspace_bytes);
void check(const BackwardArgs& args, const Problem& problem, const RowCounts& rows, std::size_t workspace_bytes);

// Collects the tensors of one call, checks each on its own and outputs against all others.
class ArgumentChecks {
 public:
  ArgumentChecks(const Problem& problem, const RowCounts& rows) : problem_(problem), rows_(rows) {}

  // With the shape of q, or that of k.
  enum class Shape { q, k };
  void input(const char* name, const ConstTensorView& tensor, Shape shape) { view(name, tensor, shape, false); }
  void output(const char* name, const TensorView& tensor, Shape shape) { view(name, tensor, shape, true); }
  void input(const char* name, std::span<const float> lse);
  void output(const char* name, std::span<const float> lse);
  void workspace(std::span<const std::byte> memory, std::size_t needed);

  // No output shares an element with anything else.
  void overlaps() const;

 private:
  // Memory of a tensor lies in [i * period, i * period + filled) from its first byte on, for some i.
  struct Comb {
    std::int64_t period = 0;
    std::int64_t filled = 0;
  };

  struct Region {
    std::string name;
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    std::vector<Comb> combs;  // all of them hold; none: solid
    bool written = false;
  };

  void view(const char* name, const ConstTensorView& view, Shape shape, bool written);
  void lse_rows(const char* name, std::span<const float> lse, bool written);
  static std::vector<Comb> combs_of(const std::array<std::int64_t, 4>& shape, const std::array<std::int64_t, 4>& stride,
                                    std::int64_t size);
  static bool interleave(const Region& a, const Region& b);

  const Problem& problem_;
  RowCounts rows_;
  std::vector<Region> regions_;
};

}  // namespace annulus
