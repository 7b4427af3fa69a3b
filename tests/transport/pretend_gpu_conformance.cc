// Transports of GPU memory on a GPU that is not one (support/pretend_gpu.h), so that they are tested everywhere.
#include "annulus/thread_group.h"
#include "transport/nccl.h"
#include "transport/on_pretend_gpu.h"
#include "transport/staged.h"
#include "transport/thread_boxes.h"

namespace annulus {
namespace {

using support::PretendCopies;
using support::PretendStream;

using Make = std::function<std::vector<std::unique_ptr<Transport>>(int size, const TransportOptions&)>;

class PretendRanks final : public Ranks {
 public:
  PretendRanks(int size, Make make) : size_(size), make_(std::move(make)) {}
  int size() const override { return size_; }

  void run(const TransportOptions& options, const Body& body) override {
    auto transports = make_(size_, options);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank, own = std::move(transports[static_cast<std::size_t>(rank)])]() mutable {
        try {
          body(std::make_unique<OnPretendGpu>(std::move(own), options.blocking));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int size_;
  Make make_;
};

std::vector<std::unique_ptr<Transport>> make_threads(int size, const TransportOptions& options) {
  std::vector<std::unique_ptr<DeviceCopies>> copies;
  for (int rank = 0; rank < size; ++rank) copies.push_back(std::make_unique<PretendCopies>(size));
  return make_thread_group(std::move(copies), options);
}

Make staged(std::int64_t piece_bytes) {
  return [piece_bytes](int size, const TransportOptions& options) {
    auto ranks = make_thread_group(size, options);
    for (auto& rank : ranks)
      rank = make_staged_transport(std::move(rank), std::make_unique<PretendCopies>(2), {.piece_bytes = piece_bytes});
    return ranks;
  };
}

LinkMaker links(const std::shared_ptr<support::PretendWires>& wires, const std::string& gpu) {
  return {.trouble = "",
          .gpu = gpu,
          .text = "GPU " + gpu,
          .new_id = [] { return std::string("id"); },
          .link = [wires](const std::string& id, int rank, int) -> std::unique_ptr<DeviceLink> {
            EXPECT_EQ(id, "id");
            return std::make_unique<support::PretendLink>(wires, rank);
          }};
}

// Transports that are made by all ranks at once.
std::vector<std::unique_ptr<Transport>> make_linked(int size, const TransportOptions& options,
                                                    std::int64_t staging_bytes) {
  auto ranks = make_thread_group(size, options);
  const auto wires = std::make_shared<support::PretendWires>();
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&] {
      const std::string gpu = std::to_string(rank->rank());
      rank = make_nccl_transport(std::move(rank), std::make_unique<PretendCopies>(2), links(wires, gpu),
                                 {.timeout = options.timeout, .staging_bytes = staging_bytes});
    });
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

Make linked(std::int64_t staging_bytes) {
  return [=](int size, const TransportOptions& options) { return make_linked(size, options, staging_bytes); };
}

RanksParam param(const std::string& name, int size, const Make& make) {
  return {name + "_" + std::to_string(size), [=] { return std::make_unique<PretendRanks>(size, make); }, true,
          name == "linked"};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Pretend, Conformance,
                         ::testing::Values(param("threads", 1, make_threads), param("threads", 2, make_threads),
                                           param("threads", 3, make_threads), param("threads", 8, make_threads),
                                           param("staged", 1, staged(4 << 20)), param("staged", 2, staged(4 << 20)),
                                           param("staged", 5, staged(1 << 20)), param("tiny_pieces", 3, staged(7001)),
                                           param("linked", 1, linked(1 << 20)), param("linked", 2, linked(64 << 20)),
                                           param("linked", 3, linked(9000)), param("linked", 11, linked(100'000))),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Pretend, ConformanceFaults,
                         ::testing::Values(param("threads", 2, make_threads), param("threads", 3, make_threads),
                                           param("staged", 2, staged(4 << 20)), param("staged", 4, staged(4 << 20)),
                                           param("linked", 2, linked(1 << 20)), param("linked", 3, linked(1 << 20)),
                                           param("linked", 4, linked(1 << 20))),
                         name_of);

// Threads run ahead of the GPU: when a rank gives up, what earlier exchanges queued is over too.
TEST(PretendThreads, EarlierExchangesAreOverAfterAbort) {
  auto ranks = make_threads(2, {});
  std::deque<PretendStream> streams(2);
  std::vector<Bytes> out(2, Bytes(1000, std::byte{1})), in(2, Bytes(1000));
  for (std::size_t i = 0; i < 2; ++i) {
    const int other = 1 - static_cast<int>(i);
    streams[i].queue([] { std::this_thread::sleep_for(100ms); });
    ranks[i]->post({.step = 1,
                    .sends = {{.peer = other, .blocks = {{.data = out[i].data(), .run_bytes = 1000}}}},
                    .receives = {{.peer = other, .bytes = in[i]}},
                    .stream = &streams[i]});
  }
  for (auto& rank : ranks) rank->poll();
  for (auto& rank : ranks) rank->wait();
  ranks[0]->post({.step = 2, .stream = &streams[0]});
  ranks[0]->abort("enough");
  std::ranges::fill(in[0], std::byte{4});
  for (PretendStream& stream : streams) stream.wait();
  EXPECT_EQ(std::ranges::count(in[0], std::byte{4}), 1000);
  support::expect_refused_as<TransportError>([&] { ranks[1]->poll(); }, {"rank 0 gave up at step 2: enough"});
}

// Nothing ever arrives, as from a rank that is gone: what is queued waits until the link is cut.
class SilentLink final : public DeviceLink {
 public:
  explicit SilentLink(std::atomic<bool>& is_cut) : is_cut_(is_cut) {}
  bool ready() override { return true; }
  void queue(std::span<const LinkMessage>, std::span<const LinkMessage>, void* stream) override {
    static_cast<PretendStream*>(stream)->queue([&is_cut = is_cut_] { is_cut.wait(false); });
  }
  void cut() noexcept override {
    is_cut_ = true;
    is_cut_.notify_all();
  }

 private:
  std::atomic<bool>& is_cut_;
};

// A failure may be heard of before wait() has done anything. When it throws, nothing on the GPU waits for the others
// any more: a rank that frees its memory then would wait with it.
TEST(Linked, WaitLeavesNothingQueued) {
  auto ranks = make_thread_group(2);
  std::array<std::atomic<bool>, 2> is_cut{};
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&] {
      const auto own = static_cast<std::size_t>(rank->rank());
      LinkMaker maker = links(nullptr, std::to_string(own));
      maker.link = [&, own](const std::string&, int, int) { return std::make_unique<SilentLink>(is_cut[own]); };
      rank = make_nccl_transport(std::move(rank), std::make_unique<PretendCopies>(2), maker, {});
    });
  for (std::thread& thread : threads) thread.join();
  std::deque<PretendStream> streams(2);
  std::vector<Bytes> out(2, Bytes(1000)), in(2, Bytes(1000));
  for (std::size_t i = 0; i < 2; ++i) {
    const int other = 1 - static_cast<int>(i);
    ranks[i]->post({.step = 1,
                    .sends = {{.peer = other, .blocks = {{.data = out[i].data(), .run_bytes = 1000}}}},
                    .receives = {{.peer = other, .bytes = in[i]}},
                    .stream = &streams[i]});
  }
  for (int turn = 0; turn < 20; ++turn)
    for (auto& rank : ranks) EXPECT_FALSE(rank->poll());
  ranks[0]->abort("enough");
  EXPECT_FALSE(is_cut[1]);
  support::expect_refused_as<TransportError>([&] { ranks[1]->wait(); }, {"rank 0 gave up at step 1: enough"});
  EXPECT_TRUE(is_cut[1]);
}

// Every rank hears of it, before anything is linked.
TEST(Linked, TakesOneRankAGpu) {
  auto ranks = make_thread_group(3);
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&] {
      const std::string gpu = rank->rank() == 1 ? "other" : "same";
      support::expect_refused_as<Unsupported>(
          [&] { make_nccl_transport(std::move(rank), std::make_unique<PretendCopies>(2), links(nullptr, gpu), {}); },
          {"one rank a GPU", "rank 0 and rank 2", "NCCL_HOSTID"});
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Linked, ARankWithoutNccl) {
  auto ranks = make_thread_group(2);
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&] {
      LinkMaker maker = links(nullptr, std::to_string(rank->rank()));
      if (rank->rank() == 1) maker.trouble = "no library";
      support::expect_refused_as<Unsupported>(
          [&] { make_nccl_transport(std::move(rank), std::make_unique<PretendCopies>(2), maker, {}); },
          {"rank 1: no library"});
    });
  for (std::thread& thread : threads) thread.join();
}

// Exchanges of host memory pass through; a call too early is refused, and nobody is the worse for it.
TEST(Staged, WhatIsRefusedIsNoFailure) {
  auto ranks = staged(4 << 20)(2, {});
  Bytes out(10, std::byte{7}), in(10);
  ranks[1]->post({.step = 1, .receives = {{.peer = 0, .bytes = in}}});
  support::expect_refused_as<InvalidArgument>([&] { ranks[1]->all_gather(""); }, {"call wait() first"});
  support::expect_refused_as<InvalidArgument>([&] { ranks[1]->post({.step = 2}); }, {"call wait() first"});
  ranks[0]->post({.step = 1, .sends = {{.peer = 1, .blocks = {{.data = out.data(), .run_bytes = 10}}}}});
  std::thread sends([&] { ranks[0]->wait(); });
  ranks[1]->wait();
  sends.join();
  EXPECT_EQ(in, out);
}

TEST(Staged, SaysWhatItTakes) {
  auto ranks = make_thread_group(2);
  const auto transport =
      make_staged_transport(std::move(ranks[0]), std::make_unique<PretendCopies>(2), {.piece_bytes = 1000});
  EXPECT_EQ(transport->staging_bytes(), 4000);
  EXPECT_EQ(transport->name(), "staged threads");
  support::expect_refused(
      [&] { make_staged_transport(std::move(ranks[1]), std::make_unique<PretendCopies>(2), {.piece_bytes = 0}); },
      {"1 to 2^30", "got 0"});
}

}  // namespace
}  // namespace annulus
