// The yardstick: how many FLOP/s the cores can do at most, measured by independent chains of the very instruction that
// the kernels live on. A benchmark that does not measure its own peak in the same run cannot say how good it is.
#pragma once

#include <string>

#include "annulus/tensor.h"

namespace annulus {

struct Peak {
  double flop_per_s = 0;    // of all `threads` together
  std::string instruction;  // "fp32 FMA", "bf16 dot product"
};

// Best of several short rounds, on `threads` threads at once. For fp16, and for bf16 where the instruction set has no
// dot product, the sums are fp32 FMAs.
Peak measure_peak(const std::string& instruction_set, DType dtype, int threads);

}  // namespace annulus
