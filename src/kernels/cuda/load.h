// Finds the CUDA backend. Part of libannulus, which has no CUDA in it.
#pragma once

#include "kernels/cuda/backend.h"

namespace annulus::cuda {

// Loads libannulus_cuda.so, which lies beside this library, on the first call; it stays loaded. Throws DeviceError
// where there is none.
const Backend& load_backend();

}  // namespace annulus::cuda
