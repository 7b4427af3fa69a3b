// Forward on a GPU: plan once, run on a stream as often as you like.
//
//   cuda::Forward forward(problem, plan);              // chooses kernels, puts its tables on the current device
//   forward.run({.q = q, ..., .workspace = w}, stream) // device pointers; returns when the work is queued
//
// run allocates nothing, synchronises nothing and may be called concurrently on distinct outputs and workspaces.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "plan/plan.h"

struct CUstream_st;

namespace annulus::cuda {

using StreamHandle = CUstream_st*;  // cudaStream_t

struct DeviceInfo {
  std::string name;
  std::string id;              // of this one among all, by whatever number a process knows it
  int compute_capability = 0;  // 90: sm_90
  int multiprocessors = 0;
  int shared_bytes = 0;  // that one block may have
  std::int64_t memory_bytes = 0;
  std::int64_t free_bytes = 0;
  int driver_version = 0;  // 13000: CUDA 13.0
};

// Of the current device. Throws DeviceError where there is none.
DeviceInfo device_info();

// The forward kernels, best first, and what each of them takes.
struct KernelChoice {
  const char* name;
  const char* takes;
  const char* why;
};
inline constexpr KernelChoice kKernels[] = {
    {"sm90", "sm_90; bf16, fp16; head sizes 64, 128; scale > 0; addresses and strides in multiples of 16 bytes",
     "copy engine and wgmma: the rate of the best dense kernels"},
    {"mma", "sm_80 and newer; every type; head sizes up to 256; any strides",
     "tensor cores by mma.sync; fp32 as three fp16 products"},
    {"rows", "everything", "row by row: corners that no other takes, and rows whose result is not finite"},
};

struct ForwardOptions {
  std::string kernel = "auto";           // or one of kKernels, for debugging: Unsupported where it does not fit
  std::vector<std::vector<int>> sweeps;  // for tests: which branches go through one running softmax; empty: chosen
};

class Forward {
 public:
  // Takes a resolved problem and its plan; neither is kept.
  Forward(const Problem& problem, const Plan& plan, const ForwardOptions& options = {});
  ~Forward();
  Forward(Forward&&) noexcept;
  Forward& operator=(Forward&&) noexcept;

  // Arguments have been checked; tensors, lse and workspace are device memory.
  void run(const ForwardArgs& args, StreamHandle stream) const;

  std::vector<MemoryComponent> workspace() const;
  // The kernel that runs for tensors with addresses and strides in multiples of 16 bytes, and its sweeps.
  std::string kernel() const;
  std::string explain() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus::cuda
