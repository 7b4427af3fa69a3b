// The commands on a GPU: --device cuda. The backend is a library of its own, loaded when it is asked for and not
// before.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/files.h"
#include "cli/options.h"
#include "cli/report.h"
#include "cli/verification.h"
#include "kernels/cuda/backend.h"

namespace annulus::cli {

// Throws DeviceError where the library or a GPU is missing, and says which.
std::unique_ptr<cuda::Backend> load_cuda();

struct CudaTimes {
  std::int64_t repeats = 0;
  std::int64_t warmup = 0;
  double min_seconds = 0;
};

// Each returns an exit code, as the command does on the CPU.
int run_on_cuda(const CommandOptions& options, const Launch& launch, const FileOptions& files);
int bench_on_cuda(const CommandOptions& options, const Launch& launch, const CudaTimes& times);
// Throws Unsupported for what the GPU does not do yet: several ranks.
void check_cuda_launch(const Launch& launch);

// Forward of every kernel that takes the problem ("auto"), or of one, against the fp64 reference and run again. `step`
// is called kCudaVerifySteps times.
inline constexpr std::int64_t kCudaVerifySteps = 3;
std::vector<VerifyCheck> verify_on_cuda(const cuda::Backend& backend, const Problem& problem, const std::string& kernel,
                                        std::uint64_t seed, const std::function<void(const std::string&)>& step);

// As environment_json and describe have them for the CPU.
Json cuda_environment(const cuda::Backend& backend, const std::string& kernel);
std::string describe_on_cuda(const cuda::Backend& backend, const Problem& problem, const std::string& kernel);

// For `info`: the device, or why there is none.
std::string cuda_text();
Json cuda_json();

}  // namespace annulus::cli
