// The generic backward kernels' host side.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/gradient_mma.cuh"

namespace annulus::cuda::mma {

using namespace gradients;

namespace {

// Head sizes that there are kernels for; others are filled up to the next one.
int gradient_dim(std::int64_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 0;
}

template <class T>
bool is_aligned(const GradientLaunch& g, const LaunchShape& shape) {
  constexpr std::int64_t kUnit = 16 / sizeof(T);
  const auto fits = [&](const void* data, const Strides& stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride.token % kUnit == 0 && stride.head % kUnit == 0 &&
           (shape.batch == 1 || stride.batch % kUnit == 0);
  };
  const Launch& launch = g.common;
  if (launch.meetings.tiles != nullptr) return launch.meetings.aligned;
  return launch.head_dim % kUnit == 0 && fits(launch.q, launch.q_stride) && fits(launch.k, launch.k_stride) &&
         fits(launch.v, launch.v_stride) && fits(g.dout, g.dout_stride);
}

// Calls f.operator()<T, kDim, kPart>() for a kernel.
template <class T, int kDim, class F>
void with_part(Part part, F f) {
  if (part == Part::deltas) return f.template operator()<T, kDim, Part::deltas>();
  if (part == Part::dq) return f.template operator()<T, kDim, Part::dq>();
  if constexpr (holds_both(sizeof(T), kDim)) {
    f.template operator()<T, kDim, Part::dk_dv>();
  } else {
    if (part == Part::dk) return f.template operator()<T, kDim, Part::dk>();
    f.template operator()<T, kDim, Part::dv>();
  }
}
template <class T, class F>
void with_dim(std::int64_t head_dim, Part part, F f) {
  const int dim = gradient_dim(head_dim);
  if (dim == 64) return with_part<T, 64>(part, f);
  if (dim == 128) return with_part<T, 128>(part, f);
  with_part<T, 256>(part, f);
}
template <class F>
void with_kernel(DType dtype, std::int64_t head_dim, Part part, F f) {
  if (dtype == DType::fp32) return with_dim<float>(head_dim, part, f);
  if (dtype == DType::fp16) return with_dim<__half>(head_dim, part, f);
  with_dim<__nv_bfloat16>(head_dim, part, f);
}

}  // namespace

bool takes_gradient(const Problem& problem, const DeviceInfo& device) {
  const int dim = gradient_dim(problem.head_dim);
  if (device.compute_capability < 80 || dim == 0 || !can_schedule(problem)) return false;
  const int element_bytes = static_cast<int>(size_of(problem.dtype));
  const int bytes = gradient_shared_bytes(element_bytes, dim, block_rows(element_bytes, dim));
  return bytes + static_cast<int>(sizeof(Tile)) + 1024 <= device.shared_bytes;  // 1 KiB is the system's own
}

TileShape gradient_tile_shape(const Problem& problem) {
  return {kTileRows, block_rows(static_cast<int>(size_of(problem.dtype)), gradient_dim(problem.head_dim))};
}

bool has_room_for_both(const Problem& problem) {
  return holds_both(static_cast<int>(size_of(problem.dtype)), gradient_dim(problem.head_dim));
}

int prepare_gradient(const Problem& problem, Part part) {
  int blocks = 0;
  with_kernel(problem.dtype, problem.head_dim, part, [&]<class T, int kDim, Part kPart>() {
    constexpr int kBytes = GradientLayout<T, kDim>::kBytes;
    check(cudaFuncSetAttribute(gradient<T, kDim, kPart>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
          "raise the shared memory of the kernel `mma`");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, gradient<T, kDim, kPart>, kThreads, kBytes),
          "fit the kernel `mma` into a multiprocessor");
  });
  return std::max(blocks, 1);
}

void launch_gradient(const GradientLaunch& launch, const LaunchShape& shape, Part part, cudaStream_t stream) {
  if (launch.common.tile_count == 0) return;
  with_kernel(shape.dtype, launch.common.head_dim, part, [&]<class T, int kDim, Part kPart>() {
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(shape.blocks, launch.common.tile_count));
    config.blockDim = kThreads;
    config.dynamicSmemBytes = GradientLayout<T, kDim>::kBytes;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, gradient<T, kDim, kPart>, launch, is_aligned<T>(launch, shape)),
          "start the kernel `mma`");
  });
}

}  // namespace annulus::cuda::mma
