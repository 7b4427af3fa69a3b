// A problem: everything that decides the result, and nothing about how it is computed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/tensor.h"

namespace annulus {

struct Problem {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;    // N, of the whole sequence
  std::int64_t heads = 1;     // H, of the queries
  std::int64_t kv_heads = 0;  // H_kv, divides H; 0 means H
  std::int64_t head_dim = 64;
  DType dtype = DType::fp32;
  Pattern pattern;
  bool causal = false;
  std::optional<double> scale;          // of the logits; 1 / sqrt(head_dim) unless given
  std::vector<std::int64_t> documents;  // cu_seqlens: 0 = d_0 <= d_1 <= ... = N; empty: one document

  bool operator==(const Problem&) const = default;
};

// Returns the problem with its defaults filled in (kv_heads, scale, head_count, documents), or throws InvalidArgument.
Problem resolve(Problem problem);

// Pairs (query, key) of one forward pass, over all batches, heads and branches: forward is 4 * head_dim FLOP a pair,
// backward 10. Takes a resolved problem.
double count_pairs(const Problem& problem);

}  // namespace annulus
