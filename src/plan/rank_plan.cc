#include "plan/rank_plan.h"

#include "plan/names.h"
#include "plan/strategies.h"

namespace annulus {
namespace {

constexpr NameTable<Strategy, 6> kStrategies{{{Strategy::automatic, "auto"},
                                              {Strategy::exchange, "exchange"},
                                              {Strategy::reshard, "reshard"},
                                              {Strategy::ring, "ring"},
                                              {Strategy::gather, "gather"},
                                              {Strategy::replicated, "replicated"}}};

std::vector<Step> make_steps(const Problem& problem, const Sharding& sharding, Strategy strategy, int rank,
                             Cargo cargo) {
  switch (strategy) {
    case Strategy::automatic:
    case Strategy::replicated:
      break;                 // the one is resolved long before, the other moves no keys
    case Strategy::reshard:  // what it leaves over
    case Strategy::exchange:
      return plan_exchange(problem, sharding, rank, cargo);
    case Strategy::ring:
      return plan_ring(problem, sharding, rank);
    case Strategy::gather:
      return plan_gather(problem, sharding, rank);
  }
  return {};
}

std::int64_t message_bytes(const ParcelReader& reader, const std::vector<Message>& messages) {
  std::int64_t bytes = 0;
  for (const Message& message : messages)
    for (const Parcel& parcel : message.parcels) bytes += reader.bytes(parcel);
  return bytes;
}

}  // namespace

std::string_view name(Strategy strategy) { return find_name(kStrategies, strategy); }
Strategy parse_strategy(std::string_view text) { return find_value(kStrategies, "the strategy", text); }

RankPlan make_rank_plan(const Problem& problem, const Sharding& sharding, Strategy strategy, int rank, Cargo cargo) {
  return {pieces_of(sharding, problem.tokens, rank), make_steps(problem, sharding, strategy, rank, cargo)};
}

std::int64_t received_bytes(const Problem& problem, const RankPlan& plan) {
  const ParcelReader reader(problem);
  std::int64_t bytes = 0;
  for (const Step& step : plan.steps) bytes += message_bytes(reader, step.receives);
  return bytes;
}

std::int64_t sent_bytes(const Problem& problem, const RankPlan& plan) {
  const ParcelReader reader(problem);
  std::int64_t bytes = 0;
  for (const Step& step : plan.steps) bytes += message_bytes(reader, step.sends);
  return bytes;
}

}  // namespace annulus
