#include "plan/choice.h"

#include <algorithm>
#include <optional>

#include "annulus/errors.h"
#include "annulus/problem.h"
#include "numeric/size.h"
#include "plan/parcel.h"
#include "plan/phase.h"
#include "plan/reshard.h"
#include "plan/shard.h"

namespace annulus {
namespace {

constexpr std::int64_t kMostUnits = 4096;  // of a segment: more of them are a plan that takes long to make

Cost cost_of(const Problem& problem, const Sharding& sharding, Strategy strategy, const Rates& rates) {
  const double flop = 4.0 * static_cast<double>(problem.head_dim) * count_pairs(problem) / sharding.ranks;
  Cost cost{.strategy = strategy};
  for (const int rank : sample_ranks(sharding, problem.tokens)) {
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
  for (const int rank : sample_ranks(sharding, problem.tokens))
    most = std::max(most, received_bytes(alone, make_rank_plan(alone, sharding, Strategy::exchange, rank)));
  return most;
}

// Of any segment of the branch.
std::int64_t most_units(const Problem& problem, std::size_t branch) {
  std::int64_t units = 0;
  for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head)
    for (const Takers& takers : takers_of(problem, static_cast<int>(branch), kv_head))
      units = std::min(units + std::min(takers.classes.count, kMostUnits + 1), kMostUnits + 1);  // r may be 2^63 - 1
  return units;
}

// What a rank receives in forward when the branch is dealt out: rows that go out and results that come home.
std::int64_t reshard_bytes(const Problem& problem, const Sharding& sharding, std::size_t branch) {
  std::vector<bool> only(problem.pattern.branches.size(), false);
  only[branch] = true;
  const std::int64_t vector = problem.head_dim * size_of(problem.dtype);
  std::int64_t most = 0;
  for (const int rank : sample_ranks(sharding, problem.tokens)) {
    const std::vector<Rows> pieces = pieces_of(sharding, problem.tokens, rank);
    std::int64_t bytes = 0;
    for (const Unit& unit : units_of(problem, shared_segments_of(problem, sharding, only, rank))) {
      const auto heads = static_cast<std::int64_t>(unit.heads.size());
      std::int64_t own = 0;
      for (const Rows& piece : pieces) own += intersect(unit.rows, piece).count;
      bytes += unit.computer == rank ? (unit.rows.count - own) * (heads + 2) * vector
                                     : own * heads * (problem.head_dim * 4 + 4);
    }
    most = std::max(most, bytes * problem.batch);
  }
  return most;
}

// Units are dealt out one by one: there must be enough of them to keep all ranks of a segment busy to the end.
bool deals_evenly(const Problem& problem, const Sharding& sharding, std::size_t branch) {
  std::vector<bool> only(problem.pattern.branches.size(), false);
  only[branch] = true;
  for (const int rank : sample_ranks(sharding, problem.tokens))
    for (const SharedSegment& segment : shared_segments_of(problem, sharding, only, rank)) {
      const auto units = units_of(problem, {segment}).size(), ranks = segment.ranks.size();
      const auto turns = (units + ranks - 1) / ranks;  // of the busiest rank
      if (4 * turns * ranks > 5 * units) return false;
    }
  return true;
}

std::string branch_reason(const BranchChoice& choice, std::int64_t exchange, std::int64_t reshard, bool one_rank,
                          bool is_uneven) {
  if (one_rank) return "one rank has all keys";
  if (exchange == 0) return "every key that a query sees lies on its own rank";
  if (choice.strategy == Strategy::reshard)
    return "dealing out classes moves " + format_bytes(reshard) + ", exchanging keys " + format_bytes(exchange) +
           (reshard < exchange ? "" : "; whole classes are computed faster");
  if (choice.strategy == Strategy::exchange)
    return format_bytes(exchange) + " of keys and values reach over shards" +
           (reshard > 0 ? "; dealing out classes would move " + format_bytes(reshard) : "") +
           (is_uneven ? ", but leave ranks idle" : "");
  if (choice.strategy == Strategy::replicated) return "every rank attends all queries to its own keys";
  return format_bytes(exchange) + " would do; " + std::string(name(choice.strategy)) + " moves whole shards";
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
  choice.strategy = wanted == Strategy::automatic ? choice.costs.front().strategy
                    : wanted == Strategy::reshard ? Strategy::exchange
                                                  : wanted;
  choice.why = wanted == Strategy::automatic ? "" : "asked for; ";
  for (const Cost& cost : choice.costs)
    choice.why += (&cost == &choice.costs.front() ? "" : ", ") + std::string(name(cost.strategy)) + " receives " +
                  format_bytes(cost.received_bytes) + " in " + std::to_string(cost.messages) + " messages";
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const bool can_deal = can_reshard(problem, sharding) && choice.strategy == Strategy::exchange &&
                          (wanted == Strategy::reshard || most_units(problem, i) <= kMostUnits);
    const std::int64_t exchange = branch_bytes(problem, sharding, i);
    const std::int64_t reshard = can_deal && exchange > 0 ? reshard_bytes(problem, sharding, i) : 0;
    // Fewer bytes win, on slow links and on fast ones (docs/running-on-a-cluster.md), when all ranks get as much to do.
    const bool pays = reshard < exchange || rates.favours_whole_groups;
    const bool may_deal = wanted == Strategy::automatic && can_deal && exchange > 0 && pays;
    const bool deals = wanted == Strategy::reshard || (may_deal && deals_evenly(problem, sharding, i));
    BranchChoice branch{deals ? Strategy::reshard : choice.strategy, deals ? reshard : exchange, ""};
    branch.why = branch_reason(branch, exchange, reshard, sharding.ranks == 1, may_deal && !deals);
    choice.branches.push_back(std::move(branch));
  }
  return choice;
}

RankOptions with_strategies(RankOptions options, const Problem& problem, const Sharding& sharding, const Rates& rates) {
  const std::size_t count = problem.pattern.branches.size();
  if (options.branches.empty()) {
    if (options.strategy == Strategy::automatic || options.strategy == Strategy::reshard) {
      const Choice choice = choose_strategy(problem, sharding, options.strategy, rates);
      options.strategy = choice.strategy;
      for (const BranchChoice& branch : choice.branches) options.branches.push_back(branch.strategy);
    } else {
      options.branches.assign(count, options.strategy);
    }
  } else if (options.branches.size() != count) {
    throw InvalidArgument("strategies of branches must be one a branch; got " +
                          std::to_string(options.branches.size()) + " for " + std::to_string(count) +
                          " branches: give as many, or none");
  }
  bool deals = false;
  std::optional<Strategy> other;
  for (const Strategy strategy : options.branches) {
    if (strategy == Strategy::reshard) {
      deals = true;
      continue;
    }
    if (strategy == Strategy::automatic || (other && *other != strategy))
      throw InvalidArgument("branches that are not resharded must share one strategy; got " +
                            std::string(name(strategy)) + ": use the same for all of them");
    other = strategy;
  }
  if (deals && other == Strategy::replicated)
    throw InvalidArgument("replicated queries serve all branches or none; got reshard for some: use one of the two");
  options.strategy = other.value_or(Strategy::exchange);
  if (deals && sharding.ranks > 1 && !can_reshard(problem, sharding))
    throw Unsupported(
        "reshard needs contiguous or zigzag shards, the exact gradient and no padding like torchscale's; got another "
        "problem: use exchange");
  return options;
}

bool queries_travel(const Problem& problem, const Sharding& sharding, Strategy strategy) {
  if (strategy != Strategy::exchange || has_branch_deltas(problem) || sharding.ranks == 1) return false;
  // How far segments reach beyond a shard. Where none does, what hangs over decides, in all branches alike.
  std::vector<double> beyond;
  const double shard = static_cast<double>(problem.tokens) / sharding.ranks;
  for (const Branch& branch : problem.pattern.branches)
    beyond.push_back(branch.head_count == 0
                         ? 0
                         : std::max(static_cast<double>(std::min(branch.segment, problem.tokens)) - shard, 0.0));
  if (std::all_of(beyond.begin(), beyond.end(), [](double rows) { return rows == 0; })) beyond.assign(beyond.size(), 1);
  // Rows of heads that travel, all branches together.
  const auto rows_of_heads = [&](const Problem& packed_as) {
    double sum = 0;
    for (std::size_t i = 0; i < packed_as.pattern.branches.size(); ++i) {
      const auto dilation = static_cast<double>(packed_as.pattern.branches[i].dilation);
      for (std::int64_t head = 0; head < packed_as.kv_heads; ++head)
        for (const Takers& takers : takers_of(packed_as, static_cast<int>(i), head))
          sum += beyond[i] * static_cast<double>(takers.classes.count) / dilation;
    }
    return sum;
  };
  const auto dim = static_cast<double>(problem.head_dim);
  const auto size = static_cast<double>(size_of(problem.dtype));
  return rows_of_heads(problem_of_queries(problem)) * (2 * dim * size + 8 + 4 * dim) <
         rows_of_heads(problem) * (2 * dim * size + 8 * dim);
}

}  // namespace annulus
