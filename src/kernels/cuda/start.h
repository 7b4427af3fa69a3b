// How kernels are started that need blocks and threads and nothing else.
#pragma once

#include <cstdint>

#include "kernels/cuda/check.h"

namespace annulus::cuda {

// `what` completes "could not ...".
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), std::int64_t blocks, int threads, cudaStream_t stream, const char* what,
           const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace annulus::cuda
