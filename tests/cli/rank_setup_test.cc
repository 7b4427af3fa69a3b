// Options of ranks: what they become, how a limit is kept, and what is foretold without running.
#include "cli/rank_setup.h"

#include <gtest/gtest.h>
#include <CLI/CLI.hpp>

#include "annulus/errors.h"
#include "annulus/rendezvous.h"
#include "cli/matrix_picture.h"
#include "cli/prediction.h"

namespace annulus::cli {
namespace {

CommandOptions parse(std::vector<std::string> words) {
  CLI::App app;
  CommandOptions options;
  add_options(app, options, {.tokens = "4096", .segments = "256,4096", .dilations = "1,2"});
  std::reverse(words.begin(), words.end());  // CLI11 takes them last first
  app.parse(words);
  return options;
}

Problem problem_of(const CommandOptions& options) { return make_problem(options.problem, typed_sizes(options)); }

RankSetup setup_of(const std::vector<std::string>& words, int ranks) {
  const CommandOptions options = parse(words);
  return make_rank_setup(options, problem_of(options), launch_threads(ranks));
}

std::string refusal(const std::vector<std::string>& words, int ranks) {
  try {
    (void)setup_of(words, ranks);
    (void)make_group_options(parse(words), 1);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

#define EXPECT_PART(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(RankSetup, OptionsBecomeASharding) {
  EXPECT_EQ(setup_of({}, 4).sharding.boundaries, (std::vector<std::int64_t>{0, 1024, 2048, 3072, 4096}));
  EXPECT_EQ(setup_of({"--layout", "striped"}, 3).sharding.layout, Layout::striped);
  EXPECT_EQ(setup_of({"--boundaries", "0,1k,1k,4k"}, 3).sharding.boundaries,
            (std::vector<std::int64_t>{0, 1024, 1024, 4096}));
  EXPECT_NE(setup_of({}, 2).options.strategy, Strategy::automatic);
  EXPECT_EQ(setup_of({"--strategy", "ring"}, 2).options.strategy, Strategy::ring);
  EXPECT_EQ(setup_of({"--slot-size", "1M"}, 2).options.slot_bytes, 1 << 20);
  EXPECT_TRUE(setup_of({"--reproducible"}, 2).options.reproducible);
  EXPECT_EQ(make_group_options(parse({"--timeout", "2.5"}), 1).timeout, std::chrono::milliseconds(2500));
}

TEST(RankSetup, BadValuesAreRefusedWithRuleValueAndRemedy) {
  EXPECT_PART(refusal({"--layout", "spiral"}, 2), "contiguous, zigzag, striped; got 'spiral'");
  EXPECT_PART(refusal({"--strategy", "magic"}, 2), "exchange");
  EXPECT_PART(refusal({"--strategy", "magic"}, 2), "'magic'");
  EXPECT_PART(refusal({"--boundaries", "0,4096"}, 2), "boundaries of 2 ranks are 3 numbers; got 2");
  EXPECT_PART(refusal({"--boundaries", "0,9,4095"}, 2), "tokens = 4096; got 0 to 4095");
  EXPECT_PART(refusal({"--boundaries", "0,9,8,4096"}, 3), "must not fall; got 9 before 8");
  EXPECT_PART(refusal({"--boundaries", "0,9,4096", "--layout", "zigzag"}, 2), "leave them out");
  EXPECT_PART(refusal({"--slot-size", "0"}, 2), "--slot-size must be at least 1; got 0");
  EXPECT_PART(refusal({"--memory-limit", "0"}, 2), "--memory-limit must be at least 1; got 0");
  EXPECT_PART(refusal({"--timeout", "0"}, 2), "--timeout must lie in [0.1, 1000000] seconds; got 0");
}

// What a rank is foretold to hold is what the library says when it really runs.
TEST(Prediction, IsTheLibrarysOwnWord) {
  const CommandOptions options = parse({"--heads", "4"});
  const Problem problem = problem_of(options);
  const RankSetup setup = make_rank_setup(options, problem, launch_threads(3));
  run_ranks(launch_threads(3), {}, [&](Rank& rank) {
    const RankAttention attention(problem, setup.sharding, rank.transport, setup.options);
    const Prediction foretold = predict(problem, setup.sharding, rank.index(), setup.options);
    EXPECT_EQ(foretold.rows, attention.rows());
    EXPECT_EQ(foretold.forward, attention.memory(Pass::forward));
    EXPECT_EQ(foretold.backward, attention.memory(Pass::backward));
    EXPECT_EQ(foretold.backward_traffic, attention.traffic(Pass::backward));
    EXPECT_EQ(predict_sent_bytes(problem, setup.sharding, rank.index(), setup.options.strategy, true),
              foretold.sent_bytes(true));
    return kRight;
  });
}

TEST(Prediction, SlotsShrinkToKeepALimit) {
  const CommandOptions options =
      parse({"--tokens", "64k", "--segments", "64k", "--dilations", "1", "--heads", "4", "--strategy", "exchange"});
  const Problem problem = problem_of(options);
  const RankSetup setup = make_rank_setup(options, problem, launch_threads(4));
  const Prediction free = predict(problem, setup.sharding, 1, setup.options);
  EXPECT_EQ(fit_slots(problem, setup.sharding, 1, setup.options, {}, true, free.bytes(true)).slot_bytes,
            setup.options.slot_bytes);
  const Fit tight = fit_slots(problem, setup.sharding, 1, setup.options, {}, true, free.bytes(true) * 9 / 10);
  EXPECT_LT(tight.slot_bytes, setup.options.slot_bytes);
  EXPECT_GT(tight.slot_bytes, 0);
  EXPECT_LE(tight.bytes, free.bytes(true) * 9 / 10);
  const Fit never = fit_slots(problem, setup.sharding, 1, setup.options, {}, true, 1000);
  EXPECT_EQ(never.slot_bytes, 0);
  EXPECT_GT(never.bytes, 1000);
  EXPECT_LT(never.bytes, free.bytes(true));
}

// Classes that are dealt out are held whole; keys that are exchanged come slot by slot.
TEST(RankSetup, AutoExchangesWhereDealingOutDoesNotFit) {
  const std::vector<std::string> words = {"--tokens", "64k", "--segments", "64k", "--dilations", "1", "--heads", "4"};
  const RankSetup free = make_rank_setup(parse(words), problem_of(parse(words)), launch_threads(4));
  ASSERT_EQ(strategy_text(free), "reshard");
  const std::int64_t needs = predict(problem_of(parse(words)), free.sharding, 1, free.options).bytes(false);
  const auto limited = [&](std::int64_t limit, const Launch& launch = launch_threads(4)) {
    std::vector<std::string> more = words;
    more.insert(more.end(), {"--memory-limit", std::to_string(limit)});
    return make_rank_setup(parse(more), problem_of(parse(more)), launch);
  };
  EXPECT_EQ(strategy_text(limited(2 * needs)), "reshard");
  const RankSetup tight = limited(needs * 9 / 10);
  EXPECT_EQ(strategy_text(tight), "exchange");
  Launch met = launch_threads(4);
  met.transport = "tcp";
  met.rendezvous = "file:x";
  RankOptions one_thread = free.options;
  one_thread.device.threads = 1;
  std::int64_t least = 0;  // with the smallest slots
  for (int rank = 0; rank < 4; ++rank)
    least = std::max(least, fit_slots(problem_of(parse(words)), free.sharding, rank, one_thread, {}, false, 1).bytes);
  EXPECT_EQ(strategy_text(limited(least)), "reshard");
  EXPECT_EQ(strategy_text(limited(least - 1)), "exchange");
  EXPECT_EQ(strategy_text(limited(least + tcp_staging_bytes(4), met)), "reshard");
  EXPECT_EQ(strategy_text(limited(least + tcp_staging_bytes(4) - 1, met)), "exchange") << "what messages take counts";
  EXPECT_NE(tight.choice.why.find("memory limit"), std::string::npos) << tight.choice.why;
}

TEST(Prediction, TotalsOfASampleAreEstimates) {
  EXPECT_EQ(traffic_of({10, 20}, 2).total, 30);
  EXPECT_EQ(traffic_of({10, 20}, 4).total, 60);
  EXPECT_EQ(traffic_of({10, 20}, 4).largest, 20);
}

TEST(MatrixPicture, DarkerForMore) {
  EXPECT_EQ(matrix_picture({{0, {0, 100}}, {1, {1, 0}}}),
            "who sends to whom: from rank (down) to ranks 0 to 1 (across), ██ is up to 100 B\n"
            "  0 │  ██│\n"
            "  1 │··  │\n");
  EXPECT_EQ(matrix_picture({{0, {0, 0}}, {1, {0, 0}}}), "nobody sends anything\n");
  EXPECT_NE(matrix_picture({{0, std::vector<std::int64_t>(1000, 5)}}).find("several a column"), std::string::npos);
}

}  // namespace
}  // namespace annulus::cli
