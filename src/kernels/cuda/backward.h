// Backward on a GPU: plan once, run on a stream as often as you like. The counterpart of forward.h.
//
//   cuda::Backward backward(problem, plan);
//   backward.run({.q = q, ..., .workspace = w}, stream)  // device pointers; returns when the work is queued
#pragma once

#include "kernels/cuda/forward.h"

namespace annulus::cuda {

// The backward kernels, best first.
inline constexpr KernelChoice kBackwardKernels[] = {
    {"sm90",
     "sm_90; bf16, fp16; head sizes 64, 128; scale between 1e-30 and 1e30; up to 12 branches; addresses and strides "
     "in multiples of 16 bytes",
     "copy engine and wgmma; dq is added up in fp32; deterministic: in order, or of several branches by a kernel of "
     "its own"},
    {"mma", "sm_80 and newer; every type; head sizes up to 256; any strides",
     "tensor cores by mma.sync, a pass for dq and one for dk and dv; the same bits run after run"},
    {"rows", "everything", "row by row: corners that no other takes, and rows whose result is not finite"},
};

struct BackwardOptions {
  std::string kernel = "auto";           // or one of kBackwardKernels: Unsupported where it does not fit
  bool deterministic = false;            // dq too has the same bits run after run
  std::vector<std::vector<int>> sweeps;  // for tests, as in ForwardOptions
  // For tests: regions share slots where they can, and a slot is taken again so many tiles behind the last of its
  // region (key_schedule.h); 0: they do not share. Negative: where that is fast.
  std::int64_t tiles_ahead = -1;
};

class Backward {
 public:
  // Takes a resolved problem and its plan; neither is kept.
  Backward(const Problem& problem, const Plan& plan, const BackwardOptions& options = {});
  ~Backward();
  Backward(Backward&&) noexcept;
  Backward& operator=(Backward&&) noexcept;

  // Arguments have been checked; tensors, lse and workspace are device memory.
  void run(const BackwardArgs& args, StreamHandle stream) const;

  std::vector<MemoryComponent> workspace() const;
  // The kernel that runs for tensors with addresses and strides in multiples of 16 bytes, and its sweeps.
  std::string kernel() const;
  std::string explain() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus::cuda
