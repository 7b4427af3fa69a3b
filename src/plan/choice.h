// Choice: which strategy `auto` takes, and why. A cost model of the forward pass, the same on all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/rank_plan.h"

namespace annulus {

// What the model assumes of the machine. Ratios decide, so rough numbers do.
struct Rates {
  double flop_per_s = 100e9;
  double bytes_per_s = 10e9;
  double message_s = 20e-6;
  // Groups that lie on one rank are computed several times as fast as groups that meet piece by piece: then dealing out
  // is worth more bytes.
  bool favours_whole_groups = false;
};

struct Cost {
  Strategy strategy = Strategy::exchange;
  std::int64_t received_bytes = 0;  // of the rank that receives most
  std::int64_t messages = 0;        // of the rank that receives most
  double exposed_s = 0;             // transfers that compute does not hide
};

struct BranchChoice {
  Strategy strategy = Strategy::exchange;
  std::int64_t received_bytes = 0;  // by the branch alone, of the rank that receives most
  std::string why;
};

struct Choice {
  Strategy strategy = Strategy::exchange;
  std::string why;
  std::vector<Cost> costs;             // of every strategy, cheapest first
  std::vector<BranchChoice> branches;  // how the chosen one serves each branch
};

// Backward of `exchange`: whether queries go to the keys (q, dout, lse and Delta out, dq home) rather than keys to the
// queries (k and v out, dk and dv home), since that moves fewer bytes. The same on all ranks.
bool queries_travel(const Problem& problem, const Sharding& sharding, Strategy strategy);

// Fills in one strategy a branch, and the one for those that are not dealt out. Throws InvalidArgument or Unsupported.
RankOptions with_strategies(RankOptions options, const Problem& problem, const Sharding& sharding,
                            const Rates& rates = {});

// Takes a resolved problem and a resolved sharding. `wanted` other than automatic is taken, and explained.
Choice choose_strategy(const Problem& problem, const Sharding& sharding, Strategy wanted, const Rates& rates = {});

}  // namespace annulus
