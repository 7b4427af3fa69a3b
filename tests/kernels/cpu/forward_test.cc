// Forward where tiles end: groups of one row more or less than every size that the kernels are built of, for all head
// sizes and types.
#include "kernels/cpu/forward.h"

#include <gtest/gtest.h>

#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/tile_edges.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::Inputs;
using support::Call;
using support::Way;
using support::Yardstick;

// "" or what is wrong with forward on some instruction set.
std::string faults(const Problem& problem) {
  const Inputs inputs = reference::draw_inputs(problem, 61, false);
  const Yardstick yardstick(problem, inputs);
  std::string all;
  for (const Way& way : support::each_instruction_set()) {
    const Attention attention(problem, way.options);
    Call call(problem, inputs, way);
    call.forward(attention);
    const std::string fault = call.fault() + yardstick.faults(call.forward_result());
    if (!fault.empty()) all += fault + "in " + support::describe(problem) + " by " + support::describe(way) + "\n";
  }
  return all;
}

TEST(Forward, GroupsOfEveryLength) {
  support::for_each_tile_edge([](const Problem& problem) { EXPECT_EQ(faults(problem), ""); });
}

TEST(Forward, EveryHeadSize) {
  for (const std::int64_t head_dim : support::kHeadDims)
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      Problem problem;
      problem.tokens = 130;
      problem.heads = 2;
      problem.kv_heads = 1;
      problem.head_dim = head_dim;
      problem.dtype = dtype;
      problem.causal = head_dim % 2 == 1;
      problem.pattern = make_pattern(Preset::longnet, {100, 130}, {1, 2}, 2);
      EXPECT_EQ(faults(resolve(problem)), "");
    }
}

// Blocks of rows end inside of groups, segments and strides.
TEST(Forward, BlocksThatCutGroups) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    Problem problem;
    problem.tokens = 1500;
    problem.heads = 2;
    problem.head_dim = 512;  // the fewest rows a block
    problem.dtype = dtype;
    problem.causal = dtype == DType::bf16;
    problem.pattern = make_pattern(Preset::longnet, {100, 1500}, {3, 7}, 2);
    EXPECT_EQ(faults(resolve(problem)), "");
  }
}

TEST(Forward, MeasuresWhatItCarves) {
  Problem problem;
  problem.tokens = 100;
  problem.pattern = make_pattern(Preset::longnet, {100}, {1}, 1);
  problem = resolve(problem);
  const Plan plan = make_plan(problem);
  for (const cpu::Tiles* tiles : cpu::available_tiles())
    for (const int threads : {1, 4}) {
      const cpu::Context context{problem, plan, *tiles, threads, {{{0, 1, problem.tokens}}, false}};
      const std::vector<MemoryComponent> parts = cpu::forward_workspace(context);
      const Attention attention(problem, {.threads = threads, .instruction_set = std::string(tiles->name)});
      EXPECT_EQ(static_cast<std::size_t>(total_bytes(parts)), attention.workspace_bytes(Pass::forward));
    }
}

}  // namespace
}  // namespace annulus
