#include "kernels/cuda/load.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace annulus {

std::unique_ptr<Kernels> make_kernels(const Problem& problem, const Plan& plan, const Options& options,
                                      const Shard& shard) {
  const Device device = parse_device(options.device);
  if (!device.is_gpu) return make_cpu_kernels(problem, plan, options, shard);
  const cuda::Backend& backend = cuda::load_backend();
  cuda::PassOptions chosen;
  chosen.device = device.index ? *device.index : backend.current_device();
  if (!options.instruction_set.empty()) chosen.kernel = options.instruction_set;
  chosen.deterministic = options.deterministic;
  return backend.kernels(problem, plan, chosen, shard);
}

}  // namespace annulus
