// Backward (eq. 6 to 8), in two forms that share their tiles and give every result in a fixed order:
//   fused   one pass of five products; dq, dk and dv are summed in memory, in fp32. For fp32, where the outputs
//           themselves serve, and wherever keys come in several steps
//   split   bf16, fp16: a pass for dq and one for dk and dv, seven products; sums stay in fp32 scratch until they are
//           complete, since a 16-bit output cannot hold a partial sum and a whole fp32 copy would cost memory that
//           grows with the sequence
#pragma once

#include "annulus/attention.h"
#include "kernels/cpu/context.h"
#include "kernels/workspace.h"

namespace annulus::cpu {

// Delta of eq. 7, or of eq. 8 for every branch: [branches or 1, batch, heads, tokens].
struct Deltas {
  float* data = nullptr;
  std::int64_t branch_stride = 0;  // 0: one Delta for all branches

  float* of_branch(std::int64_t branch) const { return data + branch * branch_stride; }
};

// Phases of backward. Each lays its tiles into the same memory, or only measures them.
struct PhaseArgs {
  const BackwardArgs& args;
  const BackwardStep& step;
  Deltas deltas;
};
// This rank's own queries, as a branch sees them.
QueryTensors query_tensors(const Context& context, const PhaseArgs& phase, std::int64_t branch);

void detached_deltas(const Context& context, const PhaseArgs& phase, Carver& carver);
void backward_fused(const Context& context, const PhaseArgs& phase, Carver& carver);
void backward_split(const Context& context, const PhaseArgs& phase, Carver& carver);

std::vector<MemoryComponent> backward_workspace(const Context& context);
void backward(const Context& context, const BackwardArgs& args, const BackwardStep& step);
void delta(const Context& context, const BackwardArgs& args, int branch, const ConstTensorView& out);
const float* delta(const Context& context, const BackwardArgs& args);

}  // namespace annulus::cpu
