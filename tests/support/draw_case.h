// Random problems of every kind that the semantics know, wider than those that the reference is tested with: any type,
// thread count, instruction set, memory layout and scale.
#pragma once

#include <algorithm>
#include <vector>

#include <rapidcheck.h>

#include "annulus/attention.h"
#include "annulus/problem.h"
#include "support/call.h"

namespace annulus::support {

// At full size from the first draw on: RapidCheck's own inRange begins near `low`.
inline std::int64_t draw_between(std::int64_t low, std::int64_t high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(low, high + 1));
}
inline bool draw_bool() { return *rc::gen::arbitrary<bool>(); }

// Cut at random; documents may be empty.
inline std::vector<std::int64_t> draw_documents(std::int64_t tokens) {
  std::vector<std::int64_t> bounds{0, tokens};
  for (std::int64_t i = draw_between(0, 4); i > 0; --i) bounds.push_back(draw_between(0, tokens));
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

inline Branch draw_branch(Phase phase, std::int64_t tokens, std::int64_t heads) {
  Branch branch;
  branch.segment = draw_between(1, tokens + 3);
  branch.dilation = draw_bool() ? draw_between(1, 4) : draw_between(1, tokens + 5);
  if (draw_bool()) {
    branch.first_head = draw_between(0, heads - 1);
    branch.head_count = draw_between(0, heads - branch.first_head);
  }
  if (phase == Phase::table)
    for (std::int64_t j = branch.first_head;
         j < (branch.head_count == kAllHeads ? heads : branch.first_head + branch.head_count); ++j)
      branch.classes.push_back(draw_between(0, branch.dilation - 1));
  return branch;
}

inline Pattern draw_pattern(std::int64_t tokens, std::int64_t heads) {
  Pattern pattern;
  pattern.phase = *rc::gen::element(Phase::by_head, Phase::by_head_block, Phase::every, Phase::table);
  pattern.gradient = *rc::gen::element(Gradient::exact, Gradient::detached);
  pattern.output_scale = *rc::gen::element(1.0, 1.0, 1.0 / 3, -2.0, 0.0);
  pattern.pad_like_torchscale = draw_bool();
  for (std::int64_t i = draw_between(1, 4); i > 0; --i)
    pattern.branches.push_back(draw_branch(pattern.phase, tokens, heads));
  return pattern;
}

inline Problem draw_problem(std::int64_t max_tokens, std::int64_t max_head_dim) {
  Problem problem;
  problem.batch = draw_between(1, 3);
  problem.tokens = draw_between(1, max_tokens);
  problem.kv_heads = draw_between(1, 3);
  problem.heads = problem.kv_heads * draw_between(1, 4);
  problem.head_dim = draw_between(1, max_head_dim);
  problem.dtype = *rc::gen::element(DType::fp32, DType::bf16, DType::fp16);
  problem.causal = draw_bool();
  problem.documents = draw_documents(problem.tokens);
  problem.pattern = draw_pattern(problem.tokens, problem.heads);
  if (draw_bool()) problem.scale = *rc::gen::element(0.3, -0.4, 0.0, 1.0);
  return resolve(problem);
}

// Any segments, but dilations that divide each other, so that all branches may share a sweep.
inline Problem draw_dividing_problem(std::int64_t max_tokens) {
  Problem problem = draw_problem(max_tokens, 4);
  const std::int64_t base = draw_between(2, 3);
  for (Branch& branch : problem.pattern.branches) {
    branch.segment = draw_between(1, std::max<std::int64_t>(1, problem.tokens / 2));
    // No larger than the segment, to which the schedule would cut it.
    branch.dilation = 1;
    for (std::int64_t i = draw_between(0, 3); i > 0 && branch.dilation * base <= branch.segment; --i)
      branch.dilation *= base;
    for (std::int64_t& of_head : branch.classes) of_head %= branch.dilation;
  }
  return resolve(problem);
}

// Segments and dilations that grow together, as patterns of several branches have them: a tile's branches have keys in
// common. Now and then a segment that does not nest.
inline Problem draw_nested_problem(std::int64_t max_tokens) {
  Problem problem = draw_problem(max_tokens, 4);
  std::int64_t segment = draw_between(1, draw_bool() ? 40 : max_tokens / 3), dilation = *rc::gen::element(1, 1, 2, 3);
  problem.pattern.branches.resize(static_cast<std::size_t>(draw_between(2, 8)));
  for (Branch& branch : problem.pattern.branches) {
    branch = {};
    branch.segment = segment;
    branch.dilation = std::min(dilation, segment);
    segment = segment * draw_between(1, 4) + (draw_between(0, 7) == 0 ? 1 : 0);
    if (dilation < 64) dilation *= *rc::gen::element(1, 2, 2, 4);
    if (problem.pattern.phase == Phase::table)
      for (std::int64_t head = 0; head < problem.heads; ++head)
        branch.classes.push_back(draw_between(0, branch.dilation - 1));
  }
  std::swap(
      problem.pattern.branches.front(),
      problem.pattern.branches[static_cast<std::size_t>(draw_between(0, std::ssize(problem.pattern.branches) - 1))]);
  return resolve(problem);
}

// With a head size and a type that the Hopper kernels take.
inline Problem for_hopper(Problem problem) {
  problem.head_dim = draw_bool() ? 64 : 128;
  problem.dtype = draw_bool() ? DType::bf16 : DType::fp16;
  problem.scale = 0.1;
  return resolve(problem);
}

inline Way draw_way() {
  Way way;
  way.options.threads = static_cast<int>(draw_between(1, 4));
  way.options.instruction_set = *rc::gen::elementOf(instruction_sets());
  way.inputs = *rc::gen::element(Layout::dense, Layout::apart, Layout::heads_major);
  way.outputs = *rc::gen::element(Layout::dense, Layout::apart, Layout::heads_major);
  way.brings_workspace = draw_bool();
  return way;
}

}  // namespace annulus::support
