#include "transport/vigil.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace annulus {
namespace {

using namespace std::chrono_literals;
using Finding = Vigil::Finding;

constexpr Vigil::Time kStart{1000s};
constexpr std::array kPeer1{1};
constexpr std::array kBoth{1, 2};

TEST(Vigil, SilenceCountsFromTheBeginningOfTheWait) {
  Vigil vigil(3, 8s);
  vigil.hear(1, kStart - 100s);
  vigil.begin(kStart);
  EXPECT_EQ(vigil.judge(kPeer1, kStart + 1s).finding, Finding::patience);
  EXPECT_EQ(vigil.judge(kPeer1, kStart + 2s).finding, Finding::slow);
  EXPECT_EQ(vigil.judge(kPeer1, kStart + 7s).finding, Finding::patience);  // named once is enough
  const auto verdict = vigil.judge(kPeer1, kStart + 8s);
  EXPECT_EQ(verdict.finding, Finding::silent);
  EXPECT_EQ(verdict.peer, 1);
  EXPECT_EQ(verdict.time, 8s);
}

TEST(Vigil, WhoComputesAndIsHeardIsWaitedFor) {
  Vigil vigil(3, 8s);
  vigil.begin(kStart);
  int warnings = 0;
  for (auto now = kStart; now < kStart + 1h; now += 1s) {
    vigil.hear(1, {.waiting = false}, now);
    const auto verdict = vigil.judge(kPeer1, now);
    ASSERT_TRUE(verdict.finding == Finding::patience || verdict.finding == Finding::slow);
    warnings += verdict.finding == Finding::slow;
  }
  EXPECT_EQ(warnings, 1);
}

TEST(Vigil, WhoWaitsIsNotCalledSlow) {
  Vigil vigil(3, 8s);
  vigil.begin(kStart);
  for (auto now = kStart; now < kStart + 1h; now += 1s) {
    vigil.hear(1, {.waiting = true, .waits_for = 2, .still = 0s}, now);  // whom it waits for computes
    ASSERT_EQ(vigil.judge(kPeer1, now).finding, Finding::patience);
  }
}

TEST(Vigil, OneSilentPeerAmongOthersIsFound) {
  Vigil vigil(3, 8s);
  vigil.begin(kStart);
  for (auto now = kStart; now < kStart + 8s; now += 1s) {
    vigil.hear(1, Report{}, now);
    vigil.moved(now);
    ASSERT_NE(vigil.judge(kBoth, now).finding, Finding::silent);
  }
  EXPECT_EQ(vigil.judge(kBoth, kStart + 8s).peer, 2);
}

TEST(Vigil, WhoHasLeftIsNotWaitedFor) {
  Vigil vigil(3, 8s);
  vigil.leave(2);
  vigil.begin(kStart);
  EXPECT_EQ(vigil.judge(kPeer1, kStart).finding, Finding::patience);
  const auto verdict = vigil.judge(kBoth, kStart);
  EXPECT_EQ(verdict.finding, Finding::left);
  EXPECT_EQ(verdict.peer, 2);
}

TEST(Vigil, AsksOnceAndAgainAfterTheAnswer) {
  Vigil vigil(2, 8s);
  vigil.begin(kStart);
  EXPECT_FALSE(vigil.ask(1, kStart + 500ms));
  EXPECT_TRUE(vigil.ask(1, kStart + 1s));
  EXPECT_FALSE(vigil.ask(1, kStart + 5s));
  vigil.hear(1, Report{}, kStart + 5s);
  EXPECT_FALSE(vigil.ask(1, kStart + 5500ms));
  EXPECT_TRUE(vigil.ask(1, kStart + 6s));
}

// A message may take longer than the deadline: its pieces are signs of life.
TEST(Vigil, WhoseBytesComeIsAlive) {
  Vigil vigil(2, 8s);
  vigil.begin(kStart);
  auto now = kStart;
  for (; now < kStart + 1h; now += 1s) {
    vigil.moved(now);
    vigil.hear(1, now);
    ASSERT_EQ(vigil.judge(kPeer1, now).finding, Finding::patience);
  }
  EXPECT_EQ(vigil.judge(kPeer1, now + 7s).finding, Finding::silent);
}

TEST(Vigil, AsksWhoIsSilentWhileOthersMove) {
  Vigil vigil(3, 8s);
  vigil.begin(kStart);
  for (auto now = kStart; now <= kStart + 1s; now += 100ms) {
    vigil.moved(now);
    vigil.hear(1, now);
    EXPECT_FALSE(vigil.ask(1, now));
    EXPECT_EQ(vigil.ask(2, now), now == kStart + 1s);
  }
}

// Ranks that wait for one another in a circle or in a chain, talking once a second with a delay.
class Circle {
 public:
  explicit Circle(int size) : size_(size) {
    for (int i = 0; i < size; ++i) vigils_.emplace_back(size, 8s).begin(kStart);
  }

  // Rank i waits for i + 1; ranks in `computing` do not wait, ranks in `silent` say nothing.
  void talk(Vigil::Time now, std::vector<int> computing, std::vector<int> silent) {
    const auto among = [](const std::vector<int>& ranks, int rank) { return std::ranges::count(ranks, rank) > 0; };
    std::vector<Report> reports;
    for (int i = 0; i < size_; ++i) {
      const std::array next{(i + 1) % size_};
      reports.push_back(among(computing, i) ? Report{} : vigil(i).report(next, 0, now - 300ms));
    }
    for (int i = 0; i < size_; ++i) {
      const int next = (i + 1) % size_;
      if (!among(silent, next)) vigil(i).hear(next, reports[static_cast<std::size_t>(next)], now);
    }
  }

  Vigil& vigil(int rank) { return vigils_[static_cast<std::size_t>(rank)]; }
  Vigil::Verdict judge(int rank, Vigil::Time now) {
    const std::array next{(rank + 1) % size_};
    return vigil(rank).judge(next, now);
  }

 private:
  int size_;
  std::vector<Vigil> vigils_;
};

TEST(Vigil, ACircleOfWaitingRanksEnds) {
  Circle ranks(4);
  auto now = kStart;
  const auto stuck = [&] { return ranks.judge(0, now).finding == Finding::stuck; };
  while (!stuck() && now < kStart + 1h) ranks.talk(now += 1s, {}, {});
  EXPECT_GE(now, kStart + 10s);  // a quarter more than the timeout
  EXPECT_LE(now, kStart + 20s);
}

TEST(Vigil, AChainThatEndsInAComputingRankDoesNot) {
  Circle ranks(4);
  for (auto now = kStart; now < kStart + 1h; now += 1s) {
    ranks.talk(now, {3}, {});
    for (int rank = 0; rank < 2; ++rank) ASSERT_EQ(ranks.judge(rank, now).finding, Finding::patience) << rank;
    const auto verdict = ranks.judge(2, now).finding;
    ASSERT_TRUE(verdict == Finding::patience || verdict == Finding::slow);
  }
}

TEST(Vigil, TheEndOfTheChainFindsTheSilentRankFirst) {
  Circle ranks(4);
  for (auto now = kStart; now < kStart + 8s; now += 1s) {
    ranks.talk(now, {3}, {3});
    for (int rank = 0; rank < 3; ++rank) {
      const auto finding = ranks.judge(rank, now).finding;
      ASSERT_TRUE(finding == Finding::patience || finding == Finding::slow) << rank;
    }
  }
  ranks.talk(kStart + 8s, {3}, {3});
  EXPECT_EQ(ranks.judge(0, kStart + 8s).finding, Finding::patience);
  EXPECT_EQ(ranks.judge(1, kStart + 8s).finding, Finding::patience);
  EXPECT_EQ(ranks.judge(2, kStart + 8s).finding, Finding::silent);
}

}  // namespace
}  // namespace annulus
