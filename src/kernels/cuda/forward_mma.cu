// The generic tensor-core kernel's host side.
#include <algorithm>

#include "kernels/cuda/attend_mma.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/forward_kernels.h"

namespace annulus::cuda::mma {
namespace {

// Head sizes that there are kernels for; others are filled up to the next one.
constexpr int kDims[] = {32, 64, 96, 128, 192, 256};

int padded_dim(std::int64_t head_dim) {
  for (const int dim : kDims)
    if (head_dim <= dim) return dim;
  return 0;
}

template <class T>
bool is_aligned(const Launch& launch, const LaunchShape& shape) {
  if (launch.meetings.tiles != nullptr) return launch.meetings.aligned;
  constexpr std::int64_t kUnit = 16 / sizeof(T);
  const auto fits = [&](const void* data, const Strides& stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride.token % kUnit == 0 && stride.head % kUnit == 0 &&
           (shape.batch == 1 || stride.batch % kUnit == 0);
  };
  return launch.head_dim % kUnit == 0 && fits(launch.q, launch.q_stride) && fits(launch.k, launch.k_stride) &&
         fits(launch.v, launch.v_stride);
}

// Calls f.operator()<T, kDim, kWide>() for the kernel of a type and a head size.
template <class T, class F>
void with_dim(int dim, bool wide, F f) {
  constexpr bool kSplit = std::is_same_v<T, float>;
  const auto call = [&]<int kDim>() {
    if constexpr (may_be_wide(kSplit, kDim))
      if (wide) return f.template operator()<T, kDim, true>();
    f.template operator()<T, kDim, false>();
  };
  switch (dim) {
    case 32:
      return call.template operator()<32>();
    case 64:
      return call.template operator()<64>();
    case 96:
      return call.template operator()<96>();
    case 128:
      return call.template operator()<128>();
    case 192:
      return call.template operator()<192>();
    default:
      return call.template operator()<256>();
  }
}
template <class F>
void with_kernel(DType dtype, std::int64_t head_dim, bool wide, F f) {
  const int dim = padded_dim(head_dim);
  if (dtype == DType::fp32) return with_dim<float>(dim, wide, f);
  if (dtype == DType::fp16) return with_dim<__half>(dim, wide, f);
  with_dim<__nv_bfloat16>(dim, wide, f);
}

bool fits(const MmaConfig& config, const DeviceInfo& device) {
  const int bytes = config.shared_bytes(config.key_rows());
  return bytes + static_cast<int>(sizeof(Tile)) + 1024 <= device.shared_bytes;  // 1 KiB is the system's own
}

MmaConfig config_of(const Problem& problem, const DeviceInfo& device) {
  const bool split = problem.dtype == DType::fp32;
  const int dim = padded_dim(problem.head_dim);
  const MmaConfig wide = make_config(split, dim, true);
  return may_be_wide(split, dim) && fits(wide, device) ? wide : make_config(split, dim, false);
}

}  // namespace

bool takes(const Problem& problem, const DeviceInfo& device) {
  return device.compute_capability >= 80 && padded_dim(problem.head_dim) != 0 && can_schedule(problem) &&
         fits(config_of(problem, device), device);
}

TileShape tile_shape(const Problem& problem, const DeviceInfo& device) {
  const MmaConfig config = config_of(problem, device);
  return {config.query_rows(), config.key_rows()};
}

int prepare(const Problem& problem, const DeviceInfo& device) {
  int blocks = 0;
  with_kernel(problem.dtype, problem.head_dim, config_of(problem, device).wide, [&]<class T, int kDim, bool kWide>() {
    using Shape = Layout<T, kDim, kWide>;
    check(cudaFuncSetAttribute(forward<T, kDim, kWide>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
          "raise the shared memory of the kernel `mma`");
    check(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, forward<T, kDim, kWide>, Shape::kThreads, Shape::kBytes),
        "fit the kernel `mma` into a multiprocessor");
  });
  return std::max(blocks, 1);
}

void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream) {
  const bool wide = launch.tiling.shape.query_rows > make_config(false, launch.head_dim, false).query_rows();
  with_kernel(shape.dtype, launch.head_dim, wide, [&]<class T, int kDim, bool kWide>() {
    using Shape = Layout<T, kDim, kWide>;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, launch.tile_count));
    config.blockDim = Shape::kThreads;
    config.dynamicSmemBytes = Shape::kBytes;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, forward<T, kDim, kWide>, launch, is_aligned<T>(launch, shape)),
          "start the kernel `mma`");
  });
}

}  // namespace annulus::cuda::mma
