// The host side of dQ alone on Hopper: tensor maps and the launch.
#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/dq_sm90.cuh"
#include "kernels/cuda/strided_maps_sm90.h"

namespace annulus::cuda::sm90 {
namespace {

constexpr int dq_index(std::int64_t head_dim, bool causal) {
  for (int i = 0; i < static_cast<int>(std::size(kSm90DqConfigs)); ++i)
    if (kSm90DqConfigs[i].head_dim == head_dim && kSm90DqConfigs[i].causal == causal) return i;
  return -1;
}

// Calls f.operator()<kConfig, T, kCounts>() for the kernel of a problem.
template <class T, class F>
void with_dq_config(int config, bool counts, F f) {
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
static_assert(std::size(kSm90DqConfigs) == 4);
template <class F>
void with_dq_kernel(DType dtype, std::int64_t head_dim, bool causal, bool counts, F f) {
  const int config = dq_index(head_dim, causal);
  if (dtype == DType::fp16) return with_dq_config<__half>(config, counts, f);
  with_dq_config<__nv_bfloat16>(config, counts, f);
}

DqParams make_dq_params(const GradientLaunch& g, const LaunchShape& shape, int key_rows) {
  DqParams params{};
  params.launch = g;
  const Launch& launch = g.common;
  const StridedMaps maps(shape.dtype, launch.tokens, launch.head_dim, shape.batch);
  for (int i = 0; i < shape.sweeps; ++i) {
    const int stride = launch.tiling.sweeps[i].stride;
    params.query[i] = maps.rows({launch.q, launch.q_stride, launch.heads}, stride, 64);
    params.grad[i] = maps.rows({g.dout, g.dout_stride, launch.heads}, stride, 64);
  }
  for (int i = 0; i < launch.tiling.branch_count; ++i) {
    const int dilation = launch.tiling.branches[i].dilation;
    params.key[i] = maps.rows({launch.k, launch.k_stride, shape.kv_heads}, dilation, key_rows);
    params.value[i] = maps.rows({launch.v, launch.v_stride, shape.kv_heads}, dilation, key_rows);
  }
  return params;
}

}  // namespace

TileShape dq_tile_shape(const Problem& problem) {
  return {Sm90DqConfig::kQueryRows, kSm90DqConfigs[dq_index(problem.head_dim, problem.causal)].key_rows};
}

int prepare_dq(const Problem& problem) {
  for (const bool counts : {false, true})
    with_dq_kernel(problem.dtype, problem.head_dim, problem.causal, counts, [&]<int kConfig, class T, bool kCounts>() {
      check(cudaFuncSetAttribute(dq_alone<kConfig, T, kCounts>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSm90DqConfigs[kConfig].shared_bytes()),
            "raise the shared memory of the kernel `sm90`");
    });
  return 1;
}

void launch_dq(const GradientLaunch& g, const LaunchShape& shape, cudaStream_t stream) {
  with_dq_kernel(
      shape.dtype, g.common.head_dim, g.causal, g.common.tiling.folds, [&]<int kConfig, class T, bool kCounts>() {
        constexpr Sm90DqConfig kC = kSm90DqConfigs[kConfig];
        cudaLaunchConfig_t config{};
        config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, g.common.tile_count));
        config.blockDim = kGradientThreads;
        config.dynamicSmemBytes = kC.shared_bytes();
        config.stream = stream;
        check(cudaLaunchKernelEx(&config, dq_alone<kConfig, T, kCounts>, make_dq_params(g, shape, kC.key_rows)),
              "start the kernel `sm90`");
      });
}

}  // namespace annulus::cuda::sm90
