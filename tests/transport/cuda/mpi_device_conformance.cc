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

using Make = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>, const TransportOptions&)>;

class MpiGpuRanks final : public Ranks {
 public:
  explicit MpiGpuRanks(Make make) : make_(std::move(make)) {}
  int size() const override { return process->size(); }

  void run(const TransportOptions& options, const Body& body) override {
    try {
      body(std::make_unique<OnGpu>(make_(process->make_transport(options), options), options.blocking));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }

 private:
  Make make_;
};

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

std::unique_ptr<Transport> staged(std::unique_ptr<Transport> host, const TransportOptions&) {
  return make_staged_transport(std::move(host), device());
}

Make nccl(std::int64_t staging_bytes) {
  return [=](std::unique_ptr<Transport> control, const TransportOptions& options) {
    return make_nccl_transport(std::move(control), device(),
                               {.timeout = options.timeout, .staging_bytes = staging_bytes});
  };
}

RanksParam param(const std::string& name, const Make& make, bool tells_by_tokens) {
  return {name, [make] { return std::make_unique<MpiGpuRanks>(make); }, true, tells_by_tokens};
}

const RanksParam kStaged = param("staged", staged, false);
const RanksParam kNccl = param("nccl", nccl(64 << 20), true);
const RanksParam kTinyPieces = param("nccl_tiny_pieces", nccl(100'000), true);
INSTANTIATE_TEST_SUITE_P(MpiGpu, Conformance, ::testing::Values(kStaged, kNccl, kTinyPieces), name_of);
INSTANTIATE_TEST_SUITE_P(MpiGpu, ConformanceFaults, ::testing::Values(kStaged, kNccl), name_of);

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
