// Ranks that share a GPU: the result is that of one rank, whatever the layout, the strategy and the kernel. Every
// machine runs this on a pretend GPU as well (tests/pretend_cuda).
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>

#include "annulus/ranks.h"
#include "plan/reshard.h"
#include "reference/draw_inputs.h"
#include "support/device_ranks.h"
#include "support/draw_case.h"
#include "support/draw_sharding.h"
#include "support/test_scale.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::DeviceRanksWay;
using support::draw_between;
using support::Yardstick;

class CudaRanks : public support::OnSomeGpu {};

std::string faults(const Problem& problem, const Inputs& inputs, const Yardstick& yardstick, const Sharding& sharding,
                   const RankOptions& options, const DeviceRanksWay& way = {}) {
  std::string fault;
  try {
    const auto ranks = support::compute_on_device_ranks(problem, inputs, sharding, options, way);
    fault = ranks.fault + yardstick.faults(ranks.result) + traffic_faults(ranks);
  } catch (const std::exception& error) {
    fault = error.what();
  }
  if (fault.empty()) return "";
  return fault + " in " + support::describe(problem) + " by " + describe(way) + support::describe(sharding, options) +
         "\n";
}

// Small enough for compute-sanitizer: meetings, kept states and sums, units.
TEST_F(CudaRanks, SmallProblems) {
  std::uint64_t seed = 0;
  for (const Strategy strategy : {Strategy::exchange, Strategy::reshard, Strategy::ring})
    for (const bool causal : {false, true})
      for (const DType dtype : {DType::bf16, DType::fp32}) {
        Problem problem;
        problem.tokens = 200;
        problem.heads = 2;
        problem.kv_heads = ++seed % 2 == 0 ? 1 : 2;
        problem.head_dim = 64;
        problem.dtype = dtype;
        problem.causal = causal;
        problem.pattern = make_pattern(Preset::longnet, {20, 200}, {1, 2}, 2);
        problem = resolve(problem);
        const Inputs inputs = draw_inputs(problem, seed);
        EXPECT_EQ(faults(problem, inputs, Yardstick(problem, inputs), {.ranks = 2}, {.strategy = strategy}), "");
      }
}

// A tile of keys meets more heads and branches than one list of meetings has room for.
TEST_F(CudaRanks, ManyHeadsShareAKeyHead) {
  for (const std::int64_t head_dim : {64, 128}) {
    Problem problem;
    problem.tokens = 300;
    problem.heads = 16;
    problem.kv_heads = 1;
    problem.head_dim = head_dim;
    problem.dtype = DType::bf16;
    problem.causal = head_dim == 64;
    problem.pattern = make_pattern(Preset::longnet, {50, 300}, {1, 3}, 16);
    problem = resolve(problem);
    const Inputs inputs = draw_inputs(problem, 53);
    EXPECT_EQ(faults(problem, inputs, Yardstick(problem, inputs), {.ranks = 2}, {}), "");
  }
}

// A part of one dilated branch, with all of a rank's rows or some of them, with the Delta of all branches or its own.
TEST_F(CudaRanks, DilatedBranchAlone) {
  for (const std::int64_t tokens : {1024, 1300})
    for (const Gradient gradient : {Gradient::exact, Gradient::detached})
      for (const std::int64_t head_dim : {64, 128}) {
        Problem problem;
        problem.tokens = tokens;
        problem.heads = 2;
        problem.head_dim = head_dim;
        problem.dtype = DType::bf16;
        problem.causal = head_dim == 64;
        problem.pattern = make_pattern(Preset::longnet, {2048, 256}, {8, 4}, 2);
        problem.pattern.gradient = gradient;
        problem = resolve(problem);
        const Inputs inputs = draw_inputs(problem, 67);
        const Yardstick yardstick(problem, inputs);
        for (const int ranks : {1, 2})
          EXPECT_EQ(faults(problem, inputs, yardstick, {.ranks = ranks}, {.strategy = Strategy::exchange}), "");
      }
}

// Every combination of what users choose, on a problem in which nothing divides anything. (Replicated queries:
// tests/cli/cuda_ranks_test.py.)
TEST_F(CudaRanks, EveryLayoutAndStrategy) {
  std::uint64_t seed = 0;
  for (const int ranks : {1, 2, 3, 5, 8})
    for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped})
      for (const Strategy strategy :
           {Strategy::automatic, Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather})
        for (const bool causal : {false, true})
          for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            if (strategy == Strategy::reshard && layout == Layout::striped) continue;
            if (!support::is_taken(static_cast<std::int64_t>(++seed))) continue;
            Problem problem;
            problem.tokens = 419;
            problem.heads = 6;
            problem.kv_heads = seed % 2 == 0 ? 3 : 6;
            problem.head_dim = std::array{64, 40, 128}[seed % 3];
            problem.dtype = dtype;
            problem.causal = causal;
            problem.documents =
                seed % 3 == 0 ? std::vector<std::int64_t>{0, 1, 1, 18, 419} : std::vector<std::int64_t>{};
            problem.pattern = make_pattern(Preset::longnet, {10, 94, 419}, {1, 3, 7}, 6);
            problem.pattern.phase = std::array{Phase::by_head, Phase::by_head_block, Phase::every}[seed % 3];
            problem.pattern.gradient =
                seed % 4 == 0 && strategy != Strategy::reshard ? Gradient::detached : Gradient::exact;
            problem = resolve(problem);
            const Inputs inputs = draw_inputs(problem, seed);
            EXPECT_EQ(faults(problem, inputs, Yardstick(problem, inputs), {.ranks = ranks, .layout = layout},
                             {.strategy = strategy, .slot_bytes = 40'000}),
                      "");
          }
}

// Segments that fit shards, that span some, that span all: every kernel, with groups longer than a tile.
TEST_F(CudaRanks, LongGroups) {
  std::int64_t number = 0, ways = 0;
  for (const bool causal : {false, true})
    for (const int head_dim : {64, 128})
      for (const std::int64_t tokens : {1024, 1300}) {
        ++number;
        Problem problem;
        problem.tokens = tokens;
        problem.heads = 2;
        problem.kv_heads = number % 2 == 0 ? 1 : 2;
        problem.head_dim = head_dim;
        problem.dtype = number % 3 == 0 ? DType::fp16 : DType::bf16;
        problem.causal = causal;
        problem.pattern = make_pattern(Preset::longnet, {128, 256, 512, 2048}, {1, 2, 2, 4}, 2);
        problem = resolve(problem);
        const Inputs inputs = draw_inputs(problem, 5);
        const Yardstick yardstick(problem, inputs);
        for (const Strategy strategy : {Strategy::automatic, Strategy::exchange, Strategy::reshard, Strategy::ring})
          for (const char* kernel : {"auto", "mma"}) {
            if (!support::is_taken(ways++, 0.3)) continue;
            EXPECT_EQ(faults(problem, inputs, yardstick, {.ranks = 4}, {.strategy = strategy, .slot_bytes = 300'000},
                             {.options = {.instruction_set = kernel, .device = "cuda:0"}}),
                      "");
          }
      }
}

// As RankAttention.QueriesThatMeetNothing.
TEST_F(CudaRanks, QueriesThatMeetNothing) {
  Problem problem;
  problem.tokens = 24;
  problem.heads = 6;
  problem.kv_heads = 2;
  problem.head_dim = 3;
  problem.dtype = DType::bf16;
  problem.causal = true;
  problem.documents = {0, 5, 24};
  problem.pattern.phase = Phase::table;
  problem.pattern.branches = {{.segment = 2, .dilation = 12, .classes = {2, 3, 1, 1, 2, 3}}};
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, 7);
  EXPECT_EQ(faults(problem, inputs, Yardstick(problem, inputs), {.ranks = 2}, {.strategy = Strategy::exchange}), "");
}

TEST_F(CudaRanks, SegmentsThatFitShardsNeedNothing) {
  Problem problem;
  problem.tokens = 2048;
  problem.heads = 2;
  problem.head_dim = 64;
  problem.dtype = DType::bf16;
  problem.pattern = make_pattern(Preset::longnet, {128, 512}, {1, 4}, 2);
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, 3);
  const auto ranks = support::compute_on_device_ranks(problem, inputs, {.ranks = 4}, {});
  EXPECT_EQ(Yardstick(problem, inputs).faults(ranks.result), "");
  for (const RankTraffic& traffic : ranks.counted) EXPECT_EQ(traffic.sent_bytes, 0);
}

// One rank has all of it: its bits do not depend on the number of ranks.
TEST_F(CudaRanks, ReproducibleBits) {
  std::int64_t number = 0;
  for (const auto& [dtype, gradient] :
       {std::pair{DType::bf16, Gradient::exact}, {DType::fp32, Gradient::exact}, {DType::bf16, Gradient::detached}})
    for (const bool causal : {false, true}) {
      if (!support::is_taken(number++, 0.3)) continue;
      Problem problem;
      problem.tokens = 700;
      problem.heads = 2;
      problem.head_dim = 64;
      problem.dtype = dtype;
      problem.causal = causal;
      problem.pattern = make_pattern(Preset::longnet, {100, 700}, {1, 3}, 2);
      problem.pattern.gradient = gradient;
      problem = resolve(problem);
      const Inputs inputs = draw_inputs(problem, 9);
      RankOptions options;
      options.reproducible = true;
      const auto one = support::compute_on_device_ranks(problem, inputs, {.ranks = 1}, options);
      EXPECT_EQ(Yardstick(problem, inputs).faults(one.result), "");
      for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped}) {
        const auto more = support::compute_on_device_ranks(problem, inputs, {.ranks = 3, .layout = layout}, options);
        EXPECT_EQ(more.result.out, one.result.out);
        EXPECT_EQ(more.result.lse, one.result.lse);
        EXPECT_EQ(more.result.dq, one.result.dq);
        EXPECT_EQ(more.result.dk, one.result.dk);
        EXPECT_EQ(more.result.dv, one.result.dv);
      }
    }
}

TEST_F(CudaRanks, AreOneRank) {
  EXPECT_TRUE(rc::check([] {
    Problem problem = support::draw_problem(300, 130);
    const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
    const Sharding sharding = support::draw_sharding(problem.tokens, 8);
    RankOptions options;
    options.strategy =
        *rc::gen::element(Strategy::automatic, Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather);
    if (options.strategy == Strategy::reshard && !can_reshard(problem, sharding)) options.strategy = Strategy::exchange;
    options.slot_bytes = *rc::gen::element<std::int64_t>(1, 3000, 20'000, 1 << 20);
    options.reproducible = draw_between(0, 4) == 0;
    DeviceRanksWay way;
    way.layout = *rc::gen::element(support::Layout::dense, support::Layout::apart, support::Layout::heads_major);
    way.aligned = support::draw_bool();
    way.options.deterministic = support::draw_bool();
    const std::string fault = faults(problem, inputs, Yardstick(problem, inputs), sharding, options, way);
    if (!fault.empty()) RC_FAIL(fault);
  }));
}

// Messages with fp32 and another type, where that has odd numbers of rows or of elements: a GPU reads fp32 at multiples
// of four alone, and what its kernels read 16 bytes at a time (rows of 8 elements) at multiples of 16.
TEST_F(CudaRanks, OddNumbersInMessages) {
  for (const std::int64_t head_dim : {5, 8}) {
    Problem problem;
    problem.tokens = 45;
    problem.heads = 3;
    problem.head_dim = head_dim;
    problem.dtype = DType::bf16;
    problem.pattern = make_pattern(Preset::longnet, {9, 45}, {1, 1}, 3);
    problem = resolve(problem);
    const Inputs inputs = draw_inputs(problem, 3);
    const Yardstick yardstick(problem, inputs);
    for (const Layout layout : {Layout::contiguous, Layout::striped})
      for (const Strategy strategy : {Strategy::reshard, Strategy::exchange})
        for (const bool reproducible : {false, true}) {
          const Sharding sharding{.ranks = 3, .layout = layout};
          if (strategy == Strategy::reshard && (reproducible || !can_reshard(problem, sharding))) continue;
          const RankOptions options{.strategy = strategy, .reproducible = reproducible};
          EXPECT_EQ(faults(problem, inputs, yardstick, sharding, options), "");
        }
  }
}

// torchscale's zero keys belong to the last segment, which lies on the last rank or on several.
TEST_F(CudaRanks, ZeroKeys) {
  std::int64_t number = 0;
  for (const Gradient gradient : {Gradient::exact, Gradient::detached})
    for (const bool reproducible : {false, true}) {
      Problem problem;
      problem.tokens = 700;
      problem.heads = 4;
      problem.kv_heads = 2;
      problem.head_dim = 64;
      problem.dtype = DType::bf16;
      problem.pattern = make_pattern(Preset::torchscale, {64, 400}, {2, 8}, 4);
      problem.pattern.pad_like_torchscale = true;
      problem.pattern.gradient = gradient;
      problem = resolve(problem);
      const Inputs inputs = draw_inputs(problem, 71);
      const Yardstick yardstick(problem, inputs);
      RankOptions options;
      options.reproducible = reproducible;
      for (const int ranks : {1, 3})
        for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped}) {
          if (!support::is_taken(number++, 0.5)) continue;
          EXPECT_EQ(faults(problem, inputs, yardstick, {.ranks = ranks, .layout = layout}, options), "");
        }
    }
}

}  // namespace
}  // namespace annulus
