// GPU memory over MPI under mpirun, on a GPU that is not one: through memory of the host, and straight from slots of
// the GPU to an MPI that passes for CUDA-aware. Its memory is walled (support/walled_gpu.h), so a thread that reads or
// writes it, or an MPI that does when it is gone, ends the program.
#include <cstdlib>

#include "support/walled_gpu.h"
#include "transport/mpi_pieces.h"
#include "transport/mpi_tests.h"
#include "transport/on_pretend_gpu.h"
#include "transport/staged.h"

namespace {

using annulus::support::PretendCopies;
using annulus::support::WalledBytes;

constexpr int kDevice = 3;

// What MPI was given since somebody last looked.
struct Given {
  std::atomic<std::int64_t> sent_from_gpu{0}, most_sent_from_host{0}, received_on_gpu{0};
  std::atomic<bool> on_its_device{true};  // the thread's device was that of the memory

  void look_at_thread() {
    if (PretendCopies::current_device != kDevice) on_its_device = false;
  }
  void forget() {
    sent_from_gpu = most_sent_from_host = received_on_gpu = 0;
    on_its_device = true;
  }
} given;

}  // namespace

// MPI's profiling interface: the product calls these instead of MPI's own, and MPI becomes CUDA-aware.
extern "C" int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  const std::byte* const on_gpu = WalledBytes::reach(buffer);
  if (on_gpu == nullptr) {
    given.most_sent_from_host = std::max<std::int64_t>(given.most_sent_from_host, count);
  } else {
    given.sent_from_gpu += count;
    given.look_at_thread();
  }
  return PMPI_Isend(on_gpu != nullptr ? on_gpu : buffer, count, type, peer, tag, comm, request);
}

extern "C" int MPI_Irecv(void* buffer, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  std::byte* const on_gpu = WalledBytes::reach(buffer);
  if (on_gpu != nullptr) {
    given.received_on_gpu += count;
    given.look_at_thread();
  }
  return PMPI_Irecv(on_gpu != nullptr ? on_gpu : buffer, count, type, peer, tag, comm, request);
}

namespace annulus {
namespace {

struct Way {
  MpiOptions mpi;
  StagingOptions staging;
};

std::unique_ptr<Transport> make_transport(const TransportOptions& options, const Way& way) {
  return make_staged_transport(process->make_transport(options, way.mpi),
                               std::make_unique<support::WalledCopies>(2, kDevice), way.staging);
}

class PretendMpiRanks final : public Ranks {
 public:
  explicit PretendMpiRanks(Way way) : way_(way) {}
  int size() const override { return process->size(); }

  void run(const TransportOptions& options, const Body& body) override {
    try {
      body(std::make_unique<OnPretendGpu>(make_transport(options, way_), options.blocking));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }

 private:
  Way way_;
};

const Way kThroughHost{.mpi = {.cuda_aware = false}, .staging = {}};
const Way kStraight{.mpi = {.cuda_aware = true}, .staging = {}};
const Way kTinyPieces{.mpi = {.piece_bytes = 1000, .send_slots = 1, .receive_slots = 2, .cuda_aware = true},
                      .staging = {.piece_bytes = 70'001}};

RanksParam param(const std::string& name, const Way& way) {
  return {name, [way] { return std::make_unique<PretendMpiRanks>(way); }};
}
std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(MpiPretendGpu, Conformance,
                         ::testing::Values(param("through_host", kThroughHost), param("straight", kStraight),
                                           param("straight_tiny_pieces", kTinyPieces)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(MpiPretendGpu, ConformanceFaults,
                         ::testing::Values(param("through_host", kThroughHost), param("straight", kStraight)), name_of);

TEST(CudaAwareMpi, SaysWhatItIsAndTakes) {
  const bool alone = process->size() == 1;
  const MpiOptions small{.piece_bytes = 1000, .send_slots = 3, .receive_slots = 5};
  const auto make = [&](bool cuda_aware) {
    Way way{.mpi = small, .staging = {.piece_bytes = 2000}};
    way.mpi.cuda_aware = cuda_aware;
    return make_transport({}, way);
  };
  const auto straight = make(true), staged = make(false);
  EXPECT_EQ(straight->name(), "CUDA-aware mpi");
  EXPECT_EQ(straight->staging_bytes(), alone ? 0 : 8000 + 8000);
  EXPECT_EQ(straight->device_staging_bytes(), alone ? 0 : 8000);
  EXPECT_EQ(staged->name(), "staged mpi");
  EXPECT_EQ(staged->staging_bytes(), alone ? 0 : 8000 + 8000);
  EXPECT_EQ(staged->device_staging_bytes(), 0);
}

// Ranks that send each other messages of many pieces; what MPI was given for them.
void exchange_much(const Way& way) {
  PretendMpiRanks(way).run({}, [&](std::unique_ptr<Transport> transport) {
    given.forget();
    for (std::int64_t step = 0; step < 3; ++step) {
      Part part(Traffic(process->size(), 11, step, 20'000'000), process->rank(), process->size(), step);
      transport->post(part.exchange);
      transport->wait();
      part.check();
    }
    if (way.mpi.cuda_aware == true) {
      EXPECT_EQ(given.sent_from_gpu, transport->sent_bytes());
      EXPECT_EQ(given.received_on_gpu, transport->received_bytes());
      EXPECT_LT(given.most_sent_from_host, 2000);  // notes alone
      EXPECT_TRUE(given.on_its_device);
    } else {
      EXPECT_EQ(given.sent_from_gpu, 0);
      EXPECT_EQ(given.received_on_gpu, 0);
    }
  });
}

TEST(CudaAwareMpi, IsGivenEveryByteOnTheGpu) {
  exchange_much(kStraight);
  exchange_much(kTinyPieces);
}
TEST(CudaAwareMpi, IsGivenNoneWhereItMustNotBe) { exchange_much(kThroughHost); }

// Exchanges of host memory and texts go beside, through the slots of the host.
TEST(CudaAwareMpi, MemoryOfTheHostGoesAsEver) {
  const auto transport = make_transport({}, kStraight);
  given.forget();
  Part part(Traffic(process->size(), 12, 0, 1'000'000), process->rank(), process->size(), 0);
  transport->post(part.exchange);
  transport->wait();
  part.check();
  EXPECT_EQ(transport->all_gather("x").size(), static_cast<std::size_t>(process->size()));
  EXPECT_EQ(given.sent_from_gpu, 0);
  EXPECT_EQ(given.received_on_gpu, 0);
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(CudaAwareMpi, RanksMustAgree) {
  if (process->size() == 1) GTEST_SKIP() << "one rank has nobody to disagree with";
  Way way = kStraight;
  way.mpi.cuda_aware = process->rank() == 0;
  PretendMpiRanks(way).run({}, [](std::unique_ptr<Transport> transport) {
    support::expect_refused_as<TransportError>(
        [&] {
          for (std::int64_t step = 0; step < 100; ++step) {
            const int size = process->size(), rank = process->rank();
            Bytes out(1000), in(1000);
            transport->post(
                {.step = step,
                 .sends = {{.peer = (rank + 1) % size, .blocks = {{.data = out.data(), .run_bytes = 1000}}}},
                 .receives = {{.peer = (rank + size - 1) % size, .bytes = in}}});
            transport->wait();
          }
        },
        {"memory of their GPUs or none", "rank 0 that does", "at step 0", "MpiOptions::cuda_aware"});
  });
}

// A piece of lent memory between rank 0 and rank 1 in flight on rank 0, where its owner and the Pieces are gone:
// nothing but MPI knows of it. Tells what is left of the memory.
constexpr int kTag = 31'999;
constexpr int kPieceBytes = 4 << 20;  // far more than MPI sends before it is asked for

template <class Start>
std::weak_ptr<OwnedBytes> abandon(Start start) {
  auto memory = std::make_shared<WalledBytes>(kPieceBytes);
  std::byte* const reached = WalledBytes::reach(memory->bytes().data());
  for (std::uint64_t i = 0; i < kPieceBytes; ++i) reached[i] = payload_byte(6, i);
  MpiWorld world;
  world.comm = MPI_COMM_WORLD;
  Pieces pieces(world, kTag, 1, 1000);
  start(pieces, Pieces::Piece{.bytes = kPieceBytes, .peer = 1, .lent = {memory, memory->bytes().data()}});
  EXPECT_TRUE(pieces.collect().empty());
  return memory;
}

// It lives, and what MPI does later is done to it.
TEST(CudaAwareMpi, MemoryIsKeptWhileMpiMayReadIt) {
  if (process->size() == 1) GTEST_SKIP() << "one rank has nobody to send to";
  std::weak_ptr<OwnedBytes> memory;
  if (process->rank() == 0) memory = abandon([](Pieces& pieces, const Pieces::Piece& piece) { pieces.send(piece); });
  EXPECT_EQ(memory.expired(), process->rank() != 0);
  MPI_Barrier(MPI_COMM_WORLD);
  if (process->rank() == 1) {
    Bytes bytes(kPieceBytes);
    MPI_Recv(bytes.data(), kPieceBytes, MPI_BYTE, 0, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    EXPECT_EQ(first_wrong(bytes, 6), -1);
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(CudaAwareMpi, MemoryIsKeptWhileMpiMayWriteIt) {
  if (process->size() == 1) GTEST_SKIP() << "one rank has nobody to receive from";
  std::weak_ptr<OwnedBytes> memory;
  if (process->rank() == 0) memory = abandon([](Pieces& pieces, const Pieces::Piece& piece) { pieces.receive(piece); });
  MPI_Barrier(MPI_COMM_WORLD);
  if (process->rank() == 1) {
    const Bytes bytes(kPieceBytes, std::byte{9});
    MPI_Send(bytes.data(), kPieceBytes, MPI_BYTE, 0, kTag, MPI_COMM_WORLD);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (process->rank() != 0) return;
  const auto kept = memory.lock();
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(*WalledBytes::reach(&kept->bytes().back()), std::byte{9});
}

TEST(CudaAwareMpi, MemoryIsGivenBackWhenMpiIsDone) {
  if (process->size() == 1) GTEST_SKIP() << "one rank has nobody to receive from";
  if (process->rank() != 0) return;
  const auto memory = abandon([](Pieces& pieces, const Pieces::Piece& piece) {
    pieces.receive(piece);
    pieces.cancel_receives();
  });
  EXPECT_TRUE(memory.expired());
}

// Run with ANNULUS_MPI_CUDA set, to the same or not: what all ranks say, counts.
TEST(CudaAwareMpi, TheEnvironmentDecides) {
  const char* const text = std::getenv("ANNULUS_MPI_CUDA");
  int least = text == nullptr ? -1 : std::atoi(text);
  MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (least < 0) GTEST_SKIP() << "ANNULUS_MPI_CUDA is not set; MPI says " << (process->cuda_aware() ? "yes" : "no");
  EXPECT_EQ(process->cuda_aware(), least == 1);
  const auto transport = make_transport({}, {});
  EXPECT_EQ(transport->name(), least == 1 ? "CUDA-aware mpi" : "staged mpi");
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    annulus::MpiProcess process(&argc, &argv);
    return annulus::run_all_tests(process);
  } catch (const annulus::InvalidArgument& error) {
    std::cerr << error.what() << std::endl;
    return 2;
  }
}
