// What is done at the rate of memory beside the backward kernels, one warp for a run (gradient_launch.h): Delta of eq.
// 7 and sums of dq that begin at 0, before them; dq rounded from its sums, by the Hopper kernel itself: where tiles run
// out, and where regions share slots, by warps that wait for something else meanwhile.
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

// Of the run's first row, in the window.
__device__ __forceinline__ std::int64_t place_of(const GradientLaunch& g, const Run& run) {
  return place_sums(g, run.batch, run.head, run.region, run.begin).first +
         static_cast<std::int64_t>(run.row_in_window(g.sums)) * g.common.head_dim;
}

// The run's sums of dq, where there are any, become 0, and nobody has added to them: all of its place, since the next
// region there may be longer. Slots that had another region before are cleared by who rounds that.
__device__ __forceinline__ void clear_sums(const GradientLaunch& g, const Run& run, int lane) {
  if (g.dq_sums == nullptr || g.regions.table[run.region].before != Region::kNone) return;
  const std::int64_t place = place_of(g, run);
  const int rows = at_most(Regions::kRunRows, g.sums.residue_rows - run.row_in_window(g.sums) % g.sums.residue_rows);
  if (g.tiles_added != nullptr)
    for (int row = lane; row < rows; row += 32) g.tiles_added[place / g.common.head_dim + row] = 0;
  auto* to = reinterpret_cast<float4*>(g.dq_sums + place);
  for (int i = lane; i < rows * g.common.head_dim / 4; i += 32) to[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
}

// Delta of a position, and where the order of the sums is another one, both numbers there.
__device__ __forceinline__ void put_numbers(const GradientLaunch& g, const Run& run, int row, float delta) {
  const std::int64_t head = run.batch * g.common.heads + run.head;
  const std::int64_t at = head * g.common.tokens + position_of(g, run, row);
  g.delta[at] = delta;
  if (g.lse_copy == nullptr) return;
  const std::int64_t ordered = head * g.number_rows + run.row(g.numbers) + row;
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

// A run on its way from sums to dq, some columns of 8 rows at a time: dq = sums * factor. Rows are taken in the order
// of the sums, 16 columns of 8 of them at once, four to a lane. Of these 16, four belong to a thread of the quad that
// added them: columns 2 c, 2 c + 1, and the same of the next 8. So the quad trades, and each writes four neighbours of
// dq.
template <class T, int kDim>
class Rounding {
  static constexpr int kOfGroup = kDim / 16;  // parts, of 16 columns by 8 rows

 public:
  Rounding() = default;
  __device__ __forceinline__ Rounding(const GradientLaunch& g, const Run& run, int lane) {
    const int row = g.sums.row_at(lane / 4);
    left_ = run.rows - row;
    sums_ = g.dq_sums + place_of(g, run) + lane * 4;
    to_ = static_cast<T*>(g.dq) + run.batch * g.dq_stride.batch + run.head * g.dq_stride.head + lane % 4 * 4 +
          position_of(g, run, row) * g.dq_stride.token;
    parts_ = (run.rows + 7) / 8 * kOfGroup;
  }

  __device__ __forceinline__ bool is_over() const { return parts_ == 0; }

  // The next parts, so many loads in flight, and zeros where they were for whom the slot is next.
  template <int kParts, int kAtOnce>
  __device__ __forceinline__ void step(const GradientLaunch& g, int lane) {
    static_assert(kParts % kOfGroup == 0 || kOfGroup % kParts == 0);
    const bool clears = g.regions.rounded != nullptr;
    const std::int64_t group_step = 8 * static_cast<std::int64_t>(g.sums.stride) * g.dq_stride.token;
    const auto is_there = [&](int part) { return left_ > part / kOfGroup * 8; };
    const int from = (lane & ~3) + lane % 4 * 2 % 4;
    float odd = 0.0f;  // NaN as soon as anything is not finite
#pragma unroll
    for (int part = 0; part < kParts; part += kAtOnce) {
      float4 x[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (is_there(part + i)) x[i] = __ldcg(reinterpret_cast<const float4*>(sums_ + (part + i) * 128));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (is_there(part + i) && clears)
          __stcg(reinterpret_cast<float4*>(sums_ + (part + i) * 128), float4{0.0f, 0.0f, 0.0f, 0.0f});
        const float4 y = {x[i].x * g.factor, x[i].y * g.factor, x[i].z * g.factor, x[i].w * g.factor};
        odd += y.x * 0.0f + y.y * 0.0f + y.z * 0.0f + y.w * 0.0f;
        const std::uint32_t here = ptx::pack<T>(y.x, y.y), next = ptx::pack<T>(y.z, y.w);
        const std::uint32_t a = __shfl_sync(kAllLanes, here, from), b = __shfl_sync(kAllLanes, here, from + 1);
        const std::uint32_t c = __shfl_sync(kAllLanes, next, from), d = __shfl_sync(kAllLanes, next, from + 1);
        T* to = to_ + (part + i) / kOfGroup * group_step + (part + i) % kOfGroup * 16;
        if (is_there(part + i)) __stcs(reinterpret_cast<uint2*>(to), lane % 4 < 2 ? uint2{a, b} : uint2{c, d});
      }
    }
    sums_ += kParts * 128;
    parts_ = max(parts_ - kParts, 0);  // of the last rows there may be fewer
    if (kParts >= kOfGroup || parts_ % kOfGroup == 0) {
      to_ += kParts >= kOfGroup ? kParts / kOfGroup * group_step : group_step + kParts * 16 - kDim;
      left_ -= kParts >= kOfGroup ? kParts / kOfGroup * 8 : 8;
    } else {
      to_ += kParts * 16;
    }
    if (__any_sync(kAllLanes, !(odd == 0.0f)) && lane == 0) g.common.control->non_finite = 1;
  }

 private:
  float* sums_ = nullptr;
  T* to_ = nullptr;
  int left_ = 0;  // rows of the run from this lane's on
  int parts_ = 0;
};

// A warp that rounds regions when their tiles have ended, run by run, all warps from one list.
template <class T, int kDim, int kParts, int kAtOnce>
class Rounder {
 public:
  __device__ __forceinline__ Rounder(const GradientLaunch& g, int lane) : g_(g), lane_(lane) {}

  // Some rows, if there are any to be rounded now. A run that is taken too early is kept until it is due: then all runs
  // before it are taken as well, so nobody waits for a run that none will round.
  __device__ __forceinline__ bool round_some() {
    const Regions& regions = g_.regions;
    if (!has_run_) {
      if (is_over_) return false;
      unsigned long long next = 0;
      if (lane_ == 0) next = atomicAdd(&g_.common.control->next_run, 1ull);
      next = __shfl_sync(kAllLanes, next, 0);
      is_over_ = next >= static_cast<unsigned long long>(regions.count * regions.runs);
      if (is_over_) return false;
      region_ = regions.order[next / regions.runs];
      run_ = static_cast<int>(next % regions.runs);
      has_run_ = true;
      is_due_ = false;
    }
    if (!is_due_) {
      const bool ended = ptx::load_acquire(regions.ended + region_) >= regions.table[region_].tiles;
      if (!__all_sync(kAllLanes, ended)) return false;
      is_due_ = true;
      rounding_ = Rounding<T, kDim>(g_, run_of(g_, region_, run_), lane_);
    }
    if (!rounding_.is_over()) rounding_.template step<kParts, kAtOnce>(g_, lane_);
    if (rounding_.is_over()) {
      __syncwarp();
      if (lane_ == 0 && regions.rounded != nullptr) ptx::arrive_global(regions.rounded + region_, 1);
      has_run_ = false;
    }
    return true;
  }

  // What this warp has taken.
  __device__ __forceinline__ void finish() {
    while (has_run_)
      if (!round_some()) __nanosleep(500);
  }
  // All that there is.
  __device__ __forceinline__ void round_all() {
    while (!is_over_)
      if (!round_some()) __nanosleep(500);
  }

 private:
  const GradientLaunch& g_;
  int lane_;
  bool has_run_ = false, is_due_ = false, is_over_ = false;
  int region_ = 0, run_ = 0;
  Rounding<T, kDim> rounding_;
};

// All that there is, by who has nothing else to do.
template <class T, int kDim>
__device__ __forceinline__ void round_all(const GradientLaunch& g, int lane) {
  Rounder<T, kDim, 2 * kLoads, 2 * kLoads>(g, lane).round_all();
}

}  // namespace annulus::cuda::delta
