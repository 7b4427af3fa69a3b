// The conformance suite under mpirun on GPU memory: every process runs the same tests at the same time. All processes
// may share one GPU. Failures are added up over ranks, and say on which rank they were.
#include <iostream>

#include "annulus/device_transports.h"
#include "annulus/mpi.h"
#include "transport/cuda/on_gpu.h"
#include "transport/mpi_world.h"

namespace annulus {
namespace {

MpiProcess* process = nullptr;

int device() {
  int count = 1;
  cuda::check(cudaGetDeviceCount(&count), "count devices");
  return process->rank() % count;
}

using Make = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;

class MpiGpuRanks final : public Ranks {
 public:
  explicit MpiGpuRanks(Make make) : make_(std::move(make)) {}
  int size() const override { return process->size(); }

  void run(const TransportOptions& options, const Body& body) override {
    try {
      body(std::make_unique<OnGpu>(make_(process->make_transport(options)), options.blocking));
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }

 private:
  Make make_;
};

RanksParam param(const std::string& name, const Make& make) {
  return {name, [make] { return std::make_unique<MpiGpuRanks>(make); }};
}

std::string name_of(const ::testing::TestParamInfo<RanksParam>& info) { return info.param.name; }

const RanksParam kStaged =
    param("staged", [](std::unique_ptr<Transport> host) { return make_staged_transport(std::move(host), device()); });
INSTANTIATE_TEST_SUITE_P(MpiGpu, Conformance, ::testing::Values(kStaged), name_of);
INSTANTIATE_TEST_SUITE_P(MpiGpu, ConformanceFaults, ::testing::Values(kStaged), name_of);

class FailurePrinter final : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed())
      std::cerr << "rank " << process->rank() << ": " << result.file_name() << ":" << result.line_number() << ": "
                << result.message() << std::endl;
  }
};

int run_all_tests() {
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (process->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailurePrinter);
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return failed;
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  annulus::MpiProcess process(&argc, &argv);
  annulus::process = &process;
  return annulus::run_on_gpu(annulus::run_all_tests);
}
