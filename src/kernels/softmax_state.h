// The softmax state: how partial results of a row meet (eq. 4 and 5), in one place.
//
// A row's state is (m, l, acc): a maximum in log2 units, l = sum 2^(x - m), acc = sum 2^(x - m) v. Its rules:
//   nothing seen yet            m = -inf, l = 0, acc = 0
//   seen, but all logits -inf   m = kLowest, l = 0: softmax is then undefined and the result NaN, as 0 / 0 is
// `m` need not be the true maximum, only near it: a growth below kLazyLog2 rescales nothing.
#pragma once

#include <cmath>
#include <limits>

namespace annulus {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();
inline constexpr float kLowest = std::numeric_limits<float>::lowest();
inline constexpr float kLazyLog2 = 8.0f;

inline constexpr float kLog2E = 1.442695040888963407f;
inline constexpr float kLn2 = 0.6931471805599453094f;

inline bool is_covered(float maximum) { return !(maximum == kNothing); }

// G of eq. 4, natural log. A row that no branch covers has -inf.
inline float log_sum_exp(float maximum, float sum) {
  if (!is_covered(maximum)) return kNothing;
  const double log2_sum = static_cast<double>(maximum) + std::log2(static_cast<double>(sum));
  return static_cast<float>(log2_sum * 0.693147180559945309417);
}

}  // namespace annulus
