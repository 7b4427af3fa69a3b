// The Hopper kernel's host side: tensor maps and the launch.
#include "kernels/cuda/attend_sm90.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/forward_kernels.h"
#include "kernels/cuda/strided_maps_sm90.h"

namespace annulus::cuda::sm90 {
namespace {

constexpr int config_index(std::int64_t head_dim, bool causal) {
  for (int i = 0; i < static_cast<int>(std::size(kSm90Configs)); ++i)
    if (kSm90Configs[i].head_dim == head_dim && kSm90Configs[i].causal == causal) return i;
  return -1;
}

// Calls f.operator()<kConfig, T, kCounts>() for the kernel of a problem.
template <class T, class F>
void with_config(int config, bool counts, F f) {
  const auto call = [&]<int kConfig>() {
    counts ? f.template operator()<kConfig, T, true>() : f.template operator()<kConfig, T, false>();
  };
  switch (config) {
    case 0:
      return call.template operator()<0>();
    case 1:
      return call.template operator()<1>();
    case 2:
      return call.template operator()<2>();
    default:
      return call.template operator()<3>();
  }
}
static_assert(std::size(kSm90Configs) == 4);
template <class F>
void with_kernel(DType dtype, std::int64_t head_dim, bool causal, bool counts, F f) {
  const int config = config_index(head_dim, causal);
  if (dtype == DType::fp16) return with_config<__half>(config, counts, f);
  with_config<__nv_bfloat16>(config, counts, f);
}

Params make_params(const Launch& launch, const LaunchShape& shape, int key_rows) {
  Params params{};
  params.common = launch;
  const StridedMaps maps(shape.dtype, launch.tokens, launch.head_dim, shape.batch);
  for (int i = 0; i < shape.sweeps; ++i)
    params.query[i] = maps.rows({launch.q, launch.q_stride, launch.heads}, launch.tiling.sweeps[i].stride, 64);
  for (int i = 0; i < launch.tiling.branch_count; ++i) {
    const int dilation = launch.tiling.branches[i].dilation;
    params.key[i] = maps.rows({launch.k, launch.k_stride, shape.kv_heads}, dilation, key_rows);
    params.value[i] = maps.rows({launch.v, launch.v_stride, shape.kv_heads}, dilation, key_rows);
  }
  return params;
}

}  // namespace

bool takes(const Problem& problem, const DeviceInfo& device) {
  return device.compute_capability == 90 && problem.dtype != DType::fp32 &&
         config_index(problem.head_dim, problem.causal) >= 0 && *problem.scale > 0 && can_schedule(problem);
}

TileShape tile_shape(const Problem& problem) {
  const Sm90Config& config = kSm90Configs[config_index(problem.head_dim, problem.causal)];
  return {config.query_rows(), config.key_rows};
}

int arrivals(const Problem& problem) { return kSm90Configs[config_index(problem.head_dim, problem.causal)].groups; }

bool can_address(const Launch& launch, const LaunchShape& shape) {
  const StridedMaps maps(shape.dtype, launch.tokens, launch.head_dim, shape.batch);
  return maps.can_address({launch.q, launch.q_stride, launch.heads}) &&
         maps.can_address({launch.k, launch.k_stride, shape.kv_heads}) &&
         maps.can_address({launch.v, launch.v_stride, shape.kv_heads}) &&
         maps.can_address({launch.out, launch.out_stride, launch.heads});
}

int prepare(const Problem& problem) {
  for (const bool counts : {false, true})
    with_kernel(problem.dtype, problem.head_dim, problem.causal, counts, [&]<int kConfig, class T, bool kCounts>() {
      check(cudaFuncSetAttribute(forward<kConfig, T, kCounts>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSm90Configs[kConfig].shared_bytes()),
            "raise the shared memory of the kernel `sm90`");
    });
  return 1;
}

void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream) {
  with_kernel(shape.dtype, launch.head_dim, launch.tiling.causal, launch.tiling.folds,
              [&]<int kConfig, class T, bool kCounts>() {
                constexpr Sm90Config kC = kSm90Configs[kConfig];
                cudaLaunchConfig_t config{};
                config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, launch.tile_count));
                config.blockDim = kC.threads();
                config.dynamicSmemBytes = kC.shared_bytes();
                config.stream = stream;
                check(
                    cudaLaunchKernelEx(&config, forward<kConfig, T, kCounts>, make_params(launch, shape, kC.key_rows)),
                    "start the kernel `sm90`");
              });
}

}  // namespace annulus::cuda::sm90
