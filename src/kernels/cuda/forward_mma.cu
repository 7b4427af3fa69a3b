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
  constexpr std::int64_t kUnit = 16 / sizeof(T);
  const auto fits = [&](const void* data, const Strides& stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride.token % kUnit == 0 && stride.head % kUnit == 0 &&
           (shape.batch == 1 || stride.batch % kUnit == 0);
  };
  return launch.head_dim % kUnit == 0 && fits(launch.q, launch.q_stride) && fits(launch.k, launch.k_stride) &&
         fits(launch.v, launch.v_stride);
}

// Calls f.operator()<T, kDim>() for the kernel of a type and a head size.
template <class T, class F>
void with_dim(int dim, F f) {
  switch (dim) {
    case 32:
      return f.template operator()<T, 32>();
    case 64:
      return f.template operator()<T, 64>();
    case 96:
      return f.template operator()<T, 96>();
    case 128:
      return f.template operator()<T, 128>();
    case 192:
      return f.template operator()<T, 192>();
    default:
      return f.template operator()<T, 256>();
  }
}
template <class F>
void with_kernel(DType dtype, std::int64_t head_dim, F f) {
  const int dim = padded_dim(head_dim);
  if (dtype == DType::fp32) return with_dim<float>(dim, f);
  if (dtype == DType::fp16) return with_dim<__half>(dim, f);
  with_dim<__nv_bfloat16>(dim, f);
}

}  // namespace

bool takes(const Problem& problem, const DeviceInfo& device) {
  const int dim = padded_dim(problem.head_dim);
  if (device.compute_capability < 80 || dim == 0 || !can_schedule(problem)) return false;
  const int element_bytes = static_cast<int>(size_of(problem.dtype));
  const int bytes = shared_bytes(element_bytes, dim, key_rows(element_bytes, dim));
  return bytes + static_cast<int>(sizeof(Tile)) + 1024 <= device.shared_bytes;  // 1 KiB is the system's own
}

TileShape tile_shape(const Problem& problem) {
  const int dim = padded_dim(problem.head_dim);
  return {query_rows(dim), key_rows(static_cast<int>(size_of(problem.dtype)), dim)};
}

int prepare(const Problem& problem) {
  int blocks = 0;
  with_kernel(problem.dtype, problem.head_dim, [&]<class T, int kDim>() {
    constexpr int kBytes = Layout<T, kDim>::kBytes;
    check(cudaFuncSetAttribute(forward<T, kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
          "raise the shared memory of the kernel `mma`");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, forward<T, kDim>, kThreads, kBytes),
          "fit the kernel `mma` into a multiprocessor");
  });
  return std::max(blocks, 1);
}

void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream) {
  with_kernel(shape.dtype, launch.head_dim, [&]<class T, int kDim>() {
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, launch.tile_count));
    config.blockDim = kThreads;
    config.dynamicSmemBytes = Layout<T, kDim>::kBytes;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, forward<T, kDim>, launch, is_aligned<T>(launch, shape)),
          "start the kernel `mma`");
  });
}

}  // namespace annulus::cuda::mma
