// The passes of a problem on the device that the options name.
#pragma once

#include <memory>

#include "kernels/passes.h"
#include "plan/plan.h"

namespace annulus {

// Problem and plan must outlive the passes.
std::unique_ptr<Passes> make_passes(const Problem& problem, const Plan& plan, const Options& options);

}  // namespace annulus
