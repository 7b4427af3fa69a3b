// A rank that throws, hangs up or falls silent at any step of forward or backward: the others hear of it, by name,
// soon, and the process goes on to start a new group.
#include <gtest/gtest.h>

#include "reference/draw_inputs.h"
#include "support/faulty_transport.h"
#include "support/rank_call.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using namespace std::chrono_literals;
using support::Fault;
using support::FaultyTransport;

constexpr int kRanks = 3;

Problem spread_problem() {
  Problem problem;
  problem.tokens = 90;
  problem.heads = 2;
  problem.head_dim = 8;
  problem.pattern = make_pattern(Preset::longnet, {90, 40}, {1, 2}, 2);
  return resolve(problem);
}

struct Outcome {
  std::vector<std::string> errors;  // of each rank; "" when it got through
  std::vector<int> calls, last_posts;
  std::chrono::steady_clock::duration time{};
};

Outcome run(Strategy strategy, Fault fault, int broken_rank, int at) {
  const Problem problem = spread_problem();
  const reference::Inputs inputs = reference::draw_inputs(problem, 3);
  const Sharding sharding = resolve({.ranks = kRanks}, problem.tokens);
  std::vector<std::unique_ptr<FaultyTransport>> transports;
  for (auto& transport : make_thread_group(kRanks, {.timeout = 500ms})) {
    const bool broken = transport->rank() == broken_rank;
    transports.push_back(std::make_unique<FaultyTransport>(std::move(transport), broken ? fault : Fault::none, at));
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = support::run_ranks(kRanks, [&](int rank) {
    support::Way way;
    way.options.threads = 1;
    compute_shard(problem, inputs, sharding, *transports[static_cast<std::size_t>(rank)],
                  {.strategy = strategy, .slot_bytes = 3000}, way);
  });
  Outcome outcome{{}, {}, {}, std::chrono::steady_clock::now() - begin};
  for (const std::exception_ptr& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
      outcome.errors.emplace_back();
    } catch (const std::exception& caught) {
      outcome.errors.emplace_back(caught.what());
    }
  }
  for (const auto& transport : transports) {
    outcome.calls.push_back(transport->calls());
    outcome.last_posts.push_back(transport->last_post());
  }
  return outcome;
}

TEST(Faults, AtEveryCallOfEveryStrategy) {
  for (const Strategy strategy : {Strategy::exchange, Strategy::reshard, Strategy::ring, Strategy::gather}) {
    const Outcome sound = run(strategy, Fault::none, 0, 0);
    for (const std::string& error : sound.errors) ASSERT_EQ(error, "");
    for (const Fault fault : {Fault::throws, Fault::leaves})
      for (int rank = 0; rank < kRanks; ++rank)
        for (int at = 0; at < sound.calls[static_cast<std::size_t>(rank)]; ++at) {
          const Outcome outcome = run(strategy, fault, rank, at);
          const std::string where = std::string(name(strategy)) + ", rank " + std::to_string(rank) + ", call " +
                                    std::to_string(at) + (fault == Fault::throws ? ", throws" : ", leaves");
          EXPECT_NE(outcome.errors[static_cast<std::size_t>(rank)], "") << where;
          int others = 0;
          for (int other = 0; other < kRanks; ++other) {
            const std::string& error = outcome.errors[static_cast<std::size_t>(other)];
            if (other == rank || error.empty()) continue;
            ++others;
            EXPECT_NE(error.find("rank " + std::to_string(rank)), std::string::npos) << where << ": " << error;
          }
          // Whoever had all that it needed before may have got through.
          EXPECT_TRUE(others > 0 || at > sound.last_posts[static_cast<std::size_t>(rank)]) << where;
          EXPECT_LT(outcome.time, 10s) << where;
        }
  }
}

// At every other call, so in every step, of forward and backward after which somebody still needs the rank.
TEST(Faults, ARankThatFallsSilentIsNamed) {
  const Outcome sound = run(Strategy::exchange, Fault::none, 0, 0);
  for (int at = 0; at <= sound.last_posts[1]; at += 2) {
    const Outcome outcome = run(Strategy::exchange, Fault::sleeps, 1, at);
    int named = 0;
    for (const int other : {0, 2}) {
      const std::string& error = outcome.errors[static_cast<std::size_t>(other)];
      if (error.find("rank 1") != std::string::npos) ++named;
      EXPECT_TRUE(error.empty() || error.find("rank 1") != std::string::npos) << "call " << at << ": " << error;
    }
    EXPECT_GT(named, 0) << "call " << at;
    EXPECT_LT(outcome.time, 10s) << "call " << at;
  }
}

void expect_refusal(const Problem& problem, const Problem& other, const std::string& difference) {
  auto transports = make_thread_group(kRanks);
  const auto errors = support::run_ranks(kRanks, [&](int rank) {
    const RankAttention attention(rank == 2 ? other : problem, {.ranks = kRanks},
                                  *transports[static_cast<std::size_t>(rank)], {.strategy = Strategy::exchange});
  });
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error) << difference;
    try {
      std::rethrow_exception(error);
    } catch (const TransportError& caught) {
      EXPECT_NE(std::string(caught.what()).find(difference), std::string::npos) << caught.what();
    }
  }
}

TEST(Faults, AnotherProblemOnOneRankIsRefusedByAll) {
  const Problem problem = spread_problem();
  Problem other = problem;
  other.causal = true;
  expect_refusal(problem, other, "'causal = 0' on rank 0 and 'causal = 1' on rank 2");
  // The detached gradient goes round branch by branch: the ranks must agree before they plan for that.
  Problem single = problem;
  single.pattern = make_pattern(Preset::longnet, {90}, {1}, 2);
  other = single;
  other.pattern.gradient = Gradient::detached;
  expect_refusal(resolve(single), resolve(other), "'gradient = exact' on rank 0 and 'gradient = detached' on rank 2");
}

TEST(Faults, BadArgumentsOnOneRankEndTheOthersToo) {
  const Problem problem = spread_problem();
  auto transports = make_thread_group(2);
  const auto errors = support::run_ranks(2, [&](int rank) {
    const RankAttention attention(problem, {.ranks = 2}, *transports[static_cast<std::size_t>(rank)]);
    Problem local = problem;
    local.tokens = attention.rows();
    local.documents = {0, local.tokens};
    support::Call call(local, reference::draw_inputs(local, 1));
    ForwardArgs args = call.forward_args();
    if (rank == 1) args.k.data = nullptr;
    attention.forward(args);
  });
  EXPECT_THROW(std::rethrow_exception(errors[1]), InvalidArgument);
  EXPECT_THROW(std::rethrow_exception(errors[0]), TransportError);
}

}  // namespace
}  // namespace annulus
