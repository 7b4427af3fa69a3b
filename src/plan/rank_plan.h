// The plan of one rank among p: what it sends and receives, step by step. Plain data from a pure function, so that all
// p plans can be made and checked in one process.
//
// In step 0 a rank attends to its own keys. What step i > 0 receives has arrived before its keys are attended to, while
// step i - 1 is computed. All ranks have the same number of steps, and what one sends in a step the other receives in
// it. In backward, gradients of what a step received are handed back to their owner.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/problem.h"
#include "plan/parcel.h"
#include "plan/shard.h"

namespace annulus {

// What travels: keys and values to the queries that see them, or, in backward, queries to the keys that they see.
enum class Cargo { keys, queries };

struct Message {
  int peer = 0;
  std::vector<Parcel> parcels;  // one behind the other

  bool operator==(const Message&) const = default;
};

// At most one message a peer in each list.
struct Step {
  std::vector<Message> sends;
  std::vector<Message> receives;
  std::vector<Message> returns;      // backward: gradients of what was received, to its owners
  std::vector<Message> homecomings;  // backward: gradients of what this rank sent, from those who used it
};

struct RankPlan {
  std::vector<Rows> pieces;  // of this rank
  std::vector<Step> steps;
};

// Takes a resolved problem and a resolved sharding.
// Queries travel by exchange alone.
RankPlan make_rank_plan(const Problem& problem, const Sharding& sharding, Strategy strategy, int rank,
                        Cargo cargo = Cargo::keys);

// Bytes of keys and values that a rank receives or sends.
std::int64_t received_bytes(const Problem& problem, const RankPlan& plan);
std::int64_t sent_bytes(const Problem& problem, const RankPlan& plan);

}  // namespace annulus
