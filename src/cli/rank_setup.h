// Ranks as the options describe them, for one problem: who has which rows, how they meet, with what memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "annulus/ranks.h"
#include "cli/group.h"
#include "cli/launcher.h"
#include "cli/options.h"
#include "cli/shard_map.h"
#include "plan/choice.h"

namespace annulus::cli {

struct RankSetup {
  Sharding sharding;    // resolved
  Choice choice;        // why the strategy is the one it is
  RankOptions options;  // with that strategy, for every branch
  std::optional<std::int64_t> memory_limit;
};

// Takes a resolved problem. Throws InvalidArgument or Unsupported.
RankSetup make_rank_setup(const CommandOptions& options, const Problem& problem, const Launch& launch);

GroupOptions make_group_options(const CommandOptions& command, std::size_t recorded_events);

Holdings holdings_of(const RankSetup& setup, const Problem& problem);

// "exchange", or where branches differ one name each: "exchange,reshard".
std::string strategy_text(const RankSetup& setup);

// The options of this rank: its threads, its recorder, and slots that keep the limit on every rank. A collective; all
// ranks throw OutOfMemory where the limit cannot be kept.
RankOptions options_of_rank(const RankSetup& setup, const Problem& problem, bool with_backward, Rank& rank);

}  // namespace annulus::cli
