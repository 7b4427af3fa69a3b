// The Hopper backward kernel's host side: tensor maps and the launch.
#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gradient_sm90.cuh"
#include "kernels/cuda/strided_maps_sm90.h"

namespace annulus::cuda::sm90 {
namespace {

constexpr int gradient_index(std::int64_t head_dim, bool causal) {
  for (int i = 0; i < static_cast<int>(std::size(kSm90GradientConfigs)); ++i)
    if (kSm90GradientConfigs[i].head_dim == head_dim && kSm90GradientConfigs[i].causal == causal) return i;
  return -1;
}

// Calls f.operator()<kConfig, T>() for the kernel of a problem.
template <class T, class F>
void with_config(int config, F f) {
  switch (config) {
    case 0:
      return f.template operator()<0, T>();
    case 1:
      return f.template operator()<1, T>();
    case 2:
      return f.template operator()<2, T>();
    default:
      return f.template operator()<3, T>();
  }
}
static_assert(std::size(kSm90GradientConfigs) == 4);
template <class F>
void with_kernel(DType dtype, std::int64_t head_dim, bool causal, F f) {
  const int config = gradient_index(head_dim, causal);
  if (dtype == DType::fp16) return with_config<__half>(config, f);
  with_config<__nv_bfloat16>(config, f);
}

template <int kBranches>
GradientParams<kBranches> make_params(const GradientLaunch& g, const LaunchShape& shape, int query_rows) {
  GradientParams<kBranches> params{};
  params.launch = g;
  const Launch& launch = g.common;
  const StridedMaps maps(shape.dtype, launch.tokens, launch.head_dim, shape.batch);
  for (int i = 0; i < shape.sweeps; ++i) {
    const int stride = launch.tiling.sweeps[i].stride;
    params.key[i] = maps.rows({launch.k, launch.k_stride, shape.kv_heads}, stride, Sm90GradientConfig::kKeyRows);
    params.value[i] = maps.rows({launch.v, launch.v_stride, shape.kv_heads}, stride, Sm90GradientConfig::kKeyRows);
  }
  for (int i = 0; i < launch.tiling.branch_count; ++i) {
    const int dilation = launch.tiling.branches[i].dilation;
    params.query[i] = maps.rows({launch.q, launch.q_stride, launch.heads}, dilation, query_rows);
    params.grad[i] = maps.rows({g.dout, g.dout_stride, launch.heads}, dilation, query_rows);
  }
  return params;
}

}  // namespace

bool takes_gradient(const Problem& problem, const DeviceInfo& device) {
  return device.compute_capability == 90 && problem.dtype != DType::fp32 &&
         gradient_index(problem.head_dim, problem.causal) >= 0 && *problem.scale > kLeastScale &&
         *problem.scale < 1 / kLeastScale && can_schedule(problem) &&
         problem.pattern.branches.size() <= kMaxGradientBranches;
}

TileShape gradient_tile_shape(const Problem& problem) {
  const Sm90GradientConfig& config = kSm90GradientConfigs[gradient_index(problem.head_dim, problem.causal)];
  return {Sm90GradientConfig::kKeyRows, config.query_rows};
}

int gradient_arrivals() { return 2; }

bool can_address(const GradientLaunch& g, const LaunchShape& shape) {
  const Launch& launch = g.common;
  const StridedMaps maps(shape.dtype, launch.tokens, launch.head_dim, shape.batch);
  return maps.can_address({launch.q, launch.q_stride, launch.heads}) &&
         maps.can_address({launch.k, launch.k_stride, shape.kv_heads}) &&
         maps.can_address({launch.v, launch.v_stride, shape.kv_heads}) &&
         maps.can_address({g.dout, g.dout_stride, launch.heads}) &&
         maps.can_address({g.dq, g.dq_stride, launch.heads}) && maps.can_address({g.dk, g.dk_stride, shape.kv_heads}) &&
         maps.can_address({g.dv, g.dv_stride, shape.kv_heads});
}

int prepare_gradient(const Problem& problem) {
  with_kernel(problem.dtype, problem.head_dim, problem.causal, [&]<int kConfig, class T>() {
    const auto raise = [](auto kernel, int bytes) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            "raise the shared memory of the kernel `sm90`");
    };
    const auto prepare = [&]<DqSums kSums, int kBranches>() {
      raise(gradient<kConfig, T, kSums, kBranches>, kGradientConfig<kConfig, kSums>.shared_bytes());
    };
    prepare.template operator()<DqSums::none, kMaxGradientBranches>();
    prepare.template operator()<DqSums::unordered, kMaxGradientBranches>();
    prepare.template operator()<DqSums::unordered, kFewBranches>();
    prepare.template operator()<DqSums::in_order, kFewBranches>();
  });
  return 1;
}

void launch_gradient(const GradientLaunch& g, const LaunchShape& shape, cudaStream_t stream) {
  with_kernel(shape.dtype, g.common.head_dim, g.causal, [&]<int kConfig, class T>() {
    const auto start = [&]<DqSums kSums, int kBranches>() {
      constexpr Sm90GradientConfig kC = kGradientConfig<kConfig, kSums>;
      cudaLaunchConfig_t config{};
      cudaLaunchAttribute attribute{};
      set_overlap(config, attribute, shape.overlaps);
      config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, g.common.tile_count));
      config.blockDim = kGradientThreads;
      config.dynamicSmemBytes = kC.shared_bytes();
      config.stream = stream;
      check(cudaLaunchKernelEx(&config, gradient<kConfig, T, kSums, kBranches>,
                               make_params<kBranches>(g, shape, kC.query_rows)),
            "start the kernel `sm90`");
    };
    if (g.dq_sums == nullptr) return start.template operator()<DqSums::none, kMaxGradientBranches>();
    if (g.tiles_added != nullptr) return start.template operator()<DqSums::in_order, kFewBranches>();
    if (g.common.tiling.branch_count <= kFewBranches)
      return start.template operator()<DqSums::unordered, kFewBranches>();
    start.template operator()<DqSums::unordered, kMaxGradientBranches>();
  });
}

}  // namespace annulus::cuda::sm90
