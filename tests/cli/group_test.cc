// Ranks of a command as threads: what they know of each other, and how they fail together.
#include "cli/group.h"

#include <gtest/gtest.h>

#include <csignal>

#include "cli/collection.h"
#include "kernels/thread_pool.h"

namespace annulus::cli {
namespace {

using namespace std::chrono_literals;

TEST(Group, EveryRankRunsAndTheLargestCodeCounts) {
  std::atomic<int> ran = 0;
  const int code = run_ranks(launch_threads(5), {}, [&](Rank& rank) {
    ++ran;
    EXPECT_EQ(rank.neighbours.on_cores, 5);
    EXPECT_EQ(rank.neighbours.is_first, rank.index() == 0);
    EXPECT_EQ(rank.default_threads(), std::max(1, usable_cores() / 5));
    rank.meet();
    return rank.index() == 3 ? kWrongResult : kRight;
  });
  EXPECT_EQ(ran, 5);
  EXPECT_EQ(code, kWrongResult);
}

TEST(Group, TheCauseDecidesTheExitCode) {
  const auto fails = [](int culprit, auto error) {
    try {
      run_ranks(launch_threads(3), {}, [&](Rank& rank) {
        if (rank.index() == culprit) throw error;
        rank.meet();
        return kRight;
      });
    } catch (const Reported& reported) {
      return reported.code;
    }
    return -1;
  };
  testing::internal::CaptureStderr();
  EXPECT_EQ(fails(1, InvalidArgument("a bad size")), kBadUsage);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(text, "annulus: rank 1: a bad size\n");  // the others only heard of it
  EXPECT_EQ(fails(2, OutOfMemory("none left")), kEnvironment);
}

TEST(Group, ALoneRankFailsWithItsOwnException) {
  EXPECT_THROW(run_ranks(launch_threads(1), {}, [](Rank&) -> int { throw InvalidArgument("a bad size"); }),
               InvalidArgument);
}

TEST(Group, WhoIsBusyIsNotLost) {
  const int code = run_ranks(launch_threads(3), {.timeout = 400ms}, [](Rank& rank) {
    rank.busy([&] {
      if (rank.index() == 1) std::this_thread::sleep_for(1500ms);
    });
    rank.meet();
    return kRight;
  });
  EXPECT_EQ(code, kRight);
}

TEST(Group, WhoSleepsIsLostAndNamed) {
  testing::internal::CaptureStderr();
  EXPECT_THROW(run_ranks(launch_threads(3), {.timeout = 400ms},
                         [](Rank& rank) {
                           if (rank.index() == 1) std::this_thread::sleep_for(1500ms);
                           rank.meet();
                           return kRight;
                         }),
               Reported);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("rank 1 is lost"), std::string::npos);
}

TEST(Group, ASignalEndsAllRanks) {
  testing::internal::CaptureStderr();
  try {
    run_ranks(launch_threads(3), {}, [](Rank& rank) {
      rank.meet();
      if (rank.index() == 0) std::raise(SIGTERM);
      for (;;) rank.meet();
      return kRight;
    });
    ADD_FAILURE() << "went on";
  } catch (const Reported& reported) {
    EXPECT_EQ(reported.code, kEnvironment);
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find("told to stop"), std::string::npos);
  EXPECT_EQ(run_ranks(launch_threads(2), {}, [](Rank&) { return kRight; }), kRight);  // and a new group can begin
}

TEST(Group, TextsComeTogetherOnRankZero) {
  run_ranks(launch_threads(4), {}, [](Rank& rank) {
    const std::string own(static_cast<std::size_t>(rank.index() * 100'000), static_cast<char>('a' + rank.index()));
    const std::vector<std::string> texts = collect_texts(rank.transport, own);
    EXPECT_EQ(texts.size(), rank.reports() ? 4u : 0u);
    for (std::size_t i = 0; i < texts.size(); ++i)
      EXPECT_EQ(texts[i], std::string(i * 100'000, static_cast<char>('a' + i)));
    return kRight;
  });
}

// Tensors [outer, tokens, inner], some larger than what moves at a time.
TEST(Group, TensorsComeTogetherInGlobalOrder) {
  struct Case {
    std::int64_t outer, tokens, inner;
  };
  for (const Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped})
    for (const auto& [outer, tokens, inner] : {Case{1, 10, 3}, {6, 7, 1}, {3, 300'001, 2}, {2, 2, 5}, {0, 5, 5}})
      run_ranks(launch_threads(3), {}, [&, outer = outer, tokens = tokens, inner = inner](Rank& rank) {
        const auto shards = shard_maps(resolve(Sharding{.ranks = 3, .layout = layout}, tokens), tokens);
        const ShardMap& own = shards[static_cast<std::size_t>(rank.index())];
        std::vector<std::int64_t> part;
        own.for_each_row(0, outer * own.rows(), [&](std::int64_t, std::int64_t there) {
          for (std::int64_t e = 0; e < inner; ++e) part.push_back(there * inner + e);
        });
        std::vector<std::int64_t> whole;
        collect(rank.transport, shards, {reinterpret_cast<const std::byte*>(part.data()), outer, inner * 8},
                [&](std::span<const std::byte> bytes) {
                  const auto* values = reinterpret_cast<const std::int64_t*>(bytes.data());
                  whole.insert(whole.end(), values, values + bytes.size() / 8);
                });
        EXPECT_EQ(whole.size(), rank.reports() ? static_cast<std::size_t>(outer * tokens * inner) : 0u);
        for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(whole[i], static_cast<std::int64_t>(i));
        return kRight;
      });
}

}  // namespace
}  // namespace annulus::cli
