// Random small problems of every kind that section 2 knows, for properties.
#pragma once

#include <algorithm>
#include <vector>

#include <rapidcheck.h>

#include "annulus/problem.h"

namespace annulus::reference {

inline std::int64_t draw_between(std::int64_t low, std::int64_t high) { return *rc::gen::inRange(low, high + 1); }

inline std::vector<std::int64_t> draw_documents(std::int64_t tokens) {
  std::vector<std::int64_t> bounds;
  const std::int64_t cuts = draw_between(0, 3);
  for (std::int64_t i = 0; i < cuts; ++i) bounds.push_back(draw_between(0, tokens));
  bounds.push_back(0);
  bounds.push_back(tokens);
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

inline Branch draw_branch(Phase phase, std::int64_t tokens, std::int64_t heads) {
  Branch branch;
  branch.segment = draw_between(1, tokens + 3);
  branch.dilation = draw_between(1, 6);
  branch.first_head = draw_between(0, heads - 1);
  branch.head_count = draw_between(0, heads - branch.first_head);
  if (*rc::gen::arbitrary<bool>()) branch.first_head = 0, branch.head_count = heads;
  if (phase == Phase::table)
    for (std::int64_t j = 0; j < branch.head_count; ++j) branch.classes.push_back(draw_between(0, branch.dilation - 1));
  return branch;
}

inline Problem draw_problem(std::int64_t max_tokens) {
  Problem problem;
  problem.batch = draw_between(1, 2);
  problem.tokens = draw_between(1, max_tokens);
  problem.kv_heads = draw_between(1, 2);
  problem.heads = problem.kv_heads * draw_between(1, 3);
  problem.head_dim = draw_between(1, 9);
  problem.causal = *rc::gen::arbitrary<bool>();
  problem.documents = draw_documents(problem.tokens);
  problem.pattern.phase = *rc::gen::element(Phase::by_head, Phase::by_head_block, Phase::every, Phase::table);
  problem.pattern.gradient = *rc::gen::element(Gradient::exact, Gradient::detached);
  problem.pattern.output_scale = *rc::gen::element(1.0, 0.5, -1.25);
  problem.pattern.pad_like_torchscale = !problem.causal && *rc::gen::arbitrary<bool>();
  const std::int64_t branches = draw_between(1, 3);
  for (std::int64_t i = 0; i < branches; ++i)
    problem.pattern.branches.push_back(draw_branch(problem.pattern.phase, problem.tokens, problem.heads));
  return resolve(problem);
}

}  // namespace annulus::reference
