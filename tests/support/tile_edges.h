// Problems whose groups are one row longer or shorter than the sizes that kernels are built of: registers, tiles,
// chunks, stretches.
#pragma once

#include <array>
#include <cstdint>

#include "annulus/problem.h"
#include "support/test_scale.h"

namespace annulus::support {

inline constexpr std::array<std::int64_t, 12> kHeadDims{1, 3, 8, 15, 16, 17, 40, 64, 80, 128, 256, 512};
inline constexpr std::array<std::int64_t, 31> kGroupLengths{1,   13,  14,  15,   27,   28,   29,   55,  56,  57,  83,
                                                            84,  85,  111, 112,  113,  127,  128,  129, 255, 256, 257,
                                                            511, 512, 513, 1023, 1024, 1025, 2049, 5,   41};

// Calls f(problem) for every length; head sizes, types and both gradients take turns, long groups with small heads.
template <class F>
void for_each_tile_edge(F f) {
  constexpr std::array<DType, 3> kTypes{DType::fp32, DType::bf16, DType::fp16};
  std::int64_t number = 0;
  for (const std::int64_t length : kGroupLengths)
    for (const DType dtype : kTypes)
      for (const bool causal : {false, true}) {
        const std::int64_t n = number++;
        if (!is_taken(n)) continue;
        const std::size_t head_dims = length > 600 ? 4 : length > 200 ? 8 : kHeadDims.size();
        Problem problem;
        problem.tokens = 2 * length + (length < 300 ? 3 : -length);  // two groups and a rest, or one long group
        problem.head_dim = kHeadDims[static_cast<std::size_t>(7 * n + n / 6) % head_dims];
        problem.dtype = dtype;
        problem.causal = causal;
        problem.pattern = make_pattern(Preset::longnet, {length}, {1}, 1);
        problem.pattern.gradient = n % 4 < 2 ? Gradient::exact : Gradient::detached;
        f(resolve(problem));
      }
}

}  // namespace annulus::support
