// What the chooser of strategies should know of a device.
#pragma once

#include "annulus/attention.h"
#include "kernels/device.h"
#include "plan/choice.h"

namespace annulus {

// On a GPU rows that have travelled meet by `mma`, whole groups by the best kernel that there is.
inline Rates rates_of(const Options& options) {
  Rates rates;
  rates.favours_whole_groups = parse_device(options.device).is_gpu;
  return rates;
}

}  // namespace annulus
