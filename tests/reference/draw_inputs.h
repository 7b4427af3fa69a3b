// Inputs for the tests of the reference: normal numbers from a seed, stored in the problem's type.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "annulus/problem.h"
#include "numeric/half.h"
#include "reference/reference.h"

namespace annulus::reference {

inline std::vector<double> draw_tensor(const Problem& problem, std::int64_t heads, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(problem.batch * problem.tokens * heads * problem.head_dim));
  for (double& x : values) x = round_to(problem.dtype, normal(random));
  return values;
}

// Takes a resolved problem.
inline Inputs draw_inputs(const Problem& problem, std::uint64_t seed, bool backward = true) {
  std::mt19937_64 random(seed);
  Inputs inputs;
  inputs.q = draw_tensor(problem, problem.heads, random);
  inputs.k = draw_tensor(problem, problem.kv_heads, random);
  inputs.v = draw_tensor(problem, problem.kv_heads, random);
  if (backward) inputs.dout = draw_tensor(problem, problem.heads, random);
  return inputs;
}

inline std::size_t element(const Problem& problem, std::int64_t heads, std::int64_t batch, std::int64_t t,
                           std::int64_t head) {
  return static_cast<std::size_t>(((batch * problem.tokens + t) * heads + head) * problem.head_dim);
}

inline std::size_t lse_element(const Problem& problem, std::int64_t batch, std::int64_t head, std::int64_t t) {
  return static_cast<std::size_t>((batch * problem.heads + head) * problem.tokens + t);
}

}  // namespace annulus::reference
