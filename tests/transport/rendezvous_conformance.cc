// Ranks that meet in a file and talk over TCP: the conformance suite, with ranks as threads of one process.
#include "annulus/rendezvous.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "transport/conformance.h"
#include "transport/conformance_faults.h"
#include "transport/sockets.h"

namespace annulus {
namespace {

std::string fresh_file() {
  static std::atomic<int> count{0};
  return (std::filesystem::temp_directory_path() /
          ("annulus-meet-" + std::to_string(getpid()) + "-" + std::to_string(++count)))
      .string();
}

class RendezvousRanks final : public Ranks {
 public:
  explicit RendezvousRanks(int size) : size_(size) {}
  int size() const override { return size_; }

  void run(const TransportOptions& options, const Body& body) override {
    const std::string place = "file:" + fresh_file();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(make_rendezvous_transport(rank, size_, place, options));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int size_;
};

RanksParam rendezvous(int size) {
  return {std::to_string(size), [size] { return std::make_unique<RendezvousRanks>(size); }, false};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Rendezvous, Conformance, ::testing::Values(rendezvous(1), rendezvous(2), rendezvous(5)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Rendezvous, ConformanceFaults, ::testing::Values(rendezvous(2), rendezvous(3)), name_of);

TEST(Rendezvous, AtAnAddress) {
  const std::uint16_t port = Socket::listening(0).port();  // free a moment ago
  const std::string place = "tcp:127.0.0.1:" + std::to_string(port);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      if (rank == 0) std::this_thread::sleep_for(50ms);  // the others knock until it is there
      const auto transport = make_rendezvous_transport(rank, 3, place, {.timeout = 20s});
      EXPECT_EQ(transport->all_gather(std::to_string(rank)), (std::vector<std::string>{"0", "1", "2"}));
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Rendezvous, InAFileThatAnEarlierJobLeft) {
  const std::string file = fresh_file();
  std::ofstream(file) << own_host() << ":" << Socket::listening(0).port() << "\n";  // nobody listens there any more
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      if (rank == 0) std::this_thread::sleep_for(100ms);
      const auto transport = make_rendezvous_transport(rank, 2, "file:" + file, {.timeout = 20s});
      EXPECT_EQ(transport->all_gather("x").size(), 2U);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Rendezvous, NamesWhoDoesNotCome) {
  const std::string place = "file:" + fresh_file();
  std::thread second([&] {
    support::expect_refused_as<TransportError>([&] { make_rendezvous_transport(1, 3, place, {.timeout = 500ms}); },
                                               {"rank 0", "rendezvous", "rank 1 waits"});  // it may leave first
  });
  support::expect_refused_as<TransportError>([&] { make_rendezvous_transport(0, 3, place, {.timeout = 500ms}); },
                                             {"rank 2 did not come", "0.5 s"});
  second.join();
  std::filesystem::remove(place.substr(5));
}

Exchange send_to(int peer, std::int64_t step, const Bytes& memory) {
  const StridedBlock block{.data = const_cast<std::byte*>(memory.data()),
                           .run_bytes = static_cast<std::int64_t>(memory.size())};
  return {.plan = 1, .step = step, .sends = {{.peer = peer, .blocks = {block}}}, .receives = {}};
}

void poll_for(Transport& transport, std::chrono::milliseconds time) {
  for (const auto end = std::chrono::steady_clock::now() + time; std::chrono::steady_clock::now() < end;) {
    transport.poll();
    std::this_thread::sleep_for(1ms);
  }
}

// A rank of a group that has met, and whose ranks have heard of each other.
std::unique_ptr<Transport> join(int rank, int size, const std::string& place) {
  auto transport = make_rendezvous_transport(rank, size, place, {.timeout = 20s});
  EXPECT_EQ(transport->all_gather("x").size(), static_cast<std::size_t>(size));
  return transport;
}

// Else who receives would have to keep whatever a rank sends that need not wait for anybody.
TEST(Rendezvous, WhoSendsMuchWaitsUntilItIsAskedFor) {
  constexpr int kSteps = 40;
  for (const std::size_t bytes : {std::size_t{1} << 20, std::size_t{4096}}) {
    const std::size_t most_ahead = (std::size_t{1} << 16) / bytes;  // messages
    const std::string place = "file:" + fresh_file();
    const Bytes memory(bytes, std::byte{7});
    std::atomic<std::size_t> sent{0};
    std::thread sender([&] {
      const auto transport = make_rendezvous_transport(0, 2, place, {.timeout = 20s});
      for (int step = 0; step < kSteps; ++step) {
        transport->post(send_to(1, step, memory));
        transport->wait();
        ++sent;
      }
    });
    const auto transport = make_rendezvous_transport(1, 2, place, {.timeout = 20s});
    poll_for(*transport, 200ms);  // the first messages arrive, and are kept
    EXPECT_LE(sent, most_ahead);
    for (std::size_t step = 0; step < kSteps; ++step) {
      EXPECT_LE(sent, step + most_ahead);
      Bytes got(memory.size());
      transport->post(
          {.plan = 1, .step = static_cast<std::int64_t>(step), .sends = {}, .receives = {{.peer = 0, .bytes = got}}});
      transport->wait();
      EXPECT_TRUE(got == memory);
    }
    sender.join();
    EXPECT_EQ(sent, kSteps);
  }
}

// Of messages that are not sent before they are asked for, too, whoever comes first.
TEST(Rendezvous, LongMessagesThatDisagree) {
  const Bytes memory(300'000, std::byte{7});
  for (const bool sender_is_first : {true, false}) {
    const std::string place = "file:" + fresh_file();
    const std::vector<std::string> words{"rank 0 sends 300000 bytes at step 5",
                                         "rank 1 expects 200000 bytes at step 5"};
    std::atomic<bool> first_has_posted{false};
    const auto act = [&](int rank, const Exchange& exchange) {
      const auto transport = join(rank, 2, place);
      support::expect_refused_as<TransportError>(
          [&] {
            if ((rank == 0) != sender_is_first) {
              while (!first_has_posted) std::this_thread::sleep_for(1ms);
              poll_for(*transport, 50ms);
            }
            transport->post(exchange);
            first_has_posted = true;
            transport->wait();
          },
          words);
    };
    Bytes received(200'000);
    std::thread receiver(
        [&] { act(1, {.plan = 1, .step = 5, .sends = {}, .receives = {{.peer = 0, .bytes = received}}}); });
    act(0, send_to(1, 5, memory));
    receiver.join();
  }
}

// A rank may leave when wait() has returned, though the others have not read all of it yet.
TEST(Rendezvous, WhoLeavesHasSentEverything) {
  const std::string place = "file:" + fresh_file();
  std::atomic<bool> is_asked_for{false};
  const Bytes memory(std::size_t{3} << 20, std::byte{7});
  std::thread sender([&] {
    const auto transport = make_rendezvous_transport(0, 2, place, {.timeout = 20s});
    while (!is_asked_for) std::this_thread::sleep_for(1ms);
    transport->post(send_to(1, 5, memory));
    transport->wait();
  });
  const auto transport = make_rendezvous_transport(1, 2, place, {.timeout = 20s});
  Bytes got(memory.size());
  transport->post({.plan = 1, .step = 5, .sends = {}, .receives = {{.peer = 0, .bytes = got}}});
  is_asked_for = true;
  std::this_thread::sleep_for(1200ms);  // computes, and reads nothing
  transport->wait();
  EXPECT_TRUE(got == memory);
  sender.join();
}

// Who polls hears of it, too.
TEST(Rendezvous, WhatARankThatLeftHasNotSentIsAnError) {
  const std::string place = "file:" + fresh_file();
  std::thread other([&] { join(1, 2, place); });
  const auto transport = join(0, 2, place);
  Bytes memory(100);
  support::expect_refused_as<TransportError>(
      [&] {
        transport->post({.plan = 1, .step = 5, .sends = {}, .receives = {{.peer = 1, .bytes = memory}}});
        poll_for(*transport, 20s);
      },
      {"rank 1 has left the group", "step 5"});
  other.join();
}

// Short messages too, which nobody waits for: sent before it left, and after.
TEST(Rendezvous, WhatARankThatLeftHasNotAskedForIsAnError) {
  const Bytes memory(100, std::byte{7});
  for (const bool before : {true, false}) {
    const std::string place = "file:" + fresh_file();
    std::thread other([&] { join(1, 2, place); });
    const auto transport = join(0, 2, place);
    support::expect_refused_as<TransportError>(
        [&] {
          if (!before) other.join();
          transport->post(send_to(1, 5, memory));
          transport->wait();
          poll_for(*transport, 20s);
        },
        {"rank 1 has left the group", "step 5"});
    if (before) other.join();
  }
}

// A rank that passes on why it fails, behind more than another reads in time, is not the one that is lost.
TEST(Rendezvous, WhoPassesOnAFailureIsNotTakenForLost) {
  const std::string place = "file:" + fresh_file();
  constexpr std::size_t kMuch = std::size_t{64} << 20;  // more than lies in a connection
  std::atomic<bool> is_asked_for{false}, is_under_way{false};
  const auto wait_for = [](const std::atomic<bool>& event) {
    while (!event) std::this_thread::sleep_for(1ms);
  };
  std::thread first([&] {
    const Bytes memory(kMuch, std::byte{7});
    const auto transport = join(0, 3, place);
    wait_for(is_asked_for);
    support::expect_refused_as<TransportError>(
        [&] {
          transport->post(send_to(2, 5, memory));
          poll_for(*transport, 100ms);
          is_under_way = true;
          transport->wait();
        },
        {"rank 1 gave up", "no more of it"});
  });
  std::thread second([&] {
    const auto transport = join(1, 3, place);
    wait_for(is_under_way);
    transport->abort("no more of it");
  });
  const auto transport = join(2, 3, place);
  Bytes memory(kMuch);
  transport->post({.plan = 1, .step = 5, .sends = {}, .receives = {{.peer = 0, .bytes = memory}}});
  is_asked_for = true;
  first.join();  // while this rank reads nothing
  second.join();
  support::expect_refused_as<TransportError>([&] { transport->wait(); }, {"rank 1 gave up", "no more of it"});
}

TEST(Rendezvous, NamesTheStepAtWhichNothingMoves) {
  std::atomic<bool> stop{false};
  const auto transport = make_rendezvous_transport(0, 1, "file:" + fresh_file(), {.timeout = 20s, .stop = &stop});
  transport->post({.plan = 1, .step = 7});
  transport->wait();
  stop = true;
  support::expect_refused_as<TransportError>([&] { transport->poll(); }, {"told to stop", "at step 7"});
}

TEST(Rendezvous, NamesWhoLeaves) {
  const std::string file = fresh_file();
  const Socket listener = Socket::listening(0);  // of a rank 0 that ends when another has come
  std::ofstream(file) << own_host() << ":" << listener.port() << "\n";
  std::thread first([&] {
    Socket gone = listener.accepted(std::chrono::steady_clock::now() + 20s);
    EXPECT_TRUE(gone.is_open());
  });
  const auto since = std::chrono::steady_clock::now();
  support::expect_refused_as<TransportError>([&] { make_rendezvous_transport(1, 2, "file:" + file, {.timeout = 60s}); },
                                             {"rank 0 has left the rendezvous", "rank 1 waits"});
  EXPECT_LT(std::chrono::steady_clock::now() - since, 30s) << "it is to notice, not to wait for the deadline";
  first.join();
  std::filesystem::remove(file);
}

// A web server, say.
TEST(Rendezvous, DoesNotBelieveAnybodyWhoAnswers) {
  const Socket listener = Socket::listening(0);
  std::thread stranger([&] {
    const auto soon = std::chrono::steady_clock::now() + 20s;
    Socket caller = listener.accepted(soon);
    const Bytes words(1000, std::byte{'x'});
    EXPECT_TRUE(caller.write_all(words, soon));
    std::byte end{};
    while (caller.can_read(soon) && caller.read_some(std::span(&end, 1)) > 0) {
    }
  });
  support::expect_refused_as<TransportError>(
      [&] { make_rendezvous_transport(2, 3, "tcp:127.0.0.1:" + std::to_string(listener.port()), {.timeout = 20s}); },
      {"rank 2 got something else", "another place"});
  stranger.join();
}

TEST(Rendezvous, SaysWhyRankZeroIsNotReached) {
  const std::string port = std::to_string(Socket::listening(0).port());  // free a moment ago
  support::expect_refused_as<TransportError>(
      [&] { make_rendezvous_transport(1, 2, "tcp:127.0.0.1:" + port, {.timeout = 200ms}); },
      {"rank 0 did not come", "(127.0.0.1:" + port + ": Connection refused)"});
}

TEST(Rendezvous, SaysWhenThereAreTooFewOpenFiles) {
  struct NoFiles {
    rlimit limit{};
    NoFiles() {
      EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
      const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
      EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    }
    ~NoFiles() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0); }
  };
  for (const int rank : {0, 1})
    support::expect_refused_as<TransportError>(
        [&] {
          const NoFiles until_it_throws;  // sanitizers open some to look at the error
          make_rendezvous_transport(rank, 2, "tcp:127.0.0.1:29400", {.timeout = 1s});
        },
        {"an open file", "ulimit -n"});
}

TEST(Rendezvous, SaysWhyItsFileCannotBeWritten) {
  struct NoSpace {
    rlimit limit{};
    sighandler_t handler = std::signal(SIGXFSZ, SIG_IGN);
    NoSpace() {
      EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
      const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
      EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
    }
    ~NoSpace() {
      EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
      std::signal(SIGXFSZ, handler);
    }
  };
  const std::string file = fresh_file();
  support::expect_refused_as<TransportError>(
      [&] {
        const NoSpace until_it_throws;
        make_rendezvous_transport(0, 2, "file:" + file, {.timeout = 1s});
      },
      {"rank 0 writes its address into " + file, "File too large"});
  EXPECT_FALSE(std::filesystem::exists(file));
  std::filesystem::remove(file + ".draft");
}

TEST(Rendezvous, IsLeftWhenToldToStop) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    std::this_thread::sleep_for(100ms);
    stop = true;
  });
  const std::string place = "file:" + fresh_file();
  support::expect_refused_as<TransportError>(
      [&] { make_rendezvous_transport(0, 2, place, {.timeout = 60s, .stop = &stop}); },
      {"rank 0 gave up", "told to stop"});
  support::expect_refused_as<TransportError>(
      [&] { make_rendezvous_transport(1, 2, place, {.timeout = 60s, .stop = &stop}); }, {"rank 1 gave up"});
  other.join();
  std::filesystem::remove(place.substr(5));
}

TEST(Rendezvous, RefusesPlacesThatAreNone) {
  for (const std::string place :
       {"", "node:7", "tcp:node", "tcp:node:0", "tcp:node:70000", "tcp::80", "tcp:[::1]:80", "file:"})
    support::expect_refused([&] { make_rendezvous_transport(0, 2, place); }, {"tcp:HOST:PORT", "'" + place + "'"});
  support::expect_refused([&] { make_rendezvous_transport(2, 2, "file:x"); }, {"[0, size)", "rank 2 of 2"});
}

}  // namespace
}  // namespace annulus
