// Backward where tiles and stretches end, in both of its forms: fused for fp32, split for 16-bit types.
#include "kernels/cpu/backward.h"

#include <atomic>
#include <stdexcept>

#include <gtest/gtest.h>

#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/tile_edges.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::Inputs;
using support::Way;
using support::Yardstick;

std::string faults(const Problem& problem, const Way& base = {}) {
  const Inputs inputs = reference::draw_inputs(problem, 71);
  const Yardstick yardstick(problem, inputs);
  std::string all;
  for (const Way& way : support::each_instruction_set(base)) {
    const std::string fault = yardstick.faults(inputs, way);
    if (!fault.empty()) all += fault + "\n";
  }
  return all;
}

TEST(Backward, GroupsOfEveryLength) {
  support::for_each_tile_edge([](const Problem& problem) { EXPECT_EQ(faults(problem), ""); });
}

TEST(Backward, EveryHeadSize) {
  for (const std::int64_t head_dim : support::kHeadDims)
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      Problem problem;
      problem.tokens = 130;
      problem.heads = 2;
      problem.kv_heads = 1;
      problem.head_dim = head_dim;
      problem.dtype = dtype;
      problem.causal = head_dim % 2 == 0;
      problem.pattern = make_pattern(Preset::torchscale, {100, 130}, {1, 2}, 2);
      problem.pattern.gradient = head_dim > 16 ? Gradient::exact : Gradient::detached;
      EXPECT_EQ(faults(resolve(problem)), "");
    }
}

// Head size 512 has the shortest stretches: several of them add to the same rows of dq, in turn.
TEST(Backward, StretchesTakeTurns) {
  for (const bool causal : {false, true}) {
    Problem problem;
    problem.tokens = 700;
    problem.head_dim = 512;
    problem.causal = causal;
    problem.pattern = make_pattern(Preset::longnet, {700}, {1}, 1);
    EXPECT_EQ(faults(resolve(problem), {.options = {.threads = 4, .instruction_set = ""}}), "");
  }
}

// A rank that is told to stop hears of it in some thread's poll. Stretches that wait for that thread's turn must end.
TEST(Backward, AThreadThatThrowsLeavesNobodyWaiting) {
  Problem problem;
  problem.tokens = 700;
  problem.head_dim = 512;
  problem.pattern = make_pattern(Preset::longnet, {700}, {1}, 1);
  problem = resolve(problem);
  const Plan plan = make_plan(problem);
  support::Call call(problem, reference::draw_inputs(problem, 5));
  const Rows all{0, 1, problem.tokens};
  const auto kernels = make_cpu_kernels(problem, plan, {.threads = 4}, {{all}, /*stepwise=*/true});
  support::Workspace workspace(static_cast<std::size_t>(total_bytes(kernels->workspace(Pass::backward))));
  BackwardArgs args = call.backward_args();
  args.workspace = workspace.span();
  const KeySource own{problem, {.owner = 0, .rows = all}, {args.k, args.v, args.dk, args.dv}};
  for (const int last : {1, 2, 3, 5, 8, 13}) {
    std::atomic<int> polls = 0;
    kernels->poll = [&] {
      if (++polls == last) throw std::runtime_error("told to stop");
    };
    EXPECT_THROW(kernels->backward(args, {.sources = {&own, 1}, .dq = args.dq}), std::runtime_error) << last;
  }
}

// Progress is counted in windows of 2^15 items. The last document's group has its first stretch in one window, its
// second in the next.
TEST(Backward, GroupsAcrossTheWindowOfProgress) {
  Problem problem;
  constexpr std::int64_t kSingles = (1 << 15) - 1;
  problem.tokens = kSingles + 1100;
  problem.head_dim = 8;
  problem.causal = true;
  problem.pattern = make_pattern(Preset::longnet, {1100}, {1}, 1);
  for (std::int64_t t = 0; t <= kSingles; ++t) problem.documents.push_back(t);
  problem.documents.push_back(problem.tokens);
  EXPECT_EQ(faults(resolve(problem), {.options = {.threads = 3, .instruction_set = ""}}), "");
}

// A class that several runs of heads take: their sums of dk and dv meet.
TEST(Backward, TablesThatGiveAClassToHeadsApart) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    Problem problem;
    problem.tokens = 200;
    problem.heads = 6;
    problem.kv_heads = 2;
    problem.head_dim = 24;
    problem.dtype = dtype;
    problem.pattern = make_pattern(Preset::longnet, {90, 200}, {3, 2}, 6);
    problem.pattern.phase = Phase::table;
    problem.pattern.branches[0].classes = {0, 2, 0, 1, 0, 1};
    problem.pattern.branches[1].classes = {1, 0, 1, 1, 0, 1};
    EXPECT_EQ(faults(resolve(problem), {.options = {.threads = 4, .instruction_set = ""}}), "");
  }
}

TEST(Backward, MeasuresWhatItCarves) {
  for (const Gradient gradient : {Gradient::exact, Gradient::detached})
    for (const DType dtype : {DType::fp32, DType::fp16}) {
      Problem problem;
      problem.tokens = 100;
      problem.dtype = dtype;
      problem.pattern = make_pattern(Preset::longnet, {100, 50}, {1, 1}, 1);
      problem.pattern.gradient = gradient;
      problem = resolve(problem);
      const Plan plan = make_plan(problem);
      for (const cpu::Tiles* tiles : cpu::available_tiles()) {
        const cpu::Context context{problem, plan, *tiles, 3, {{{0, 1, problem.tokens}}, false}};
        const Attention attention(problem, {.threads = 3, .instruction_set = std::string(tiles->name)});
        EXPECT_EQ(static_cast<std::size_t>(total_bytes(cpu::backward_workspace(context))),
                  attention.workspace_bytes(Pass::backward));
      }
    }
}

}  // namespace
}  // namespace annulus
