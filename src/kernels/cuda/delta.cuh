// What is done at the rate of memory beside the backward kernels, one warp for a run (gradient_launch.h): Delta of eq.
// 7 and sums of dq that begin at 0, before them; dq rounded from its sums, by the Hopper kernel itself where tiles run
// out.
#pragma once

#include "kernels/cuda/gradient_launch.h"
#include "kernels/cuda/ptx.cuh"

namespace annulus::cuda::delta {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLoads = 8;  // in flight, of 16 bytes a lane

__device__ __forceinline__ float low(std::uint32_t x, __nv_bfloat16) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(std::uint32_t x, __nv_bfloat16) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float low(std::uint32_t x, __half) {
  return __low2float(*reinterpret_cast<const __half2*>(&x));
}
__device__ __forceinline__ float high(std::uint32_t x, __half) {
  return __high2float(*reinterpret_cast<const __half2*>(&x));
}

template <class T>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const std::uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = fmaf(low(x[i], T()), low(y[i], T()), sum);
    sum = fmaf(high(x[i], T()), high(y[i], T()), sum);
  }
  return sum;
}

__device__ __forceinline__ Run run_of(const GradientLaunch& g, std::int64_t region, int run) {
  return {g.regions, g.common.sharers, g.common.tokens, g.sums.stride, region, run};
}

__device__ __forceinline__ std::int64_t position_of(const GradientLaunch& g, const Run& run, int row) {
  return (run.first + row) * g.sums.stride + run.residue;
}

__device__ __forceinline__ float* sums_of(const GradientLaunch& g, const Run& run) {
  return g.dq_sums + (run.batch * g.common.heads + run.head) * g.sums.rows * g.common.head_dim;
}

// The run's sums of dq, where there are any, become 0, and nobody has added to them. As they are added to: 8 rows by 16
// columns at once.
__device__ __forceinline__ void clear_sums(const GradientLaunch& g, const Run& run, int lane) {
  if (g.dq_sums == nullptr) return;
  const int width = g.common.head_dim, before = run.row(g.sums);
  if (g.tiles_added != nullptr)
    for (int row = lane; row < run.rows; row += 32)
      g.tiles_added[(run.batch * g.common.heads + run.head) * g.sums.rows + before + row] = 0;
  float* sums = sums_of(g, run) + lane % 4 * 4;
  for (int row = lane / 4; row < run.rows; row += 8) {
    float* to = sums + g.sums.place(before + row, width, 0);
    for (int column = 0; column < width; column += 16)
      *reinterpret_cast<float4*>(to + column * 8) = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
}

// Delta of a position, and where the order of the sums is another one, both numbers there.
__device__ __forceinline__ void put_numbers(const GradientLaunch& g, const Run& run, int row, float delta) {
  const std::int64_t head = run.batch * g.common.heads + run.head;
  const std::int64_t at = head * g.common.tokens + position_of(g, run, row);
  g.delta[at] = delta;
  if (g.lse_copy == nullptr) return;
  const std::int64_t ordered = head * g.number_rows + run.row(g.sums) + row;
  g.lse_copy[ordered] = g.lse[at];
  g.delta_copy[ordered] = delta;
}

template <class T>
__device__ __forceinline__ const T* head_of(const void* data, const Strides& stride, const Run& run) {
  return static_cast<const T*>(data) + run.batch * stride.batch + run.head * stride.head;
}

// Rows of 16-byte pieces.
template <class T, int kDim>
__device__ __forceinline__ void make_deltas_by_16(const GradientLaunch& g, const Run& run, int lane) {
  constexpr int kLanes = kDim / 8, kStep = 32 / kLanes;
  const T* out = head_of<T>(g.forward_out, g.forward_out_stride, run) + lane % kLanes * 8;
  const T* grad = head_of<T>(g.dout, g.dout_stride, run) + lane % kLanes * 8;
  for (int first = lane / kLanes; first - lane / kLanes < run.rows; first += kStep * kLoads) {
    uint4 a[kLoads] = {}, b[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kStep >= run.rows) continue;
      const std::int64_t position = position_of(g, run, first + i * kStep);
      a[i] = __ldcs(reinterpret_cast<const uint4*>(out + position * g.forward_out_stride.token));
      b[i] = __ldcs(reinterpret_cast<const uint4*>(grad + position * g.dout_stride.token));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float sum = dot<T>(a[i], b[i]);
#pragma unroll
      for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
      if (first + i * kStep < run.rows && lane % kLanes == 0)
        put_numbers(g, run, first + i * kStep, sum * g.out_factor);
    }
  }
}

// Any type, head size and stride.
template <class T>
__device__ __forceinline__ void make_deltas(const GradientLaunch& g, const Run& run, int lane) {
  const T* out = head_of<T>(g.forward_out, g.forward_out_stride, run);
  const T* grad = head_of<T>(g.dout, g.dout_stride, run);
  for (int first = 0; first < run.rows; first += kLoads) {
    float sums[kLoads] = {};
    for (int e = lane; e < g.common.head_dim; e += 32)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const std::int64_t position = position_of(g, run, at_most(first + i, run.rows - 1));
        sums[i] = fmaf(static_cast<float>(out[position * g.forward_out_stride.token + e]),
                       static_cast<float>(grad[position * g.dout_stride.token + e]), sums[i]);
      }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      for (int d = 16; d > 0; d /= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], d);
      if (lane == 0 && first + i < run.rows) put_numbers(g, run, first + i, sums[i] * g.out_factor);
    }
  }
}

// dq = sums * factor. Of 16 neighbours in the sums, four belong to a thread of the quad that added them: columns 2 c,
// 2 c + 1, and the same of the next 8. Here too a lane has four of them, and the quad trades so that each writes four
// neighbours of dq.
template <class T, int kDim>
__device__ __forceinline__ void round_sums(const GradientLaunch& g, const Run& run, int lane) {
  constexpr int kLanes = kDim / 4, kStep = 32 / kLanes, kAtOnce = 2 * kLoads;
  const int own = lane % 4, quad = lane & ~3, before = run.row(g.sums);
  const float* sums = sums_of(g, run) + own * 4;
  T* to = static_cast<T*>(g.dq) + run.batch * g.dq_stride.batch + run.head * g.dq_stride.head + lane % kLanes * 4;
  float odd = 0.0f;  // NaN as soon as anything is not finite
  for (int first = lane / kLanes; first - lane / kLanes < run.rows; first += kStep * kAtOnce) {
    float4 x[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * kStep < run.rows)
        x[i] = __ldcg(reinterpret_cast<const float4*>(
            sums + g.sums.place(before + first + i * kStep, kDim, lane % kLanes / 4 * 16)));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4 y = {x[i].x * g.factor, x[i].y * g.factor, x[i].z * g.factor, x[i].w * g.factor};
      odd += y.x * 0.0f + y.y * 0.0f + y.z * 0.0f + y.w * 0.0f;
      const std::uint32_t here = ptx::pack<T>(y.x, y.y), next = ptx::pack<T>(y.z, y.w);
      const int from = quad + own * 2 % 4;
      const std::uint32_t a = __shfl_sync(kAllLanes, here, from), b = __shfl_sync(kAllLanes, here, from + 1);
      const std::uint32_t c = __shfl_sync(kAllLanes, next, from), d = __shfl_sync(kAllLanes, next, from + 1);
      if (first + i * kStep >= run.rows) continue;
      __stcs(reinterpret_cast<uint2*>(to + position_of(g, run, first + i * kStep) * g.dq_stride.token),
             own < 2 ? uint2{a, b} : uint2{c, d});
    }
  }
  if (__any_sync(kAllLanes, !(odd == 0.0f)) && lane == 0) g.common.control->non_finite = 1;
}

// dq of all regions, run by run, each as soon as the region's tiles have ended. Called where a block has no tile left.
// A block that has not started may need this one's multiprocessor, and has a tile that the rest would wait for: then
// they leave it to others. The last to start finds that all have.
template <class T, int kDim>
__device__ __forceinline__ void round_ended(const GradientLaunch& g, int lane) {
  const Regions& regions = g.regions;
  if (!__all_sync(kAllLanes, ptx::load_acquire(&g.common.control->started) >= gridDim.x)) return;
  for (;;) {
    unsigned long long next = 0;
    if (lane == 0) next = atomicAdd(&g.common.control->next_run, 1ull);
    const auto i = static_cast<std::int64_t>(__shfl_sync(kAllLanes, next, 0));
    if (i >= regions.count * regions.runs) return;
    const std::int64_t region = i / regions.runs;
    while (ptx::load_acquire(regions.ended + region) < __ldg(regions.tiles + region)) __nanosleep(500);
    __syncwarp();
    round_sums<T, kDim>(g, run_of(g, region, static_cast<int>(i % regions.runs)), lane);
  }
}

}  // namespace annulus::cuda::delta
