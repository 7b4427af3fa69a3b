// What every transport must do when things go wrong: no rank hangs, every rank gets an error that names the culprit and
// the step, and memory is nobody's but its owner's afterwards. For groups of two ranks or more.
//
// A hang is found by the time limit of the test runner, so nothing here measures time.
#pragma once

#include "transport/conformance.h"

namespace annulus {

class ConformanceFaults : public Conformance {
 protected:
  static constexpr std::chrono::milliseconds kShort{1500};  // long enough for a busy machine, short enough to wait for
  static constexpr int kBytes = 1000;

  // Every rank sends kBytes to the next one, at `step`.
  struct RingStep {
    RingStep(Transport& transport, std::int64_t step, std::uint64_t plan = 9, std::size_t received_bytes = kBytes)
        : out(kBytes), in(received_bytes) {
      const int size = transport.size(), rank = transport.rank();
      exchange = {.plan = plan,
                  .step = step,
                  .sends = {{.peer = (rank + 1) % size, .blocks = {{.data = out.data(), .run_bytes = kBytes}}}},
                  .receives = {{.peer = (rank + size - 1) % size, .bytes = in}}};
    }
    Bytes out, in;
    Exchange exchange;
  };

  static void run_ring(Transport& transport, std::int64_t first, std::int64_t last) {
    for (std::int64_t step = first; step < last; ++step) {
      RingStep ring(transport, step);
      transport.post(ring.exchange);
      transport.wait();
    }
  }

  static void compute_until_it_throws(Transport& transport) {
    for (;;) {
      transport.poll();
      std::this_thread::sleep_for(1ms);
    }
  }

  // f throws, and so does every call after it, with the same words.
  static void expect_failed(Transport& transport, const std::function<void()>& f,
                            const std::vector<std::string>& parts) {
    support::expect_refused_as<TransportError>(f, parts);
    support::expect_refused_as<TransportError>([&] { transport.poll(); }, parts);
    support::expect_refused_as<TransportError>([&] { transport.wait(); }, parts);
    support::expect_refused_as<TransportError>([&] { transport.post({}); }, parts);
    support::expect_refused_as<TransportError>([&] { transport.all_gather("x"); }, parts);
  }
};

TEST_P(ConformanceFaults, SizesThatDisagree) {
  run({.timeout = kShort}, [&](Transport& transport) {
    expect_failed(transport,
                  [&] {
                    run_ring(transport, 0, 3);
                    RingStep ring(transport, 3, 9, transport.rank() == 1 ? 400 : kBytes);
                    transport.post(ring.exchange);
                    transport.wait();
                    run_ring(transport, 4, 100);
                  },
                  {"rank 0 sends 1000 bytes at step 3", "rank 1 expects 400 bytes at step 3"});
  });
}

TEST_P(ConformanceFaults, AnotherPlan) {
  run({.timeout = kShort}, [&](Transport& transport) {
    expect_failed(transport,
                  [&] {
                    RingStep ring(transport, 0, transport.rank() == 0 ? 0xabc : 0xdef);
                    transport.post(ring.exchange);
                    transport.wait();
                    run_ring(transport, 1, 100);
                  },
                  {"disagree", "rank 0", "of plan 0000000000000abc", "of plan 0000000000000def"});
  });
}

TEST_P(ConformanceFaults, AnotherStep) {
  run({.timeout = kShort}, [&](Transport& transport) {
    expect_failed(transport,
                  [&] {
                    run_ring(transport, 0, 2);
                    RingStep ring(transport, transport.rank() == 0 ? 3 : 2);
                    transport.post(ring.exchange);
                    transport.wait();
                    run_ring(transport, 4, 100);
                  },
                  {"disagree", "rank 0", "at step 3", "at step 2"});
  });
}

// Rank 1 has no receive for what rank 0 sends, and goes on to something else. With tokens, rank 0 waits for one of rank
// 1's. Of two ranks that is the one of step 7; of more it may be none: where a link connects ranks when they first
// meet, rank 0 keeps all from step 7, and they find that everybody waits.
TEST_P(ConformanceFaults, AMessageThatNobodyExpects) {
  std::vector<std::string> parts{"rank 0 sends 1000 bytes at step 6", "rank 1 expects 1000 bytes at step 7"};
  if (GetParam().tells_by_tokens) parts = {"at step 6", "all ranks must run the same plan"};
  if (GetParam().tells_by_tokens && size() == 2) parts.insert(parts.end(), {"disagree", "rank 0", "rank 1"});
  run({.timeout = kShort}, [&](Transport& transport) {
    RingStep ring(transport, 6);
    if (transport.rank() == 1) ring.exchange.receives.clear();
    expect_failed(
        transport,
        [&] {
          transport.post(ring.exchange);
          transport.wait();
          run_ring(transport, 7, 100);
        },
        parts);
  });
}

// Everyone expects something and nobody sends: nobody computes, nobody is silent, and still it ends.
TEST_P(ConformanceFaults, EverybodyWaits) {
  run({.timeout = kShort}, [&](Transport& transport) {
    RingStep ring(transport, 2);
    ring.exchange.sends.clear();
    expect_failed(
        transport,
        [&] {
          run_ring(transport, 0, 2);
          transport.post(ring.exchange);
          transport.wait();
        },
        GetParam().tells_by_tokens ? std::vector<std::string>{"at step 2", "rank"}
                                   : std::vector<std::string>{"nothing has moved", "at step 2", "waits for rank"});
  });
}

TEST_P(ConformanceFaults, ARankThatGivesUpWhileOthersWait) {
  const int culprit = size() - 1;
  run({}, [&](Transport& transport) {
    expect_failed(transport,
                  [&] {
                    run_ring(transport, 0, 5);
                    RingStep ring(transport, 5);
                    transport.post(ring.exchange);
                    if (transport.rank() == culprit) transport.abort("no more memory for scores");
                    transport.wait();
                    run_ring(transport, 6, 100);
                  },
                  {"rank " + std::to_string(culprit) + " gave up", "at step 5", "no more memory for scores"});
  });
}

TEST_P(ConformanceFaults, ARankThatGivesUpWhileOthersCompute) {
  run({}, [&](Transport& transport) {
    if (transport.rank() == 0) transport.abort("bad weather");
    expect_failed(transport, [&] { compute_until_it_throws(transport); },
                  {"rank 0 gave up", GetParam().tells_by_tokens ? "" : "before the first step", "bad weather"});
  });
}

TEST_P(ConformanceFaults, ALongReasonIsCutNotLost) {
  run({}, [&](Transport& transport) {
    if (transport.rank() == 0) transport.abort("because " + std::string(100'000, 'x'));
    expect_failed(transport, [&] { run_ring(transport, 0, 10); }, {"rank 0 gave up", "because xxx"});
  });
}

TEST_P(ConformanceFaults, ARankThatIsToldToStop) {
  std::atomic<bool> stop{false};
  run({.stop = &stop}, [&](Transport& transport) {
    expect_failed(transport,
                  [&] {
                    transport.all_gather("");  // all ranks have their transport
                    run_ring(transport, 0, 1);
                    if (transport.rank() == 0) stop = true;
                    run_ring(transport, 1, 100);
                  },
                  {"gave up", "told to stop"});
  });
}

// Whoever waits for a waiting rank must name the one at the end of the chain.
TEST_P(ConformanceFaults, ARankThatNeverComes) {
  const int culprit = size() - 1;
  run({.timeout = kShort}, [&](Transport& transport) {
    expect_failed(transport,
                  [&] {
                    run_ring(transport, 0, 3);
                    if (transport.rank() == culprit) std::this_thread::sleep_for(2 * kShort);
                    run_ring(transport, 3, 100);
                  },
                  {"rank " + std::to_string(culprit) + " is lost", "at step 3", "no sign of life"});
  });
}

TEST_P(ConformanceFaults, ARankThatNeverComesToAllGather) {
  const int culprit = size() - 1;
  run({.timeout = kShort}, [&](Transport& transport) {
    if (transport.rank() == culprit) std::this_thread::sleep_for(2 * kShort);
    expect_failed(transport, [&] { transport.all_gather("problem"); },
                  {"rank " + std::to_string(culprit) + " is lost", "gathered"});
  });
}

// The culprit cannot finish, because the rank before it sends nothing.
TEST_P(ConformanceFaults, ARankThatLeavesWithTransfersUnderWay) {
  const int culprit = size() - 1;
  ranks_->run({}, [&](std::unique_ptr<Transport> transport) {
    const int rank = transport->rank();
    const auto begin = [&] {
      run_ring(*transport, 0, 3);
      RingStep ring(*transport, 3);
      if (rank == culprit - 1) ring.exchange.sends.clear();
      transport->post(ring.exchange);
      if (rank == culprit)
        transport.reset();
      else
        transport->wait();
    };
    if (rank == culprit) return begin();
    expect_failed(
        *transport,
        [&] {
          begin();
          compute_until_it_throws(*transport);
        },
        {"rank " + std::to_string(culprit) + (GetParam().tells_by_tokens ? "" : " left the group"), "at step 3"});
  });
}

TEST_P(ConformanceFaults, ARankThatLeavesEarly) {
  const int culprit = size() - 1;
  // Who only sends to it, and need not wait until that is taken, finds out a step later, if nobody tells it before.
  const std::string place = GetParam().sends_wait ? "at step 3" : "at step ";
  run({}, [&](Transport& transport) {
    if (transport.rank() == culprit) return run_ring(transport, 0, 3);
    expect_failed(transport, [&] { run_ring(transport, 0, 100); },
                  {"rank " + std::to_string(culprit) + " has left the group", place});
  });
}

// Slow is not lost: a rank that polls may compute for longer than the timeout. It is named, and nobody else is: only
// those warn that wait for it, not those that wait for waiting ranks.
TEST_P(ConformanceFaults, ASlowRankFinishesWithAWarning) {
  const int culprit = size() - 1;
  std::mutex mutex;
  std::vector<std::string> warnings;
  const auto warn = [&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
  };
  std::atomic<std::size_t> neighbours{0};  // in this process
  run({.timeout = kShort, .warn = warn}, [&](Transport& transport) {
    const int rank = transport.rank();
    neighbours += rank != culprit && (rank == 0 || (GetParam().sends_wait && rank == culprit - 1));
    run_ring(transport, 0, 2);
    const auto end = std::chrono::steady_clock::now() + kShort * 3 / 2;
    while (rank == culprit && std::chrono::steady_clock::now() < end) {
      transport.poll();
      std::this_thread::sleep_for(2ms);
    }
    run_ring(transport, 2, 4);
  });
  // On a busy machine the culprit's neighbours may be found computing for a moment when they go on, in a later step.
  const std::string name = "rank " + std::to_string(culprit) + " is slow";
  std::size_t of_culprit = 0;
  for (const std::string& warning : warnings) {
    const bool names_it = warning.find(name) != std::string::npos;
    of_culprit += names_it;
    EXPECT_EQ(warning.find("at step 2") != std::string::npos, names_it) << warning;
  }
  EXPECT_EQ(of_culprit, neighbours);
}

// What a rank sends may be freed as soon as its call has thrown, and nobody writes into what it receives.
TEST_P(ConformanceFaults, MemoryIsLeftAloneAfterAFailure) {
  for (int round = 0; round < 8; ++round) {
    run({}, [&](Transport& transport) {
      const int rank = transport.rank(), peer = (rank + 1) % size(), source = (rank + size() - 1) % size();
      constexpr std::size_t kLarge = 8 << 20;
      auto out = std::make_unique<Bytes>(kLarge, std::byte{1});
      auto in = std::make_unique<Bytes>(kLarge, std::byte{2});
      try {
        transport.post({.plan = 4,
                        .step = 0,
                        .sends = {{.peer = peer, .blocks = {{.data = out->data(), .run_bytes = kLarge}}}},
                        .receives = {{.peer = source, .bytes = *in}}});
        for (int i = 0; i < round; ++i) transport.poll();
        if (rank == 0) transport.abort("enough");
        transport.wait();
      } catch (const TransportError&) {  // or all was done before rank 0 gave up
      }
      out.reset();
      std::ranges::fill(*in, std::byte{4});
      std::this_thread::sleep_for(2ms);
      EXPECT_EQ(std::ranges::count(*in, std::byte{4}), static_cast<std::ptrdiff_t>(kLarge));
    });
  }
}

TEST_P(ConformanceFaults, ANewGroupAfterAFailedOne) {
  for (int round = 0; round < 5; ++round) {
    run({}, [&](Transport& transport) {
      if (transport.rank() == round % size()) transport.abort("round " + std::to_string(round));
      expect_failed(transport, [&] { run_ring(transport, 0, 10); }, {"round " + std::to_string(round)});
    });
    run({}, [&](Transport& transport) {
      Part part(Traffic(size(), 7, round, 20'000), transport.rank(), size(), round);
      transport.post(part.exchange);
      transport.wait();
      part.check();
    });
  }
}

TEST_P(ConformanceFaults, OneExchangeAtATime) {
  run({}, [&](Transport& transport) {
    RingStep first(transport, 0), second(transport, 1);
    transport.post(first.exchange);
    if (transport.rank() == 0) {  // which has not polled, so its receive is not complete
      support::expect_refused([&] { transport.post(second.exchange); }, {"step 1", "step 0", "wait()"});
      support::expect_refused([&] { transport.all_gather("x"); }, {"step 0", "wait()"});
    }
    transport.wait();
    transport.post(second.exchange);
    transport.wait();
  });
}

}  // namespace annulus
