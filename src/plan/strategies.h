// One planner a strategy, each in a file of its own; and what they share.
#pragma once

#include <utility>
#include <vector>

#include "plan/rank_plan.h"

namespace annulus {

// A planner fills in the steps of one rank.
std::vector<Step> plan_exchange(const Problem& problem, const Sharding& sharding, int rank, Cargo cargo);
std::vector<Step> plan_ring(const Problem& problem, const Sharding& sharding, int rank);
std::vector<Step> plan_gather(const Problem& problem, const Sharding& sharding, int rank);

// The rank `distance` places behind or ahead on the circle.
inline int behind(int rank, int distance, int ranks) { return (rank - distance % ranks + ranks) % ranks; }
inline int ahead(int rank, int distance, int ranks) { return (rank + distance) % ranks; }

inline void add_message(std::vector<Message>& messages, int peer, std::vector<Parcel> parcels) {
  if (!parcels.empty()) messages.push_back({peer, std::move(parcels)});
}

inline std::vector<Parcel> whole_shard(const Problem& problem, const Sharding& sharding, int owner) {
  std::vector<Parcel> parcels;
  for (const Rows& piece : pieces_of(sharding, problem.tokens, owner))
    parcels.push_back({.owner = owner, .rows = piece});
  return parcels;
}

}  // namespace annulus
