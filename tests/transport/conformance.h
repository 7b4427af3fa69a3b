// What every transport must do, run on each of them: exchanges, collectives, counters. Faults: conformance_faults.h.
//
// A test is one function that runs on every rank. Sizes and contents of all messages follow from a seed, so each rank
// knows what it must get without being told.
#pragma once

#include <gtest/gtest.h>

#include <thread>

#include "support/refusal.h"
#include "transport/payload.h"
#include "transport/ranks.h"

namespace annulus {

using namespace std::chrono_literals;

// Which ranks send how much to which, in one step.
class Traffic {
 public:
  Traffic(int size, std::uint64_t seed, std::int64_t step, std::int64_t most_bytes)
      : size_(size), key_(seed * 1'000'003 + static_cast<std::uint64_t>(step)) {
    std::mt19937_64 random(key_);
    const auto draw = [&](std::int64_t low, std::int64_t high) {
      return std::uniform_int_distribution<std::int64_t>(low, high)(random);
    };
    const std::int64_t silent_third = draw(0, 2);  // a third of the steps has many empty messages
    for (int i = 0; i < size * size; ++i) {
      const bool empty = draw(0, 2) < (silent_third == 0 ? 2 : 1);
      bytes_.push_back(empty ? 0 : draw(1, draw(0, 4) == 0 ? most_bytes : std::min<std::int64_t>(most_bytes, 3000)));
    }
  }

  std::int64_t bytes(int from, int to) const { return bytes_[static_cast<std::size_t>(from * size_ + to)]; }
  std::uint64_t key(int from, int to) const { return key_ * 4096 + static_cast<std::uint64_t>(from * size_ + to); }
  std::int64_t sent(int rank) const {
    std::int64_t sum = 0;
    for (int to = 0; to < size_; ++to) sum += to == rank ? 0 : bytes(rank, to);
    return sum;
  }
  std::int64_t received(int rank) const {
    std::int64_t sum = 0;
    for (int from = 0; from < size_; ++from) sum += from == rank ? 0 : bytes(from, rank);
    return sum;
  }

 private:
  int size_;
  std::uint64_t key_;
  std::vector<std::int64_t> bytes_;
};

// One rank's part of a step: its memory, its exchange, and whether what it got is right.
class Part {
 public:
  Part(const Traffic& traffic, int rank, int size, std::int64_t step) : traffic_(traffic), rank_(rank) {
    exchange = {.plan = 77, .step = step, .sends = {}, .receives = {}};
    for (int peer = 0; peer < size; ++peer) {
      const auto& message = sent_.emplace_back(traffic.key(rank, peer), traffic.bytes(rank, peer));
      auto& buffer = received_.emplace_back(static_cast<std::size_t>(traffic.bytes(peer, rank)) + kGuard, kUntouched);
      exchange.sends.push_back({.peer = peer, .blocks = message.blocks()});
      exchange.receives.push_back({.peer = peer, .bytes = std::span(buffer).first(buffer.size() - kGuard)});
    }
  }

  void check() const {
    for (std::size_t peer = 0; peer < received_.size(); ++peer) {
      const std::span buffer(received_[peer]);
      const std::uint64_t key = traffic_.key(static_cast<int>(peer), rank_);
      EXPECT_EQ(first_wrong(buffer.first(buffer.size() - kGuard), key), -1)
          << "rank " << rank_ << " from rank " << peer << ", step " << exchange.step << ", " << buffer.size() - kGuard
          << " bytes";
      for (const std::byte byte : buffer.last(kGuard)) EXPECT_EQ(byte, kUntouched);
    }
  }

  Exchange exchange;

 private:
  static constexpr std::size_t kGuard = 8;
  static constexpr std::byte kUntouched{0x5a};

  Traffic traffic_;
  int rank_;
  std::vector<ScatteredMessage> sent_;
  std::vector<Bytes> received_;
};

class Conformance : public ::testing::TestWithParam<RanksParam> {
 protected:
  void SetUp() override {
    if (const std::string missing = GetParam().missing(); !missing.empty()) GTEST_SKIP() << missing;
    ranks_ = GetParam().make();
  }
  int size() const { return ranks_->size(); }

  void run(const TransportOptions& options, const std::function<void(Transport&)>& body) {
    ranks_->run(options, [&](std::unique_ptr<Transport> transport) { body(*transport); });
  }

  std::unique_ptr<Ranks> ranks_;
};

TEST_P(Conformance, RanksKnowWhoTheyAre) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(size()));
  run({}, [&](Transport& transport) {
    EXPECT_EQ(transport.size(), size());
    ASSERT_GE(transport.rank(), 0);
    ASSERT_LT(transport.rank(), size());
    EXPECT_EQ(++seen[static_cast<std::size_t>(transport.rank())], 1);
    EXPECT_FALSE(transport.name().empty());
    EXPECT_GE(transport.staging_bytes(), 0);
  });
}

TEST_P(Conformance, RandomExchanges) {
  run({}, [&](Transport& transport) {
    std::int64_t sent = 0, received = 0;
    for (std::int64_t step = 0; step < 60; ++step) {
      const Traffic traffic(size(), 1, step, step % 10 == 9 ? 5'000'000 : 40'000);
      Part part(traffic, transport.rank(), size(), step);
      transport.post(part.exchange);
      sent += traffic.sent(transport.rank());
      EXPECT_EQ(transport.sent_bytes(), sent);
      if (step % 3 == 1)
        while (!transport.poll()) std::this_thread::yield();
      transport.wait();
      received += traffic.received(transport.rank());
      EXPECT_EQ(transport.received_bytes(), received);
      part.check();
    }
  });
}

// The same plan twice, as forward after forward: ranks without traffic to each other may be far apart.
TEST_P(Conformance, StepsRepeatAndRanksRunAhead) {
  run({}, [&](Transport& transport) {
    const int next = (transport.rank() + 1) % size();
    const int previous = (transport.rank() + size() - 1) % size();
    for (int pass = 0; pass < 50; ++pass) {
      if (transport.rank() == 0 && pass % 10 == 0) std::this_thread::sleep_for(5ms);
      for (std::int64_t step = 0; step < 3; ++step) {
        const auto key = [&](int from) { return static_cast<std::uint64_t>(pass * 1000 + step * 100 + from); };
        const Bytes out = payload(key(transport.rank()), 500);
        Bytes in(step == 1 ? 0 : 500);
        Exchange exchange{.plan = 5, .step = step, .sends = {}, .receives = {}};
        if (step != 1) exchange.sends = {{.peer = next, .blocks = {{.data = out.data(), .run_bytes = 500}}}};
        if (step != 1) exchange.receives = {{.peer = previous, .bytes = in}};
        transport.post(exchange);
        transport.wait();
        EXPECT_EQ(first_wrong(in, key(previous)), -1) << "pass " << pass << ", step " << step;
      }
    }
  });
}

TEST_P(Conformance, LargeMessages) {
  constexpr std::int64_t kBytes = (std::int64_t{70} << 20) + 12345;
  run({}, [&](Transport& transport) {
    const int rank = transport.rank(), last = size() - 1;
    Exchange exchange{.plan = 8, .step = 0, .sends = {}, .receives = {}};
    // Rank 0 sends to the last rank, in rows of 1000 bytes of every second row; the last rank a little to all.
    constexpr std::int64_t kRow = 1000, kRows = kBytes / kRow;
    Bytes memory(rank == 0 ? 2 * kBytes : 0);
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = payload_byte(3, i / (2 * kRow) * kRow + i % kRow);
    if (rank == 0)
      exchange.sends.push_back(
          {.peer = last,
           .blocks = {{.data = memory.data(), .axes = {{{1, 0}, {1, 0}, {1, 0}, {kRows, 2 * kRow}}}, .run_bytes = kRow},
                      {.data = memory.data() + kRows * 2 * kRow, .run_bytes = kBytes % kRow}}});
    Bytes large(rank == last ? static_cast<std::size_t>(kBytes) : 0);
    if (rank == last) exchange.receives.push_back({.peer = 0, .bytes = large});
    transport.post(exchange);
    transport.wait();
    EXPECT_EQ(first_wrong(large, 3), -1);
  });
}

// A rank that has waited may be silent for as long as it likes: what it sent is not in its hands any more.
TEST_P(Conformance, WhatWasWaitedForMovesOnItsOwn) {
  if (size() == 1) GTEST_SKIP() << "one rank has nobody to send to";
  constexpr std::int64_t kBytes = (std::int64_t{32} << 20) + 11;
  Bytes sent(static_cast<std::size_t>(kBytes));
  run({}, [&](Transport& transport) {  // which may take longer than the deadline below
    for (std::size_t i = 0; i < sent.size() && transport.rank() == 0; ++i) sent[i] = payload_byte(5, i);
  });
  run({.timeout = 1s}, [&](Transport& transport) {
    const int last = size() - 1;
    Exchange exchange{.plan = 9, .step = 0, .sends = {}, .receives = {}};
    Bytes memory(transport.rank() == last ? static_cast<std::size_t>(kBytes) : 0);
    if (transport.rank() == 0) {
      exchange.sends.push_back({.peer = last, .blocks = {{.data = sent.data(), .run_bytes = kBytes}}});
    } else if (transport.rank() == last) {
      exchange.receives.push_back({.peer = 0, .bytes = memory});
    }
    transport.post(exchange);
    transport.wait();
    if (transport.rank() == 0) std::this_thread::sleep_for(1500ms);
    EXPECT_EQ(transport.rank() == last ? first_wrong(memory, 5) : -1, -1);
  });
}

TEST_P(Conformance, MovesWhileOtherThreadsPoll) {
  run({}, [&](Transport& transport) {
    std::atomic<bool> done{false};
    std::vector<std::thread> helpers;
    for (int i = 0; i < 2; ++i)
      helpers.emplace_back([&] {
        while (!done) {
          transport.poll();
          std::this_thread::sleep_for(100us);
        }
      });
    for (std::int64_t step = 0; step < 20; ++step) {
      Part part(Traffic(size(), 2, step, 300'000), transport.rank(), size(), step);
      transport.post(part.exchange);
      if (step % 2 == 0) std::this_thread::sleep_for(1ms);
      transport.wait();
      part.check();
    }
    done = true;
    for (std::thread& helper : helpers) helper.join();
  });
}

// Nobody waits until all has arrived by polling alone: what a rank needs moves while its peers compute.
TEST_P(Conformance, PollingAloneCompletesAnExchange) {
  run({}, [&](Transport& transport) {
    Part part(Traffic(size(), 3, 0, 8'000'000), transport.rank(), size(), 0);
    EXPECT_TRUE(transport.poll());
    transport.post(part.exchange);
    while (!transport.poll()) std::this_thread::sleep_for(200us);
    part.check();
    transport.wait();
  });
}

TEST_P(Conformance, BlockingMovesEverythingInPost) {
  run({.blocking = true}, [&](Transport& transport) {
    for (std::int64_t step = 0; step < 10; ++step) {
      Part part(Traffic(size(), 4, step, 100'000), transport.rank(), size(), step);
      transport.post(part.exchange);
      EXPECT_TRUE(transport.poll());
      part.check();
      transport.wait();
    }
  });
}

TEST_P(Conformance, AllGather) {
  run({}, [&](Transport& transport) {
    const auto text_of = [&](int rank, int round) {
      if (round == 1 && rank % 2 == 0) return std::string();
      if (round == 2) return std::string();
      const std::size_t repeats = round == 3 ? 10'000 : 1;
      std::string text;
      for (std::size_t i = 0; i < repeats; ++i) text += "rank " + std::to_string(rank * 7 + round) + "\n";
      return text;
    };
    for (int round = 0; round < 4; ++round) {
      const std::vector<std::string> texts = transport.all_gather(text_of(transport.rank(), round));
      ASSERT_EQ(texts.size(), static_cast<std::size_t>(size()));
      for (int rank = 0; rank < size(); ++rank) EXPECT_EQ(texts[static_cast<std::size_t>(rank)], text_of(rank, round));
      Part part(Traffic(size(), 5, round, 1000), transport.rank(), size(), round);
      const std::int64_t sent = transport.sent_bytes(), received = transport.received_bytes();
      transport.post(part.exchange);
      transport.wait();
      part.check();
      const Traffic traffic(size(), 5, round, 1000);
      EXPECT_EQ(transport.sent_bytes() - sent, traffic.sent(transport.rank()));
      EXPECT_EQ(transport.received_bytes() - received, traffic.received(transport.rank()));
    }
  });
}

TEST_P(Conformance, RefusesExchangesThatBreakTheRules) {
  run({}, [&](Transport& transport) {
    Bytes memory(10);
    const StridedBlock block{.data = memory.data(), .run_bytes = 10};
    const auto refused = [&](const Exchange& exchange, const std::vector<std::string>& parts) {
      support::expect_refused([&] { transport.post(exchange); }, parts);
    };
    refused({.sends = {{.peer = size(), .blocks = {block}}}}, {"send", "rank " + std::to_string(size())});
    refused({.receives = {{.peer = -1, .bytes = memory}}}, {"receive", "rank -1"});
    refused({.sends = {{.peer = 0, .blocks = {block}}, {.peer = 0, .blocks = {block}}}},
            {"at most one send", "rank 0"});
    refused({.receives = {{.peer = 0, .bytes = memory}, {.peer = 0, .bytes = memory}}}, {"at most one receive"});
    refused({.step = 4, .sends = {{.peer = transport.rank(), .blocks = {block}}}}, {"10 bytes", "0 bytes", "step 4"});
    refused({.step = -2}, {"-2"});
    // None of that did any harm.
    Part part(Traffic(size(), 6, 0, 1000), transport.rank(), size(), 0);
    transport.post(part.exchange);
    transport.wait();
    part.check();
  });
}

}  // namespace annulus
