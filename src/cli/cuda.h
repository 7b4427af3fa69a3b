// The commands on a GPU: --device cuda. Problems are computed through annulus::Attention, as any program would; what
// the tool needs beside that (memory of the device, its clock) comes from the backend.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cli/files.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/verification.h"
#include "kernels/cuda/load.h"

namespace annulus::cli {

// The device that --device names. Throws DeviceError where the backend or a GPU is missing, and says which.
class Gpu {
 public:
  explicit Gpu(const MachineOptions& options);

  const cuda::Backend& backend() const { return backend_; }
  int index() const { return index_; }
  int threads() const { return threads_; }  // of the host, for what is drawn, judged and summed up there
  cuda::DeviceInfo info() const { return backend_.info(index_); }
  Options options(const std::string& kernel, bool deterministic) const;  // for Attention

 private:
  const cuda::Backend& backend_;
  int index_;
  int threads_;
};

struct CudaTimes {
  std::int64_t repeats = 0;
  std::int64_t warmup = 0;
  double min_seconds = 0;
};

// Each returns an exit code, as the command does on the CPU.
int run_on_cuda(const CommandOptions& options, const Launch& launch, const FileOptions& files);
int bench_on_cuda(const CommandOptions& options, const CudaTimes& times);

struct VerifyOnGpu {
  std::string kernel = "auto";  // every kernel that takes the problem
  bool deterministic = false;
  std::uint64_t seed = 0;
};

// Forward and backward against the fp64 reference and run again. `step` is called kCudaVerifySteps times.
inline constexpr std::int64_t kCudaVerifySteps = 3;
std::vector<VerifyCheck> verify_on_cuda(const Gpu& gpu, const Problem& problem, const VerifyOnGpu& how,
                                        const std::function<void(const std::string&)>& step);

// As environment_json and describe have them for the CPU.
Json cuda_environment(const Gpu& gpu, const std::string& kernel, const Launch& launch = {});
std::string describe_on_cuda(const Gpu& gpu, const Problem& problem, const std::string& kernel);

// Of one rank, on whatever it computes.
int threads_of(const RankAttention& attention, const Rank& rank);  // of the host
Json problem_of(const CommandOptions& options, const RankAttention& attention, const Rank& rank);
Json environment_of(const RankAttention& attention, const Launch& launch, const Rank& rank);
std::string describe_machine(const RankAttention& attention, const Rank& rank);  // and the problem
Peak peak_of_gpu(const std::string& device, DType dtype);

// For `info`: the device, or why there is none.
std::string cuda_text();
Json cuda_json();
bool has_nccl();  // and a GPU

}  // namespace annulus::cli
