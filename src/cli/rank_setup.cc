#include "cli/rank_setup.h"

#include <algorithm>
#include <cmath>

#include "cli/prediction.h"
#include "exec/rates.h"
#include "numeric/size.h"
#include "plan/shard.h"

namespace annulus::cli {
namespace {

constexpr double kMostTimeout = 1e6;

std::int64_t positive_size(const char* option, const std::string& text, const char* remedy) {
  const std::int64_t size = parse_size_option(option, text);
  if (size < 1) throw InvalidArgument(std::string(option) + " must be at least 1; got " + text + ": " + remedy);
  return size;
}

bool fits(const RankSetup& setup, const Problem& problem, bool with_backward, const Staging& staging) {
  // The number of threads is not known here, unless typed; and all ranks, on whatever hosts, must come to the same
  // answer.
  RankOptions options = setup.options;
  if (options.device.threads == 0) options.device.threads = 1;
  return std::ranges::all_of(sample_ranks(setup.sharding, problem.tokens), [&](int rank) {
    return fit_slots(problem, setup.sharding, rank, options, staging, with_backward, *setup.memory_limit).slot_bytes >
           0;
  });
}

// Takes setup.options with the strategy that was asked for, and decides.
void choose(RankSetup& setup, const Problem& problem) {
  const Rates rates = rates_of(setup.options.device);
  setup.choice = choose_strategy(problem, setup.sharding, setup.options.strategy, rates);
  setup.options = with_strategies(setup.options, problem, setup.sharding, rates);
}

}  // namespace

RankSetup make_rank_setup(const CommandOptions& options, const Problem& problem, const Launch& launch) {
  const RankTexts& typed = options.ranks;
  RankSetup setup;
  setup.sharding.ranks = launch.ranks;
  if (typed.layout) setup.sharding.layout = parse_layout(*typed.layout);
  if (typed.boundaries) setup.sharding.boundaries = parse_sizes_option("--boundaries", *typed.boundaries);
  setup.sharding = resolve(std::move(setup.sharding), problem.tokens);
  setup.options.device = make_machine(options.machine);
  if (typed.transport == "nccl" && !uses_gpu(options.machine))
    throw InvalidArgument("--transport nccl moves the memory of GPUs; got it with --device " + options.machine.device +
                          ": use --device cuda, or --transport mpi or tcp");
  setup.options.device.deterministic = options.problem.deterministic;
  setup.options.reproducible = options.problem.reproducible;
  if (typed.strategy) setup.options.strategy = parse_strategy(*typed.strategy);
  if (typed.slot_size)
    setup.options.slot_bytes = positive_size("--slot-size", *typed.slot_size, "leave it out for 32M");
  if (typed.memory_limit)
    setup.memory_limit = positive_size("--memory-limit", *typed.memory_limit, "leave it out for no limit");
  const RankOptions asked = setup.options;
  choose(setup, problem);
  const bool deals = std::ranges::find(setup.options.branches, Strategy::reshard) != setup.options.branches.end();
  if (!setup.memory_limit || asked.strategy != Strategy::automatic || !deals || launch.ranks == 1 ||
      fits(setup, problem, options.problem.backward, staging_of(launch, uses_gpu(options.machine))))
    return setup;
  setup.options = asked;
  setup.options.strategy = Strategy::exchange;
  choose(setup, problem);
  setup.choice.why = "dealing out classes does not keep the memory limit; " + setup.choice.why;
  return setup;
}

Holdings holdings_of(const RankSetup& setup, const Problem& problem) {
  return {setup.sharding, problem.tokens, setup.options.strategy == Strategy::replicated};
}

std::string strategy_text(const RankSetup& setup) {
  const std::vector<Strategy>& branches = setup.options.branches;
  if (std::ranges::all_of(branches, [&](Strategy strategy) { return strategy == branches.front(); }))
    return std::string(name(branches.empty() ? setup.options.strategy : branches.front()));
  std::string text;
  for (const Strategy strategy : branches) text += (text.empty() ? "" : ",") + std::string(name(strategy));
  return text;
}

GroupOptions make_group_options(const CommandOptions& command, std::size_t recorded_events) {
  const RankTexts& typed = command.ranks;
  GroupOptions options;
  options.device = command.machine.device;
  options.blocking = typed.blocking;
  options.recorded_events = recorded_events;
  if (typed.timeout) {
    const double seconds = parse_number_option("--timeout", *typed.timeout);
    if (seconds < 0.1 || seconds > kMostTimeout)
      throw InvalidArgument("--timeout must lie in [0.1, 1000000] seconds; got " + *typed.timeout +
                            ": leave it out for 60");
    options.timeout = std::chrono::milliseconds(std::llround(seconds * 1e3));
  }
  return options;
}

RankOptions options_of_rank(const RankSetup& setup, const Problem& problem, bool with_backward, Rank& rank) {
  RankOptions options = setup.options;
  options.recorder = &rank.recorder;
  if (rank.on_gpu()) options.device.device = rank.device;
  if (options.device.threads == 0) options.device.threads = rank.default_threads();
  if (!setup.memory_limit) return options;

  const std::int64_t of_gpu = rank.transport.device_staging_bytes();
  const Staging staging{rank.transport.staging_bytes() - of_gpu, of_gpu};
  const Fit own =
      fit_slots(problem, setup.sharding, rank.index(), options, staging, with_backward, *setup.memory_limit);
  std::int64_t slots = own.slot_bytes, most = 0;
  int largest = 0;
  const std::vector<std::string> all =
      rank.transport.all_gather(std::to_string(own.slot_bytes) + " " + std::to_string(own.bytes));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto blank = all[i].find(' ');
    const std::int64_t bytes = std::stoll(all[i].substr(blank));
    slots = std::min<std::int64_t>(slots, std::stoll(all[i].substr(0, blank)));
    if (bytes <= most) continue;
    most = bytes;
    largest = static_cast<int>(i);
  }
  if (slots == 0)
    throw OutOfMemory("a rank must stay within --memory-limit " + format_bytes(*setup.memory_limit) + "; rank " +
                      std::to_string(largest) + " needs " + format_bytes(most) + " with " + strategy_text(setup) +
                      " and the smallest slots: give --memory-limit " + std::to_string(most) +
                      ", more ranks or smaller sizes" +
                      (strategy_text(setup).find("reshard") == std::string::npos ? "" : ", or --strategy exchange"));
  options.slot_bytes = slots;
  return options;
}

}  // namespace annulus::cli
