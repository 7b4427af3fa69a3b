// Finds the CUDA backend. Part of libannulus, which has no CUDA in it.
#pragma once

#include "kernels/cuda/backend.h"

namespace annulus::cuda {

// Loads libannulus_cuda.so, which lies beside this library, on the first call; it stays loaded. Throws DeviceError
// where there is none.
const Backend& load_backend();

// Which GPU the options mean, and what they ask of it. Both load the backend.
int device_index(const std::string& device);  // "cuda" is the calling thread's current one
PassOptions pass_options(const Options& options);

}  // namespace annulus::cuda
