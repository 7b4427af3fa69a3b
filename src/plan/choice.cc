#include "plan/choice.h"

#include <algorithm>
#include <set>

#include "annulus/problem.h"

namespace annulus {
namespace {

// Ranks that stand for all: the ends, their neighbours and the middle. (A cost model of 1,024 ranks must not make 1,024
// plans.)
std::set<int> sample_ranks(int ranks) {
  std::set<int> sample;
  for (const int rank : {0, 1, ranks / 2 - 1, ranks / 2, ranks - 2, ranks - 1})
    if (rank >= 0 && rank < ranks) sample.insert(rank);
  return sample;
}

std::string mebibytes(std::int64_t bytes) {
  const auto tenths = static_cast<std::int64_t>(static_cast<double>(bytes) / 1048576.0 * 10.0 + 0.5);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

Cost cost_of(const Problem& problem, const Sharding& sharding, Strategy strategy, const Rates& rates) {
  const double flop = 4.0 * static_cast<double>(problem.head_dim) * count_pairs(problem) / sharding.ranks;
  Cost cost{.strategy = strategy};
  for (const int rank : sample_ranks(sharding.ranks)) {
    const RankPlan plan = make_rank_plan(problem, sharding, strategy, rank);
    const std::int64_t bytes = received_bytes(problem, plan);
    std::int64_t messages = 0;
    for (const Step& step : plan.steps) messages += static_cast<std::int64_t>(step.receives.size());
    cost.received_bytes = std::max(cost.received_bytes, bytes);
    cost.messages = std::max(cost.messages, messages);
    // Gather computes nothing while everything moves, but for the rank's own keys.
    const double hidden = flop / rates.flop_per_s / (strategy == Strategy::gather ? sharding.ranks : 1);
    const double moving =
        static_cast<double>(bytes) / rates.bytes_per_s + static_cast<double>(messages) * rates.message_s;
    cost.exposed_s = std::max(cost.exposed_s, std::max(moving - hidden, 0.0));
  }
  return cost;
}

std::int64_t branch_bytes(const Problem& problem, const Sharding& sharding, std::size_t branch) {
  Problem alone = problem;
  alone.pattern.branches = {problem.pattern.branches[branch]};
  std::int64_t most = 0;
  for (const int rank : sample_ranks(sharding.ranks))
    most = std::max(most, received_bytes(alone, make_rank_plan(alone, sharding, Strategy::exchange, rank)));
  return most;
}

std::string branch_reason(Strategy strategy, std::int64_t bytes, bool one_rank) {
  if (one_rank) return "one rank has all keys";
  if (bytes == 0) return "every key that a query sees lies on its own rank";
  if (strategy == Strategy::exchange) return mebibytes(bytes) + " of keys and values reach over shards";
  return mebibytes(bytes) + " would do; " + std::string(name(strategy)) + " moves whole shards";
}

}  // namespace

Choice choose_strategy(const Problem& problem, const Sharding& sharding, Strategy wanted, const Rates& rates) {
  Choice choice;
  for (const Strategy strategy : {Strategy::exchange, Strategy::ring, Strategy::gather})
    choice.costs.push_back(cost_of(problem, sharding, strategy, rates));
  // What computes behind the transfers may hide all of them; then fewer bytes leave the network to others.
  std::stable_sort(choice.costs.begin(), choice.costs.end(), [](const Cost& a, const Cost& b) {
    return std::pair(a.exposed_s, a.received_bytes) < std::pair(b.exposed_s, b.received_bytes);
  });
  choice.strategy = wanted == Strategy::automatic ? choice.costs.front().strategy : wanted;
  choice.why = wanted == Strategy::automatic ? "" : "asked for; ";
  for (const Cost& cost : choice.costs)
    choice.why += (&cost == &choice.costs.front() ? "" : ", ") + std::string(name(cost.strategy)) + " receives " +
                  mebibytes(cost.received_bytes) + " in " + std::to_string(cost.messages) + " messages";
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const std::int64_t bytes = branch_bytes(problem, sharding, i);
    choice.branches.push_back({choice.strategy, bytes, branch_reason(choice.strategy, bytes, sharding.ranks == 1)});
  }
  return choice;
}

}  // namespace annulus
