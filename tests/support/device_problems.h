// Problems for kernels of a GPU, in few words, and patterns of every kind for them.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"

namespace annulus::support {

struct Branches {
  std::vector<std::int64_t> segments, dilations;
};

inline Problem make_problem(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, DType dtype, bool causal,
                            const Branches& pattern, Phase phase = Phase::by_head) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.head_dim = head_dim;
  problem.dtype = dtype;
  problem.causal = causal;
  problem.pattern = make_pattern(Preset::longnet, pattern.segments, pattern.dilations, heads);
  problem.pattern.phase = phase;
  return resolve(problem);
}

// Segments that nest and that do not, dilations that divide each other and that do not.
inline const std::vector<Branches> kNestedAndCrooked = {{{512}, {4}},
                                                        {{512, 1024}, {1, 2}},
                                                        {{256, 512, 1024}, {1, 2, 4}},
                                                        {{300, 700}, {2, 3}},
                                                        {{333}, {5}},
                                                        {{1000, 77, 512}, {3, 1, 8}},
                                                        {{2000}, {1}},
                                                        {{64, 1024}, {4, 16}},
                                                        {{128, 256, 512, 1024}, {8, 4, 2, 1}},
                                                        {{640, 1280}, {16, 16}},
                                                        {{128, 512}, {1, 2}},
                                                        {{100, 400}, {1, 4}}};

}  // namespace annulus::support
