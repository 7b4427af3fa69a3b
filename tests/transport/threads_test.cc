#include "annulus/thread_group.h"

#include "support/sparse_memory.h"
#include "transport/conformance.h"
#include "transport/conformance_faults.h"

namespace annulus {
namespace {

class ThreadRanks final : public Ranks {
 public:
  explicit ThreadRanks(int size) : size_(size) {}
  int size() const override { return size_; }

  void run(const TransportOptions& options, const Body& body) override {
    auto transports = make_thread_group(size_, options);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&body, rank, transport = std::move(transports[static_cast<std::size_t>(rank)])]() mutable {
        try {
          body(std::move(transport));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int size_;
};

RanksParam threads(int size) {
  return {std::to_string(size), [size] { return std::make_unique<ThreadRanks>(size); }};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Threads, Conformance, ::testing::Values(threads(1), threads(2), threads(3), threads(8)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Threads, ConformanceFaults, ::testing::Values(threads(2), threads(3), threads(5)), name_of);

TEST(ThreadGroup, HasOneRankOrMore) {
  support::expect_refused([] { make_thread_group(0); }, {"1 rank or more", "got 0"});
}

TEST(ThreadGroup, CanBeAbortedByAnotherThreadOfARankThatWaits) {
  const auto ranks = make_thread_group(2);
  Bytes buffer(10);
  std::thread waiting([&] {
    ranks[0]->post({.receives = {{.peer = 1, .bytes = buffer}}});
    support::expect_refused_as<TransportError>([&] { ranks[0]->wait(); }, {"rank 0 gave up", "interrupted"});
  });
  std::this_thread::sleep_for(20ms);
  ranks[0]->abort("interrupted");
  waiting.join();
}

// One message beyond 2^31 bytes. Its sender repeats one MiB, its receiver looks at pieces of it.
TEST(ThreadGroup, MessagesBeyondTwoGibibytes) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer would need 10 GiB and half a minute for it";
#endif
  constexpr std::int64_t kRun = 1 << 20, kRuns = 2100;
  const Bytes run = payload(1, kRun);
  const support::SparseMemory memory(kRun * kRuns);
  if (memory.data() == nullptr) GTEST_SKIP() << "no address space for a message of 2.1 GiB";
  const auto ranks = make_thread_group(2);
  std::thread sender([&] {
    ranks[0]->post(
        {.sends = {{.peer = 1, .blocks = {{.data = run.data(), .axes = {{{kRuns, 0}}}, .run_bytes = kRun}}}}});
    ranks[0]->wait();
  });
  ranks[1]->post({.receives = {{.peer = 0, .bytes = {memory.data(), kRun * kRuns}}}});
  ranks[1]->wait();
  sender.join();
  EXPECT_EQ(ranks[0]->sent_bytes(), kRun * kRuns);
  EXPECT_EQ(ranks[1]->received_bytes(), kRun * kRuns);
  for (const std::int64_t i : {std::int64_t{0}, kRuns / 2, kRuns - 1})
    EXPECT_EQ(first_wrong({memory.data() + i * kRun, kRun}, 1), -1) << "run " << i;
}

}  // namespace
}  // namespace annulus
