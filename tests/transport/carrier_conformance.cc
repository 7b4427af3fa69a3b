// A carrier that hands packed messages to the thread transport must pass for a transport itself.
#include "annulus/carrier.h"

#include <array>
#include <new>

#include "annulus/thread_group.h"
#include "transport/conformance.h"
#include "transport/conformance_faults.h"

namespace annulus {
namespace {

class ThreadCarrier final : public Carrier {
 public:
  explicit ThreadCarrier(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  void post(const PackedExchange& exchange) override {
    Exchange handed{.plan = exchange.plan, .step = exchange.step, .sends = {}, .receives = {}};
    for (const PackedMessage& send : exchange.sends)
      handed.sends.push_back(
          {send.peer, {{.data = send.bytes.data(), .run_bytes = static_cast<std::int64_t>(send.bytes.size())}}});
    for (const PackedMessage& receive : exchange.receives) handed.receives.push_back({receive.peer, receive.bytes});
    transport_->post(handed);
  }
  void wait() override { transport_->wait(); }
  bool poll() override { return transport_->poll(); }
  void abort(const std::string& text) noexcept override { transport_->abort(text); }

 private:
  std::unique_ptr<Transport> transport_;
};

class CarriedRanks final : public Ranks {
 public:
  explicit CarriedRanks(int size) : size_(size) {}
  int size() const override { return size_; }

  void run(const TransportOptions& options, const Body& body) override {
    auto transports = make_thread_group(size_, options);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank, own = std::move(transports[static_cast<std::size_t>(rank)])]() mutable {
        try {
          body(make_carried_transport(rank, size_, std::make_unique<ThreadCarrier>(std::move(own))));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int size_;
};

RanksParam carried(int size) {
  return {std::to_string(size), [size] { return std::make_unique<CarriedRanks>(size); }};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Carried, Conformance, ::testing::Values(carried(1), carried(2), carried(3)), name_of);
INSTANTIATE_TEST_SUITE_P(Carried, ConformanceFaults, ::testing::Values(carried(2), carried(3)), name_of);

TEST(Carried, RankLiesInItsGroup) {
  support::expect_refused([] { make_carried_transport(2, 2, nullptr); }, {"[0, size)", "rank 2 of 2"});
  support::expect_refused([] { make_carried_transport(0, 0, nullptr); }, {"rank 0 of 0"});
}

TEST(Carried, WithoutACarrierItLooksAhead) {
  const auto transport = make_carried_transport(1, 3, nullptr);
  EXPECT_EQ(transport->all_gather("text"), std::vector<std::string>(3, "text"));
  EXPECT_TRUE(transport->poll());
  support::expect_refused([&] { transport->post({.step = 4}); }, {"without a carrier", "step 4"});
}

// By gather a rank sends its shard to everybody: it is packed once, not once for each of them.
TEST(Carried, WhatGoesToAllAlikeIsPackedOnce) {
  struct Attentive final : Carrier {
    std::vector<const std::byte*> sent;
    void post(const PackedExchange& exchange) override {
      for (const PackedMessage& send : exchange.sends) {
        EXPECT_EQ(send.bytes.size(), 3U);
        EXPECT_EQ(send.bytes.back(), std::byte{'d'});
        sent.push_back(send.bytes.data());
      }
    }
    void wait() override {}
    void abort(const std::string&) noexcept override {}
  };
  auto made = std::make_unique<Attentive>();
  Attentive& carrier = *made;
  const auto transport = make_carried_transport(1, 5, std::move(made));
  const std::array memory{std::byte{'a'}, std::byte{'b'}, std::byte{'c'}, std::byte{'d'}};
  const StridedBlock bcd{.data = &memory[1], .run_bytes = 3};
  const StridedBlock b_d{.data = &memory[1], .axes = {{{2, 2}}}, .run_bytes = 1}, d{.data = &memory[3], .run_bytes = 1};
  const std::vector parts{b_d, d};  // b, d, d: as many bytes
  transport->post(
      {.plan = 1, .step = 0, .sends = {{0, {bcd}}, {1, {}}, {2, {bcd}}, {3, parts}, {4, parts}}, .receives = {}});
  transport->wait();
  ASSERT_EQ(carrier.sent.size(), 4U);
  EXPECT_EQ(carrier.sent[0], carrier.sent[1]);
  EXPECT_NE(carrier.sent[1], carrier.sent[2]);
  EXPECT_EQ(carrier.sent[2], carrier.sent[3]);
  EXPECT_EQ(transport->sent_bytes(), 12);
}

// A carrier tells the others why it throws a TransportError. Of anything else they hear by abort().
TEST(Carried, OthersHearOfWhatTheCarrierDoesNotKnow) {
  struct Poor final : Carrier {
    std::string& told;
    explicit Poor(std::string& text) : told(text) {}
    void post(const PackedExchange&) override { throw std::bad_alloc(); }
    void wait() override {}
    void abort(const std::string& text) noexcept override { told = text; }
  };
  std::string told;
  const auto transport = make_carried_transport(1, 2, std::make_unique<Poor>(told));
  std::byte memory{};
  const Exchange exchange{.plan = 1, .step = 4, .sends = {}, .receives = {{.peer = 0, .bytes = std::span(&memory, 1)}}};
  for (int i = 0; i < 2; ++i)
    support::expect_refused_as<TransportError>([&] { transport->post(exchange); },
                                               {"rank 1 gave up", "step 4", "bad_alloc"});
  EXPECT_NE(told.find("rank 1 gave up"), std::string::npos) << told;
}

}  // namespace
}  // namespace annulus
