// Section 6: the result on p ranks is the result on one, whatever the layout, the strategy and the size of the slots.
#include "annulus/ranks.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "annulus/carrier.h"
#include "annulus/thread_group.h"
#include "plan/reshard.h"
#include "reference/draw_inputs.h"
#include "support/draw_case.h"
#include "support/draw_sharding.h"
#include "support/rank_call.h"
#include "support/refusal.h"
#include "support/test_scale.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::compute_on_ranks;
using support::draw_between;
using support::RankResult;
using support::traffic_faults;
using support::Way;
using support::Yardstick;

std::string faults(const Problem& problem, const Inputs& inputs, const Sharding& sharding, const RankOptions& options,
                   const Way& way) {
  const RankResult ranks = compute_on_ranks(problem, inputs, sharding, options, way);
  const std::string fault = ranks.fault + Yardstick(problem, inputs).faults(ranks.result) + traffic_faults(ranks);
  if (fault.empty()) return "";
  return fault + " in " + support::describe(problem) + " by " + support::describe(way) +
         support::describe(sharding, options);
}

RC_GTEST_PROP(RankAttentionProperty, IsTheResultOfOneRank, ()) {
  const Problem problem = support::draw_problem(60, 20);
  const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  const Sharding sharding = support::draw_sharding(problem.tokens, 8);
  RankOptions options;
  options.strategy =
      *rc::gen::element(Strategy::automatic, Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather);
  if (options.strategy == Strategy::reshard && !can_reshard(problem, sharding)) options.strategy = Strategy::exchange;
  options.slot_bytes = *rc::gen::element<std::int64_t>(1, 300, 2000, 1 << 20);
  const std::string fault = faults(problem, inputs, sharding, options, support::draw_way());
  if (!fault.empty()) RC_FAIL(fault);
}

// Every combination of what users choose, on a problem in which nothing divides anything.
TEST(RankAttention, EveryLayoutAndStrategy) {
  std::uint64_t seed = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8})
    for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped})
      for (const Strategy strategy : {Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather})
        for (const bool causal : {false, true})
          for (const DType dtype : {DType::fp32, DType::bf16}) {
            if (strategy == Strategy::reshard && layout == Layout::striped) continue;
            if (!support::is_taken(static_cast<std::int64_t>(++seed))) continue;
            Problem problem;
            problem.tokens = 211;
            problem.heads = 6;
            problem.kv_heads = seed % 2 == 0 ? 3 : 6;
            problem.head_dim = 12;
            problem.dtype = dtype;
            problem.causal = causal;
            problem.documents =
                seed % 3 == 0 ? std::vector<std::int64_t>{0, 1, 1, 18, 211} : std::vector<std::int64_t>{};
            problem.pattern =
                make_pattern(seed % 5 == 0 ? Preset::residue : Preset::longnet, {10, 47, 211}, {1, 3, 7}, 6);
            problem.pattern.phase = std::array{Phase::by_head, Phase::by_head_block, Phase::every}[seed % 3];
            problem = resolve(problem);
            const Inputs inputs = draw_inputs(problem, seed);
            EXPECT_EQ(
                faults(problem, inputs, {.ranks = ranks, .layout = layout}, {.strategy = strategy, .slot_bytes = 4096},
                       {.options = {.threads = 1, .instruction_set = ""}}),
                "");
          }
}

// Shards that need nothing from each other, some of them a single row of a striped sequence.
TEST(RankAttention, ShardsThatAreSequencesOfTheirOwn) {
  for (const DType dtype : {DType::fp32, DType::fp16})
    for (const Gradient gradient : {Gradient::exact, Gradient::detached})
      for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped}) {
        Problem problem;
        problem.heads = 6;
        problem.kv_heads = 3;
        problem.head_dim = 5;
        problem.dtype = dtype;
        problem.tokens = 3;
        problem.documents = {0, 1, 3};
        problem.pattern = make_pattern(Preset::residue, {6}, {6}, 6);
        problem.pattern.gradient = gradient;
        problem = resolve(problem);
        EXPECT_EQ(faults(problem, draw_inputs(problem, 3), {.ranks = 2, .layout = layout}, {}, {}), "");
        problem.tokens = 120;
        problem.documents = {};
        problem.pattern = make_pattern(Preset::longnet, {10, 40}, {1, 3}, 6);
        problem.pattern.gradient = gradient;
        problem = resolve(problem);
        EXPECT_EQ(faults(problem, draw_inputs(problem, 4), {.ranks = 3, .layout = layout}, {}, {}), "");
      }
}

// Nobody has a branch's output of all queries. Of one branch, the detached gradient is the exact one.
TEST(RankAttention, ReplicatedQueriesTakeNoDeltaOfEachBranch) {
  Problem problem;
  problem.tokens = 10;
  problem.heads = 1;
  problem.head_dim = 8;
  problem.pattern = make_pattern(Preset::torchscale, {5}, {1}, 1);
  const auto attention = [&] {
    const auto looks_ahead = make_carried_transport(0, 2, nullptr);
    return RankAttention(problem, {.ranks = 2}, *looks_ahead, {.strategy = Strategy::replicated}).rows();
  };
  EXPECT_EQ(attention(), 5);
  problem.pattern = make_pattern(Preset::torchscale, {5, 10}, {1, 2}, 1);
  support::expect_refused_as<Unsupported>(attention, {"replicated queries", "detached", "strategy"});
}

// The one row that a head takes of a segment over two ranks lies on the second: no key travels, but the query does,
// meets nothing, and comes home with a gradient of 0.
TEST(RankAttention, QueriesThatMeetNothing) {
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const bool causal : {false, true}) {
      Problem problem;
      problem.tokens = 24;
      problem.heads = 6;
      problem.kv_heads = 2;
      problem.head_dim = 3;
      problem.dtype = dtype;
      problem.causal = causal;
      problem.documents = {0, 5, 24};
      problem.pattern.phase = Phase::table;
      problem.pattern.branches = {{.segment = 2, .dilation = 12, .classes = {2, 3, 1, 1, 2, 3}}};
      problem = resolve(problem);
      EXPECT_EQ(faults(problem, draw_inputs(problem, 7), {.ranks = 2}, {.strategy = Strategy::exchange}, {}), "");
    }
}

// Arithmetic with a dilation must not overflow, in however many slices.
TEST(RankAttention, TheLargestDilation) {
  for (const Strategy strategy : {Strategy::exchange, Strategy::reshard, Strategy::ring})
    for (const Phase phase : {Phase::by_head, Phase::every}) {
      Problem problem;
      problem.tokens = 64;
      problem.heads = 4;
      problem.kv_heads = 2;
      problem.head_dim = 8;
      problem.pattern = make_pattern(Preset::longnet, {64, 64}, {1, std::numeric_limits<std::int64_t>::max()}, 4);
      problem.pattern.phase = phase;
      problem = resolve(problem);
      const Sharding sharding{.ranks = 2, .boundaries = {0, 40, 64}};
      if (strategy == Strategy::reshard && phase == Phase::every) continue;  // one unit a class, and they are 2^63
      for (const std::int64_t slot_bytes : {1, 700, 4096})
        EXPECT_EQ(
            faults(problem, draw_inputs(problem, 3), sharding, {.strategy = strategy, .slot_bytes = slot_bytes}, {}),
            "");
    }
}

// Sections 6 and 8: an infinite logit makes its row NaN, lse too, and the gradients of all that it sees; on which ranks
// the parts of that row were computed cannot be seen.
TEST(RankAttention, InfinitiesStandWhereOneRankHasThem) {
  for (const Strategy strategy : {Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather})
    for (const bool causal : {false, true}) {
      Problem problem;
      problem.tokens = 23;
      problem.heads = 2;
      problem.kv_heads = 2;
      problem.head_dim = 4;
      problem.causal = causal;
      problem.pattern = make_pattern(Preset::longnet, {6, 23}, {1, 3}, 2);
      problem = resolve(problem);
      Inputs inputs = draw_inputs(problem, 11);
      inputs.q[9 * 8] = std::numeric_limits<double>::infinity();
      EXPECT_EQ(faults(problem, inputs, {.ranks = 3}, {.strategy = strategy}, {}), "");
      inputs.q[9 * 8] = std::numeric_limits<double>::quiet_NaN();
      EXPECT_EQ(faults(problem, inputs, {.ranks = 3}, {.strategy = strategy}, {}), "");
    }
}

// More keys than a tile, a chunk and a stretch have.
TEST(RankAttention, LongGroups) {
  std::int64_t number = 0;
  for (const Strategy strategy : {Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather})
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      if (!support::is_taken(number++)) continue;
      Problem problem;
      problem.tokens = 3001;
      problem.heads = 2;
      problem.kv_heads = 1;
      problem.head_dim = 16;
      problem.dtype = dtype;
      problem.causal = strategy == Strategy::ring;
      problem.pattern = make_pattern(Preset::longnet, {700, 3001}, {1, 2}, 2);
      problem = resolve(problem);
      EXPECT_EQ(faults(problem, draw_inputs(problem, 5), {.ranks = 3}, {.strategy = strategy, .slot_bytes = 100'000},
                       {.options = {.threads = 2, .instruction_set = ""}}),
                "");
    }
}

std::vector<std::uint64_t> bits_of(const reference::Result& result) {
  std::vector<std::uint64_t> bits;
  for (const auto* tensor : {&result.out, &result.lse, &result.dq, &result.dk, &result.dv})
    for (const double x : *tensor) bits.push_back(std::isnan(x) ? 1 : std::bit_cast<std::uint64_t>(x));
  return bits;
}

RC_GTEST_PROP(RankAttentionProperty, ReproducibleBitsAreThoseOfOneRank, ()) {
  const Problem problem = support::draw_problem(60, 20);
  const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  const Sharding sharding = support::draw_sharding(problem.tokens, 8);
  const RankOptions options{.reproducible = true};
  Way way = support::draw_way();
  const RankResult many = compute_on_ranks(problem, inputs, sharding, options, way);
  const std::string fault = many.fault + Yardstick(problem, inputs).faults(many.result);
  if (!fault.empty()) RC_FAIL(fault + support::describe(problem) + support::describe(sharding, options));
  RC_ASSERT(many.planned == many.counted);
  way.options.threads = static_cast<int>(draw_between(1, 3));
  const RankResult one = compute_on_ranks(problem, inputs, {.ranks = 1}, options, way);
  if (bits_of(one.result) != bits_of(many.result))
    RC_FAIL("other bits in " + support::describe(problem) + support::describe(sharding, options));
}

TEST(RankAttention, ReproducibleBitsOfLongGroups) {
  std::int64_t number = 0;
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const bool causal : {false, true}) {
      if (!support::is_taken(number++)) continue;
      Problem problem;
      problem.tokens = 2777;
      problem.heads = 2;
      problem.kv_heads = 1;
      problem.head_dim = 24;
      problem.dtype = dtype;
      problem.causal = causal;
      problem.documents = {0, 300, 2777};
      problem.pattern = make_pattern(Preset::longnet, {700, 2777}, {1, 2}, 2);
      problem = resolve(problem);
      const Inputs inputs = draw_inputs(problem, 7);
      const auto bits = [&](int ranks, Layout layout) {
        return bits_of(compute_on_ranks(problem, inputs, {.ranks = ranks, .layout = layout}, {.reproducible = true},
                                        {.options = {.threads = 2, .instruction_set = ""}})
                           .result);
      };
      const auto want = bits(1, Layout::contiguous);
      for (const int ranks : {2, 3, 8})
        for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped})
          EXPECT_TRUE(bits(ranks, layout) == want) << ranks << " ranks, " << name(layout);
    }
}

// Every rank has all queries and gets all of out, lse and dq; dk and dv are those of its own keys.
std::string replicated_faults(const Problem& problem, const Inputs& inputs, const Sharding& sharding, const Way& way) {
  auto transports = make_thread_group(sharding.ranks);
  const std::int64_t k_row = problem.kv_heads * problem.head_dim;
  std::vector<reference::Result> results(static_cast<std::size_t>(sharding.ranks));
  std::vector<std::string> faults(results.size());
  const auto errors = support::run_ranks(sharding.ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    Transport& transport = *transports[r];
    const RankAttention attention(problem, sharding, transport,
                                  {.device = way.options, .strategy = Strategy::replicated});
    const support::ShardOfVector shard(attention.positions(), problem.batch, problem.tokens);
    support::Call all(problem, inputs, way);
    Problem local = problem;
    local.tokens = attention.rows();
    const std::vector<double> nothing(
        static_cast<std::size_t>(local.batch * local.tokens * local.heads * local.head_dim));
    support::Call own(
        local, {.q = nothing, .k = shard.take(inputs.k, k_row), .v = shard.take(inputs.v, k_row), .dout = {}}, way);
    ForwardArgs forward = all.forward_args();
    forward.k = own.k.view();
    forward.v = own.v.view();
    attention.forward(forward);
    BackwardArgs backward = all.backward_args();
    backward.k = own.k.view();
    backward.v = own.v.view();
    backward.dk = own.dk.view();
    backward.dv = own.dv.view();
    attention.backward(backward);
    faults[r] =
        all.out.faults("out") + all.lse.faults() + all.dq.faults("dq") + own.dk.faults("dk") + own.dv.faults("dv");
    RankTraffic planned;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      planned.sent_bytes += attention.traffic(pass).sent_bytes;
      planned.received_bytes += attention.traffic(pass).received_bytes;
    }
    if (!(planned == RankTraffic{transport.sent_bytes(), transport.received_bytes()}))
      faults[r] += "other bytes than planned";
    results[r] = {
        .out = all.out.read(), .lse = all.lse.read(), .dq = all.dq.read(), .dk = own.dk.read(), .dv = own.dv.read()};
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  reference::Result whole = results.front();
  whole.dk.resize(inputs.k.size());
  whole.dv.resize(inputs.v.size());
  std::string text;
  for (std::size_t r = 0; r < results.size(); ++r) {
    const support::ShardOfVector shard(support::positions_of(sharding, problem.tokens, static_cast<int>(r)),
                                       problem.batch, problem.tokens);
    shard.put(results[r].dk, k_row, whole.dk);
    shard.put(results[r].dv, k_row, whole.dv);
    text += faults[r];
  }
  for (reference::Result& result : results) {
    result.dk = result.dv = {};
    if (bits_of(result) != bits_of(results.front())) text += "ranks differ; ";
  }
  return text + Yardstick(problem, inputs).faults(whole);
}

RC_GTEST_PROP(RankAttentionProperty, ReplicatedQueries, ()) {
  Problem problem = support::draw_problem(60, 20);
  problem.pattern.gradient = Gradient::exact;
  const Sharding sharding = support::draw_sharding(problem.tokens, 6);
  const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  const std::string fault = replicated_faults(problem, inputs, sharding, support::draw_way());
  if (!fault.empty())
    RC_FAIL(fault + " in " + support::describe(problem) +
            support::describe(sharding, {.strategy = Strategy::replicated}));
}

}  // namespace
}  // namespace annulus
