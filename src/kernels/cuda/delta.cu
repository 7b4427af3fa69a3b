// Delta of eq. 7 before the backward kernels, at the rate of memory; counters and sums of dq begin at 0.
#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/start.h"

namespace annulus::cuda::delta {
namespace {

constexpr int kWarps = 8;

// A warp has a run. Neighbours have the same rows of other heads, which lie beside each other. kDim: of rows of 16-byte
// pieces, or 0.
template <class T, int kDim>
__global__ void __launch_bounds__(kWarps * 32) deltas(const __grid_constant__ GradientLaunch g) {
  ptx::let_next_start();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * (kWarps * 32) + threadIdx.x;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * (kWarps * 32);
  if (thread == 0) *g.common.control = Control{};
  for (std::int64_t i = thread; g.regions.ended != nullptr && i < g.regions.count; i += threads) {
    g.regions.ended[i] = 0;
    if (g.regions.rounded != nullptr) g.regions.rounded[i] = 0;
  }
  const std::int64_t index = thread / 32;
  if (index >= g.regions.count * g.regions.runs) return;
  const int kv_heads = g.regions.kv_heads;
  const std::int64_t window = index / kv_heads / g.regions.runs;
  const Run run = run_of(g, window * kv_heads + index % kv_heads, static_cast<int>(index / kv_heads % g.regions.runs));
  clear_sums(g, run, lane);
  if constexpr (kDim > 0)
    make_deltas_by_16<T, kDim>(g, run, lane);
  else
    make_deltas<T>(g, run, lane);
}

bool is_aligned(const void* data, const Strides& stride, bool is_alone) {  // to 16 bytes, of 16-bit types
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride.token % 8 == 0 && stride.head % 8 == 0 &&
         (is_alone || stride.batch % 8 == 0);
}

bool has_pieces_of_16(const GradientLaunch& g) {
  const bool is_alone = g.regions.count == std::int64_t{g.regions.windows} * g.regions.kv_heads;  // one batch
  return is_aligned(g.forward_out, g.forward_out_stride, is_alone) && is_aligned(g.dout, g.dout_stride, is_alone);
}

template <class T>
void launch_as(const GradientLaunch& g, cudaStream_t stream) {
  const std::int64_t runs = g.regions.count * g.regions.runs;
  const auto start_one = [&](auto kernel) {
    start(kernel, (runs + kWarps - 1) / kWarps, kWarps * 32, stream, "start the kernel of Delta", g);
  };
  if constexpr (sizeof(T) == 2)
    if (has_pieces_of_16(g)) {
      if (g.common.head_dim == 64) return start_one(deltas<T, 64>);
      if (g.common.head_dim == 128) return start_one(deltas<T, 128>);
    }
  start_one(deltas<T, 0>);
}

}  // namespace

void launch(const GradientLaunch& g, DType dtype, cudaStream_t stream) {
  if (dtype == DType::fp32) return launch_as<float>(g, stream);
  if (dtype == DType::fp16) return launch_as<__half>(g, stream);
  launch_as<__nv_bfloat16>(g, stream);
}

}  // namespace annulus::cuda::delta
