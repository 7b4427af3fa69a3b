// The kernels of a rank (kernels/kernels.h) on a GPU. Where the rank's own rows meet each other in whole segments, the
// kernels for one GPU do the work; everything else goes by meetings.
#pragma once

#include <memory>

#include "kernels/cuda/backend.h"

namespace annulus::cuda {

// On the current device. Problem and plan must outlive the kernels.
std::unique_ptr<Kernels> make_rank_kernels(const Problem& problem, const Plan& plan, const PassOptions& options,
                                           const Shard& shard);

}  // namespace annulus::cuda
