// The conformance suite under mpirun.
#include "support/sparse_memory.h"
#include "transport/conformance.h"
#include "transport/conformance_faults.h"
#include "transport/mpi_tests.h"

namespace annulus {
namespace {

class MpiRanks final : public Ranks {
 public:
  explicit MpiRanks(const MpiOptions& options) : options_(options) {}
  int size() const override { return process->size(); }

  void run(const TransportOptions& options, const Body& body) override {
    try {
      body(process->make_transport(options, options_));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }

 private:
  MpiOptions options_;
};

RanksParam mpi(const std::string& name, const MpiOptions& options) {
  return {name, [options] { return std::make_unique<MpiRanks>(options); }};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

// Pieces that are smaller than most messages, and too few slots for all peers, beside the real ones.
const RanksParam kReal = mpi("real", {});
const RanksParam kTiny = mpi("tiny_pieces", {.piece_bytes = 777, .send_slots = 2, .receive_slots = 3});
INSTANTIATE_TEST_SUITE_P(Mpi, Conformance, ::testing::Values(kReal, kTiny), name_of);
INSTANTIATE_TEST_SUITE_P(Mpi, ConformanceFaults, ::testing::Values(kReal), name_of);

TEST(MpiTransport, NamesTheStagingItTakes) {
  const auto transport = process->make_transport({}, {.piece_bytes = 1000, .send_slots = 3, .receive_slots = 5});
  EXPECT_EQ(transport->staging_bytes(), process->size() > 1 ? 8000 : 0);
  EXPECT_EQ(mpi_staging_bytes(1), 0);
  EXPECT_EQ(mpi_staging_bytes(2, {.piece_bytes = 10, .send_slots = 4, .receive_slots = 6}), 100);
}

TEST(MpiTransport, RefusesUselessOptions) {
  support::expect_refused([] { process->make_transport({}, {.receive_slots = 1}); }, {"2 or more", "16 and 1"});
  support::expect_refused([] { process->make_transport({}, {.piece_bytes = 0}); }, {"1 to 2^30", "got 0"});
}

TEST(MpiTransport, RanksMustAgreeOnTheSizeOfPieces) {
  MpiRanks ranks({.piece_bytes = 1000 + process->rank()});
  ranks.run({}, [](std::unique_ptr<Transport> transport) {
    if (transport->size() == 1) return;
    support::expect_refused_as<TransportError>([&] { transport->all_gather("x"); }, {"pieces of", "same options"});
  });
}

// One message beyond 2^31 bytes. Its sender repeats one MiB, its receiver looks at pieces of it.
TEST(MpiTransport, MessagesBeyondTwoGibibytes) {
  constexpr std::int64_t kRun = 1 << 20, kRuns = 2100;
  const Bytes run = payload(1, kRun);
  const support::SparseMemory memory(kRun * kRuns);
  MpiRanks({}).run({}, [&](std::unique_ptr<Transport> transport) {
    Exchange exchange;
    if (transport->rank() == 0)
      exchange.sends = {
          {.peer = transport->size() - 1, .blocks = {{.data = run.data(), .axes = {{{kRuns, 0}}}, .run_bytes = kRun}}}};
    if (transport->rank() == transport->size() - 1)
      exchange.receives = {{.peer = 0, .bytes = {memory.data(), kRun * kRuns}}};
    transport->post(exchange);
    transport->wait();
    if (exchange.receives.empty()) return;
    for (const std::int64_t i : {std::int64_t{0}, kRuns / 2, kRuns - 1})
      EXPECT_EQ(first_wrong({memory.data() + i * kRun, kRun}, 1), -1) << "run " << i;
  });
}

// In small pieces this takes seconds, and every one of them shows that the sender lives.
TEST(MpiTransport, AMessageMayTakeLongerThanTheDeadline) {
  if (process->size() == 1) GTEST_SKIP() << "one rank has nobody to send to";
  constexpr std::int64_t kRun = 1 << 20, kRuns = 96;
  const Bytes run = payload(1, kRun);
  const support::SparseMemory memory(kRun * kRuns);
  MpiRanks({.piece_bytes = 96, .send_slots = 2, .receive_slots = 3})
      .run({.timeout = std::chrono::seconds(1)}, [&](std::unique_ptr<Transport> transport) {
        const int last = transport->size() - 1;
        Exchange exchange;
        if (transport->rank() == 0)
          exchange.sends = {
              {.peer = last, .blocks = {{.data = run.data(), .axes = {{{kRuns, 0}}}, .run_bytes = kRun}}}};
        if (transport->rank() == last) exchange.receives = {{.peer = 0, .bytes = {memory.data(), kRun * kRuns}}};
        transport->post(exchange);
        transport->wait();
        EXPECT_EQ(transport->rank() == last ? first_wrong({memory.data() + (kRuns - 1) * kRun, kRun}, 1) : -1, -1);
      });
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  annulus::MpiProcess process(&argc, &argv);
  return annulus::run_all_tests(process);
}
