// Before and after the backward kernels, at the rate of memory: Delta of eq. 7, and dq rounded from its sums.
#include <algorithm>

#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/ptx.cuh"

namespace annulus::cuda::delta {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsAThread = 4;  // loads in flight
constexpr unsigned kAll = 0xffffffffu;

// A block has a run of rows of one head. Neighbours have the same rows of other heads, which lie beside each other.
struct Run {
  std::int64_t batch = 0, first = 0;
  int head = 0;
  __device__ Run(int rows, std::int64_t all_rows, int heads) {
    const auto runs = static_cast<unsigned>((all_rows + rows - 1) / rows), all_heads = static_cast<unsigned>(heads);
    head = static_cast<int>(blockIdx.x % all_heads);
    first = static_cast<std::int64_t>(blockIdx.x / all_heads % runs) * rows;
    batch = blockIdx.x / all_heads / runs;
  }
};

// As much of dq_sums, where there are any, as a run has rows; the last run of a head takes the rest.
__device__ void clear_sums(const GradientLaunch& g, const Run& run, int rows) {
  if (g.dq_sums == nullptr) return;
  const bool is_last = run.first + rows >= g.common.tokens;
  const std::int64_t head = (run.batch * g.common.heads + run.head) * g.sums.rows * g.common.head_dim;
  const std::int64_t count = (is_last ? g.sums.rows - run.first : rows) * g.common.head_dim / 4;
  auto* to = reinterpret_cast<float4*>(g.dq_sums + head + run.first * g.common.head_dim);
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) to[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}

__device__ float low(std::uint32_t x, __nv_bfloat16) { return __uint_as_float(x << 16); }
__device__ float high(std::uint32_t x, __nv_bfloat16) { return __uint_as_float(x & 0xffff0000u); }
__device__ float low(std::uint32_t x, __half) { return __low2float(*reinterpret_cast<const __half2*>(&x)); }
__device__ float high(std::uint32_t x, __half) { return __high2float(*reinterpret_cast<const __half2*>(&x)); }

template <class T>
__device__ float dot(const uint4& a, const uint4& b) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(low(x[i], T()), low(y[i], T()), sum);
    sum = fmaf(high(x[i], T()), high(y[i], T()), sum);
  }
  return sum;
}

__device__ void clear_control(const GradientLaunch& g) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *g.common.control = Control{};
}

// Delta of a position, and where the order of the sums is another one, both numbers there.
__device__ void put_numbers(const GradientLaunch& g, const Run& run, std::int64_t position, float delta) {
  const std::int64_t head = run.batch * g.common.heads + run.head, at = head * g.common.tokens + position;
  g.delta[at] = delta;
  if (g.lse_copy == nullptr) return;
  const std::int64_t ordered = head * g.number_rows + g.sums.row(static_cast<int>(position));
  g.lse_copy[ordered] = g.lse[at];
  g.delta_copy[ordered] = delta;
}

// 16 bytes a lane; dq_sums, where there are any, become 0.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) deltas_by_16(const __grid_constant__ GradientLaunch g, const void* out,
                                                         const Strides out_stride, const float factor) {
  constexpr int kLanes = kDim / 8, kStep = kThreads / kLanes;
  const Launch& launch = g.common;
  ptx::let_next_start();
  const Run run(kStep * kRowsAThread, launch.tokens, launch.heads);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const T* from = static_cast<const T*>(out) + run.batch * out_stride.batch + run.head * out_stride.head + lane * 8;
  const T* grad =
      static_cast<const T*>(g.dout) + run.batch * g.dout_stride.batch + run.head * g.dout_stride.head + lane * 8;
  clear_control(g);
  clear_sums(g, run, kStep * kRowsAThread);
  uint4 a[kRowsAThread] = {}, b[kRowsAThread] = {};
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i) {
    const std::int64_t row = run.first + threadIdx.x / kLanes + i * kStep;
    if (row >= launch.tokens) continue;
    a[i] = __ldcs(reinterpret_cast<const uint4*>(from + row * out_stride.token));
    b[i] = __ldcs(reinterpret_cast<const uint4*>(grad + row * g.dout_stride.token));
  }
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i) {
    const std::int64_t row = run.first + threadIdx.x / kLanes + i * kStep;
    float sum = dot<T>(a[i], b[i]);
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
    if (row < launch.tokens && lane == 0) put_numbers(g, run, row, sum * factor);
  }
}

// Any type, head size and stride: a warp a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    deltas(const __grid_constant__ GradientLaunch g, const void* out, const Strides out_stride, const float factor) {
  const Launch& launch = g.common;
  ptx::let_next_start();
  const Run run(kThreads / 32 * kRowsAThread, launch.tokens, launch.heads);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  clear_control(g);
  clear_sums(g, run, kThreads / 32 * kRowsAThread);
  for (int i = 0; i < kRowsAThread; ++i) {
    const std::int64_t row = run.first + threadIdx.x / 32 * kRowsAThread + i;
    if (row >= launch.tokens) return;
    const T* a =
        static_cast<const T*>(out) + run.batch * out_stride.batch + run.head * out_stride.head + row * out_stride.token;
    const T* b = static_cast<const T*>(g.dout) + run.batch * g.dout_stride.batch + run.head * g.dout_stride.head +
                 row * g.dout_stride.token;
    float sum = 0.0f;
    for (int e = lane; e < launch.head_dim; e += 32)
      sum = fmaf(static_cast<float>(a[e]), static_cast<float>(b[e]), sum);
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
    if (lane == 0) put_numbers(g, run, row, sum * factor);
  }
}

// Of 16 neighbours in dq_sums, four belong to a thread of the quad that added them: columns 2 c, 2 c + 1, and the same
// of the next 8. Here too a lane has four of them, and the quad trades so that each writes four neighbours of dq.
template <class T>
__global__ void __launch_bounds__(kThreads) rounded(const __grid_constant__ GradientLaunch g) {
  const Launch& launch = g.common;
  ptx::let_next_start();
  ptx::wait_for_previous();
  const int lanes = launch.head_dim / 4, step = kThreads / lanes;
  const Run run(step * kRowsAThread, g.sums.rows, launch.heads);
  const int lane = static_cast<int>(threadIdx.x) % lanes, row_in = static_cast<int>(threadIdx.x) / lanes;
  const float* sums = g.dq_sums + (run.batch * launch.heads + run.head) * g.sums.rows * launch.head_dim;
  float4 x[kRowsAThread] = {};
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i) {
    const int row = static_cast<int>(run.first) + row_in + i * step;
    if (row < g.sums.rows)
      x[i] = __ldcs(
          reinterpret_cast<const float4*>(sums + SumLayout::place(row, launch.head_dim, lane / 4 * 16) + lane % 4 * 4));
  }
  T* to = static_cast<T*>(g.dq) + run.batch * g.dq_stride.batch + run.head * g.dq_stride.head + lane * 4;
  const int quad = static_cast<int>(threadIdx.x) % 32 & ~3, own = lane % 4;
  float odd = 0.0f;  // NaN as soon as anything is not finite
#pragma unroll
  for (int i = 0; i < kRowsAThread; ++i) {
    const int row = static_cast<int>(run.first) + row_in + i * step, position = g.sums.position(row);
    const float4 y = {x[i].x * g.factor, x[i].y * g.factor, x[i].z * g.factor, x[i].w * g.factor};
    odd += y.x * 0.0f + y.y * 0.0f + y.z * 0.0f + y.w * 0.0f;
    const std::uint32_t here = ptx::pack<T>(y.x, y.y), next = ptx::pack<T>(y.z, y.w);
    const int from = quad + own * 2 % 4;
    const std::uint32_t a = __shfl_sync(kAll, here, from), b = __shfl_sync(kAll, here, from + 1);
    const std::uint32_t c = __shfl_sync(kAll, next, from), d = __shfl_sync(kAll, next, from + 1);
    const uint2 pair = own < 2 ? uint2{a, b} : uint2{c, d};
    if (row >= g.sums.rows || position >= launch.tokens) continue;
    __stcs(reinterpret_cast<uint2*>(to + position * g.dq_stride.token), pair);
  }
  if (__any_sync(kAll, !(odd == 0.0f)) && threadIdx.x % 32 == 0) launch.control->non_finite = 1;
}

bool is_aligned(const void* data, const Strides& stride, std::int64_t batch) {  // to 16 bytes, of 16-bit types
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride.token % 8 == 0 && stride.head % 8 == 0 &&
         (batch == 1 || stride.batch % 8 == 0);
}

template <class Kernel, class... Args>
void start(Kernel kernel, std::int64_t all_rows, int rows, const GradientLaunch& g, const LaunchShape& shape,
           cudaStream_t stream, Args... args) {
  const std::int64_t runs = (all_rows + rows - 1) / rows;
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  set_overlap(config, attribute, shape.overlaps);
  config.gridDim = static_cast<unsigned>(runs * g.common.heads * shape.batch);
  config.blockDim = kThreads;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, g, args...), "start the kernels of Delta");
}

template <class T>
void launch_as(const GradientLaunch& g, const void* out, const Strides& out_stride, float factor,
               const LaunchShape& shape, cudaStream_t stream) {
  constexpr int kWarpRows = kThreads / 32 * kRowsAThread;
  if constexpr (sizeof(T) == 2) {
    if (is_aligned(out, out_stride, shape.batch) && is_aligned(g.dout, g.dout_stride, shape.batch)) {
      if (g.common.head_dim == 64)
        return start(deltas_by_16<T, 64>, g.common.tokens, kThreads / 8 * kRowsAThread, g, shape, stream, out,
                     out_stride, factor);
      if (g.common.head_dim == 128)
        return start(deltas_by_16<T, 128>, g.common.tokens, kThreads / 16 * kRowsAThread, g, shape, stream, out,
                     out_stride, factor);
    }
  }
  start(deltas<T>, g.common.tokens, kWarpRows, g, shape, stream, out, out_stride, factor);
}

template <class T>
void round_as(const GradientLaunch& g, const LaunchShape& shape, cudaStream_t stream) {
  const int rows = kThreads / (g.common.head_dim / 4) * kRowsAThread;
  start(rounded<T>, g.sums.rows, rows, g, shape, stream);
}

}  // namespace

void launch(const GradientLaunch& launch, const void* out, const Strides& out_stride, float factor,
            const LaunchShape& shape, cudaStream_t stream) {
  if (shape.dtype == DType::fp32) return launch_as<float>(launch, out, out_stride, factor, shape, stream);
  if (shape.dtype == DType::fp16) return launch_as<__half>(launch, out, out_stride, factor, shape, stream);
  launch_as<__nv_bfloat16>(launch, out, out_stride, factor, shape, stream);
}

void round(const GradientLaunch& launch, const LaunchShape& shape, cudaStream_t stream) {
  if (shape.dtype == DType::fp16) return round_as<__half>(launch, shape, stream);
  round_as<__nv_bfloat16>(launch, shape, stream);
}

}  // namespace annulus::cuda::delta
