// A local part on Hopper: the kernels that take all its branches at once, with what they make kept in fp32 between the
// steps of a rank.
#pragma once

#include <memory>
#include <optional>

#include "kernels/cuda/forward.h"
#include "kernels/cuda/local_part.h"
#include "kernels/cuda/row_ops.h"
#include "kernels/workspace.h"

namespace annulus::cuda {

class FusedPart {
 public:
  // `rows`: of the rank's memory.
  FusedPart(const LocalPart& part, std::int64_t rows, const DeviceInfo& device, bool with_backward);
  ~FusedPart();

  bool has_backward() const;
  struct Memory {
    Control* control = nullptr;  // zeroed before every launch, with the sets behind it
    unsigned* sets = nullptr;
    std::int64_t counter_bytes = 0;
    float2* seen = nullptr;  // of each row of keys: whether its sums have begun
    float* dq_sums = nullptr;
    float* lse_copy = nullptr;  // as GradientLaunch has them
    float* delta_copy = nullptr;
    float* lse = nullptr;  // of the part's rows alone, where it does not have all
    float* delta = nullptr;
  };
  Memory carve(Pass pass, Carver& carver) const;

  // Goes on from the states, whose maxima are, and stay, in the units of these kernels: 1 / log2_scale() of log2 units.
  // False, and nothing is done, where the copy engine cannot follow these tensors.
  bool forward(const ForwardArgs& args, const ops::States& states, const Memory& memory, cudaStream_t stream) const;
  float log2_scale() const;

  // dq += , and dk, dv are set where the part has keys; those two lie together, row by row. `delta` as `lse`,
  // [batch, heads, rows], one for each branch of the problem, delta_stride apart. Likewise false.
  struct Gradients {
    const float* delta = nullptr;
    std::int64_t delta_stride = 0;
    GradientSums sums;  // of all the rank's rows
  };
  bool backward(const BackwardArgs& args, const Gradients& gradients, const Memory& memory, cudaStream_t stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus::cuda
