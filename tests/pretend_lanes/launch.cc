// How kernels are started on lanes, and the driver's functions that the backend asks the runtime for.
#include <cuda.h>
#include <cuda_runtime.h>

#include <string_view>
#include <utility>

#include "pretend_lanes/machine.h"
#include "support/pretend_gpu.h"

cudaError_t annulus_queue_kernel(const cudaLaunchConfig_t& config, std::function<void()> kernel) {
  annulus::support::PretendStream::at(config.stream)
      .queue([grid = annulus::machine::Grid{config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes,
                                            std::move(kernel)}] { annulus::machine::run(grid); });
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool is_known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = is_known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
