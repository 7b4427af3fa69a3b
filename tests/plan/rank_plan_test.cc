// All p plans of a problem, made in one process: every pair is computed exactly once, every send has its receive, no
// byte too many.
#include "plan/rank_plan.h"

#include <map>
#include <set>
#include <tuple>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "plan/phase.h"
#include "plan/plan.h"
#include "support/describe.h"
#include "support/draw_case.h"
#include "support/draw_sharding.h"

namespace annulus {
namespace {

using support::draw_between;
using support::draw_sharding;
using Pair = std::tuple<std::int64_t, std::int64_t, int, std::int64_t>;  // query, key, branch, head

struct Whole {
  const Problem& problem;
  Plan plan = make_plan(problem);

  // Pairs of one rank's queries with the keys of one parcel, found in the packed parcel.
  void count(const std::vector<Rows>& pieces, const Parcel& parcel, std::map<Pair, int>& pairs) const {
    const auto places = ParcelReader(problem).places(parcel);
    for (const Task& task : plan.tasks) {
      if (parcel.branch != kEveryBranch && parcel.branch != task.branch) continue;
      const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation;
      for (std::int64_t head = 0; head < problem.heads; ++head) {
        const Classes classes = classes_of(problem, task.branch, head);
        for (std::int64_t s = 0; s < task.count; ++s)
          for (std::int64_t c = classes.first; c < std::min(classes.first + classes.count, task.length); ++c) {
            const Rows group = task.rows(s, c, dilation);
            const auto kv_head = static_cast<std::size_t>(head / (problem.heads / problem.kv_heads));
            const Place keys = find(places[kv_head], c, group);
            for (const Rows& piece : pieces) {
              const Rows queries = intersect(group, piece);
              for (std::int64_t q = 0; q < queries.count; ++q)
                for (std::int64_t k = 0; k < keys.rows.count; ++k)
                  if (!problem.causal || keys.rows[k] <= queries[q])
                    ++pairs[{queries[q], keys.rows[k], task.branch, head}];
            }
          }
      }
    }
  }

  std::map<Pair, int> pairs() const {
    std::map<Pair, int> result;
    count({{0, 1, problem.tokens}}, {.owner = 0, .rows = {0, 1, problem.tokens}}, result);
    return result;
  }

  std::map<Pair, int> pairs_of(const RankPlan& rank_plan, int rank) const {
    std::map<Pair, int> result;
    for (const Rows& piece : rank_plan.pieces) count(rank_plan.pieces, {.owner = rank, .rows = piece}, result);
    for (const Step& step : rank_plan.steps)
      for (const Message& message : step.receives)
        for (const Parcel& parcel : message.parcels) count(rank_plan.pieces, parcel, result);
    return result;
  }
};

std::vector<RankPlan> all_plans(const Problem& problem, const Sharding& sharding, Strategy strategy,
                                Cargo cargo = Cargo::keys) {
  std::vector<RankPlan> plans;
  for (int rank = 0; rank < sharding.ranks; ++rank)
    plans.push_back(make_rank_plan(problem, sharding, strategy, rank, cargo));
  return plans;
}

RC_GTEST_PROP(RankPlanProperty, EveryPairIsComputedOnce, ()) {
  const Problem problem = support::draw_problem(24, 1);
  const Sharding sharding = draw_sharding(problem.tokens, 6);
  const Whole whole{problem};
  const std::map<Pair, int> want = whole.pairs();
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::gather}) {
    std::map<Pair, int> got;
    const std::vector<RankPlan> plans = all_plans(problem, sharding, strategy);
    for (int rank = 0; rank < sharding.ranks; ++rank)
      for (const auto& [pair, count] : whole.pairs_of(plans[static_cast<std::size_t>(rank)], rank)) got[pair] += count;
    if (got != want)
      RC_FAIL(std::string(name(strategy)) + " on " + std::to_string(sharding.ranks) + " ranks, " +
              std::string(name(sharding.layout)) + ": " + support::describe(problem));
  }
}

using Traffic = std::map<std::tuple<std::size_t, int, int>, std::vector<Parcel>>;  // by step, source, destination

void add_messages(Traffic& traffic, std::size_t step, int rank, bool sends, const std::vector<Message>& messages) {
  for (const Message& message : messages)
    RC_ASSERT(
        traffic.try_emplace({step, sends ? rank : message.peer, sends ? message.peer : rank}, message.parcels).second);
}

void check_messages(const std::vector<RankPlan>& plans) {
  Traffic sent, received, returned, come_home;
  for (std::size_t rank = 0; rank < plans.size(); ++rank) {
    const auto& steps = plans[rank].steps;
    RC_ASSERT(steps.size() == plans[0].steps.size());
    RC_ASSERT(steps[0].sends.empty());
    RC_ASSERT(steps[0].receives.empty());
    for (std::size_t s = 0; s < steps.size(); ++s) {
      add_messages(sent, s, static_cast<int>(rank), true, steps[s].sends);
      add_messages(received, s, static_cast<int>(rank), false, steps[s].receives);
      add_messages(returned, s, static_cast<int>(rank), true, steps[s].returns);
      add_messages(come_home, s, static_cast<int>(rank), false, steps[s].homecomings);
    }
  }
  RC_ASSERT(sent == received);
  RC_ASSERT(returned == come_home);
}

RC_GTEST_PROP(RankPlanProperty, EverySendHasItsReceive, ()) {
  const Problem problem = support::draw_problem(40, 2);
  const Sharding sharding = draw_sharding(problem.tokens, 6);
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::gather})
    check_messages(all_plans(problem, sharding, strategy));
  check_messages(all_plans(problem, sharding, Strategy::exchange, Cargo::queries));
}

// Exchange moves exactly the key rows that some query of the receiver can see. (Causal parcels end at the last query of
// any class, which may let in one row a class that nobody sees; striped shards travel whole.)
RC_GTEST_PROP(RankPlanProperty, ExchangeMovesNothingThatIsNotSeen, ()) {
  Problem problem = support::draw_problem(24, 1);
  problem.causal = false;
  Sharding sharding = draw_sharding(problem.tokens, 6);
  if (sharding.layout == Layout::striped)
    sharding = resolve({.ranks = sharding.ranks, .layout = Layout::zigzag, .boundaries = {}}, problem.tokens);
  const Whole whole{problem};
  const ParcelReader reader(problem);
  for (int rank = 0; rank < sharding.ranks; ++rank) {
    const RankPlan plan = make_rank_plan(problem, sharding, Strategy::exchange, rank);
    for (const Step& step : plan.steps)
      for (const Message& message : step.receives)
        for (const Parcel& parcel : message.parcels) {
          const std::int64_t dilation = problem.pattern.branches[static_cast<std::size_t>(parcel.branch)].dilation;
          std::int64_t queries = 0;
          for (const Rows& piece : plan.pieces)
            queries =
                std::max(queries, cut(piece, parcel.segment_begin, parcel.segment_begin + parcel.segment_length).count);
          if (queries < dilation) continue;
          std::map<Pair, int> pairs;
          whole.count(plan.pieces, parcel, pairs);
          std::set<std::pair<std::int64_t, std::int64_t>> seen;  // key, kv head
          for (const auto& [pair, count] : pairs)
            seen.emplace(std::get<1>(pair), std::get<3>(pair) / (problem.heads / problem.kv_heads));
          RC_ASSERT(static_cast<std::int64_t>(seen.size()) == reader.vectors(parcel));
        }
  }
}

TEST(RankPlan, NestedSegmentsMoveNothing) {
  Problem problem;
  problem.tokens = 1 << 20;
  problem.heads = problem.kv_heads = 16;
  problem.pattern = make_pattern(Preset::longnet, {2048, 8192, 32768}, {1, 2, 4}, 16);
  problem = resolve(problem);
  const Sharding sharding = resolve({.ranks = 8, .layout = Layout::contiguous, .boundaries = {}}, problem.tokens);
  for (int rank = 0; rank < 8; ++rank)
    EXPECT_EQ(received_bytes(problem, make_rank_plan(problem, sharding, Strategy::exchange, rank)), 0);
}

TEST(RankPlan, BytesOfALongBranch) {
  // One class a head: 2 (w - L) H D e / r bytes for a segment over all ranks, 2 (p - 1) L H D e for the ring.
  Problem problem;
  problem.tokens = 1 << 16;
  problem.heads = problem.kv_heads = 16;
  problem.head_dim = 64;
  problem.pattern = make_pattern(Preset::longnet, {2048, 1 << 16}, {1, 16}, 16);
  problem = resolve(problem);
  const Sharding sharding = resolve({.ranks = 8, .layout = Layout::contiguous, .boundaries = {}}, problem.tokens);
  const std::int64_t length = problem.tokens / 8, element_bytes = 4;
  for (int rank = 0; rank < 8; ++rank) {
    const auto bytes = [&](Strategy strategy) {
      return received_bytes(problem, make_rank_plan(problem, sharding, strategy, rank));
    };
    EXPECT_EQ(bytes(Strategy::exchange), 2 * (problem.tokens - length) * 16 * 64 * element_bytes / 16);
    EXPECT_EQ(bytes(Strategy::ring), 2 * 7 * length * 16 * 64 * element_bytes);
    EXPECT_EQ(bytes(Strategy::gather), bytes(Strategy::ring));
  }
}

TEST(RankPlan, NamesRoundTrip) {
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::gather})
    EXPECT_EQ(parse_strategy(name(strategy)), strategy);
  EXPECT_THROW(parse_strategy("teleport"), InvalidArgument);
}

std::size_t size_of_plan(const RankPlan& plan) {
  std::size_t bytes = plan.steps.size() * sizeof(Step);
  for (const Step& step : plan.steps)
    for (const auto* messages : {&step.sends, &step.receives, &step.returns, &step.homecomings})
      for (const Message& message : *messages) bytes += sizeof(Message) + message.parcels.size() * sizeof(Parcel);
  return bytes;
}

// A billion tokens on 1,024 ranks, the longest segment over all of them: the plan of a rank stays small, however long
// the sequence is. (How long planning takes, `annulus plan` says.)
TEST(RankPlan, SizeDoesNotGrowWithTokens) {
  for (const bool causal : {false, true})
    for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::gather}) {
      std::vector<std::size_t> sizes;
      for (const std::int64_t tokens : {std::int64_t{1} << 24, std::int64_t{1} << 30}) {
        Problem problem;
        problem.tokens = tokens;
        problem.heads = problem.kv_heads = 16;
        problem.head_dim = 64;
        problem.causal = causal;
        problem.pattern =
            make_pattern(Preset::longnet, {2048, 32768, 1 << 20, 1 << 25, tokens}, {1, 4, 16, 64, 256}, 16);
        problem = resolve(problem);
        const Sharding sharding = resolve({.ranks = 1024}, tokens);
        sizes.push_back(size_of_plan(make_rank_plan(problem, sharding, strategy, 700)));
      }
      EXPECT_LT(sizes[1], std::size_t{1} << 20) << name(strategy);
      EXPECT_LE(sizes[1], sizes[0] + sizes[0] / 2) << name(strategy);
    }
}

}  // namespace
}  // namespace annulus
