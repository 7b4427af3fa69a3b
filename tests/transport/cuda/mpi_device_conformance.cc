// The conformance suite under mpirun on GPU memory. All processes may share one GPU.
#include <cstdlib>

#include "annulus/device_transports.h"
#include "transport/cuda/on_gpu.h"
#include "transport/mpi_tests.h"

namespace annulus {
namespace {

int device() {
  int count = 1;
  cuda::check(cudaGetDeviceCount(&count), "count devices");
  return process->rank() % count;
}

using Make = std::function<std::unique_ptr<Transport>(const TransportOptions&)>;

class MpiGpuRanks final : public Ranks {
 public:
  explicit MpiGpuRanks(Make make) : make_(std::move(make)) {}
  int size() const override { return process->size(); }

  void run(const TransportOptions& options, const Body& body) override {
    try {
      body(std::make_unique<OnGpu>(make_(options), options.blocking));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }

 private:
  Make make_;
};

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

Make staged(bool cuda_aware, std::int64_t piece_bytes) {
  return [=](const TransportOptions& options) {
    auto transport = make_staged_transport(process->make_transport(options, {.cuda_aware = cuda_aware}), device(),
                                           {.piece_bytes = piece_bytes});
    EXPECT_EQ(transport->name(), cuda_aware ? "CUDA-aware mpi" : "staged mpi");
    return transport;
  };
}

Make nccl(std::int64_t staging_bytes) {
  return [=](const TransportOptions& options) {
    return make_nccl_transport(process->make_transport(options), device(),
                               {.timeout = options.timeout, .staging_bytes = staging_bytes});
  };
}

RanksParam param(const std::string& name, const Make& make, bool tells_by_tokens) {
  return {name, [make] { return std::make_unique<MpiGpuRanks>(make); }, true, tells_by_tokens};
}

// Where MPI says so, or whoever starts the test does (ANNULUS_MPI_CUDA=1).
RanksParam cuda_aware(const std::string& name, std::int64_t piece_bytes) {
  RanksParam made = param(name, staged(true, piece_bytes), false);
  made.missing = [] { return std::string(process->cuda_aware() ? "" : "MPI does not say that it is CUDA-aware"); };
  return made;
}

const RanksParam kStaged = param("staged", staged(false, 4 << 20), false);
const RanksParam kCudaAware = cuda_aware("cuda_aware", 4 << 20);
const RanksParam kCudaAwareTinyPieces = cuda_aware("cuda_aware_tiny_pieces", 70'001);
const RanksParam kNccl = param("nccl", nccl(64 << 20), true);
const RanksParam kTinyPieces = param("nccl_tiny_pieces", nccl(100'000), true);
INSTANTIATE_TEST_SUITE_P(MpiGpu, Conformance,
                         ::testing::Values(kStaged, kCudaAware, kCudaAwareTinyPieces, kNccl, kTinyPieces), name_of);
INSTANTIATE_TEST_SUITE_P(MpiGpu, ConformanceFaults, ::testing::Values(kStaged, kCudaAware, kNccl), name_of);

// Run without an NCCL_HOSTID for each rank, on one GPU: every rank hears of it.
TEST(Nccl, TakesOneRankAGpu) {
  if (std::getenv("NCCL_HOSTID") != nullptr || process->size() == 1) GTEST_SKIP() << "ranks have GPUs of their own";
  int count = 0;
  cuda::check(cudaGetDeviceCount(&count), "count devices");
  if (count >= process->size()) GTEST_SKIP() << "ranks have GPUs of their own";
  support::expect_refused_as<Unsupported>([] { make_nccl_transport(process->make_transport(), device()); },
                                          {"one rank a GPU", "rank 0 and rank 1", "NCCL_HOSTID"});
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  annulus::MpiProcess process(&argc, &argv);
  // Processes that share a GPU pass for hosts of their own, unless only the refusal of that is tested.
  if (argc < 2 || std::string(argv[1]) != "refusal") {
    setenv("NCCL_HOSTID", ("annulus-" + std::to_string(process.rank())).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
  return annulus::run_on_gpu([&] { return annulus::run_all_tests(process); });
}
