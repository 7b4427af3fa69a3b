// The yardstick on a GPU (kernels/peak.h): tensor cores in a loop that does nothing else, on random numbers, since
// zeros take less power and so run at a higher clock.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/forward.h"
#include "kernels/peak.h"

namespace annulus::cuda {

// Of the current device. 16-bit types as they are; fp32 as three 16-bit products, as the kernels do it.
Peak measure_peak(const DeviceInfo& device, DType dtype);

// One launch on all multiprocessors; returns its FLOP. `rounds` scales its length.
namespace sm90 {
double queue_products(DType dtype, int multiprocessors, int rounds, cudaStream_t stream);
}
namespace mma {
double queue_products(DType dtype, int multiprocessors, int rounds, cudaStream_t stream);
}

}  // namespace annulus::cuda
