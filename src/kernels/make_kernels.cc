#include "kernels/cuda/load.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

namespace annulus {

std::unique_ptr<Kernels> make_kernels(const Problem& problem, const Plan& plan, const Options& options,
                                      const Shard& shard) {
  if (!parse_device(options.device).is_gpu) return make_cpu_kernels(problem, plan, options, shard);
  return cuda::load_backend().kernels(problem, plan, cuda::pass_options(options), shard);
}

}  // namespace annulus
