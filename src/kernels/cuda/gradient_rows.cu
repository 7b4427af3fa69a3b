// Gradients row by row: one warp a query (dq, Delta of eq. 8) or a key (dk, dv), with exactly the rows that it meets.
//
// Slow and exact in every corner, as attend_rows.cu is: for problems that no other kernel takes, and for rows whose
// result is not finite in another kernel, where weights of 0 do not hide NaN and infinity.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/ptx.cuh"

namespace annulus::cuda::rows {
namespace {

constexpr int kWarps = 4;
constexpr int kPerLane = kMaxHeadDim / 32;
constexpr unsigned kAll = 0xffffffffu;
constexpr float kLog2E = 1.442695040888963407f;

__device__ float warp_sum(float x) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}

// One of the tensors, a row of it.
template <class T>
__device__ T* row_of(void* data, const Strides& stride, std::int64_t batch, std::int64_t head, std::int64_t position) {
  return static_cast<T*>(data) + batch * stride.batch + head * stride.head + position * stride.token;
}
template <class T>
__device__ const T* row_of(const void* data, const Strides& stride, std::int64_t batch, std::int64_t head,
                           std::int64_t position) {
  return row_of<T>(const_cast<void*>(data), stride, batch, head, position);
}

// The group of one position in one branch: rows first, first + step, ...; the position is row `own` of `count`.
struct Group {
  std::int64_t first = 0, step = 0, count = 0, own = 0;
  double zero_keys = 0;  // pad_like_torchscale
};

class Walk {
 public:
  __device__ Walk(const GradientRowLaunch& p, std::int64_t position) : p_(p), position_(position) {
    int document = 0;
    for (int end = p.rows.document_count; end - document > 1;) {  // the last one that begins at or before the position
      const int middle = (document + end) / 2;
      if (p.rows.documents[middle] <= position)
        document = middle;
      else
        end = middle;
    }
    begin_ = p.rows.documents[document];
    length_ = p.rows.documents[document + 1] - begin_;
  }

  // count = 0: the head takes no part.
  __device__ Group group(int branch, int head) const {
    Group group;
    const std::int64_t taken = p_.rows.classes[static_cast<std::int64_t>(branch) * p_.gradient.common.heads + head];
    if (taken == kNoClass) return group;
    const std::int64_t dilation = p_.rows.dilations[branch], whole = p_.rows.segments[branch];
    const std::int64_t at = position_ - begin_;
    const std::int64_t segment_begin = at / whole * whole;
    const std::int64_t segment = min(whole, length_ - segment_begin);
    const std::int64_t own_class = (at - segment_begin) % dilation;
    if (taken != kEveryClass && taken != own_class) return group;
    group.count = 1 + (segment - 1 - own_class) / dilation;
    group.first = begin_ + segment_begin + own_class;
    group.step = group.count > 1 ? dilation : 0;  // a single row has no stride of its own
    group.own = (at - segment_begin) / dilation;
    if (p_.rows.padded && segment < whole) {
      const std::int64_t filled = 1 + (min(whole, length_) - 1) / dilation;
      group.zero_keys = static_cast<double>(max(filled - group.count, std::int64_t{0}));
    }
    return group;
  }

 private:
  const GradientRowLaunch& p_;
  std::int64_t position_, begin_ = 0, length_ = 0;
};

template <class T>
__device__ float dot(const float* a, const T* b, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum = fmaf(a[i], to_float(b[i]), sum);
  return sum;
}

// Calls f(lane's P, lane's dP, keys from `first` on, how many of the 32 there are).
template <class T, class F>
__device__ void for_keys(const GradientLaunch& g, const Group& group, std::int64_t batch, int head, float lse_log2,
                         const float* query, const float* dout, bool causal, int lane, F f) {
  const Launch& launch = g.common;
  const std::int64_t count = causal ? group.own + 1 : group.count;
  for (std::int64_t first = 0; first < count; first += 32) {
    const int here = static_cast<int>(min(std::int64_t{32}, count - first));
    float p = 0, dp = 0;
    if (lane < here) {
      const std::int64_t position = group.first + (first + lane) * group.step;
      const std::int64_t kv_head = head / launch.sharers;
      const T* key = row_of<T>(launch.k, launch.k_stride, batch, kv_head, position);
      const T* value = row_of<T>(launch.v, launch.v_stride, batch, kv_head, position);
      p = exp2f(dot(query, key, launch.head_dim) * launch.scale_log2 - lse_log2);
      dp = dot(dout, value, launch.head_dim);
    }
    f(p, dp, first, here);
  }
}

template <class T>
__device__ void load_row(float* to, const T* from, int count, int lane) {
  for (int i = lane; i < count; i += 32) to[i] = to_float(from[i]);
}

template <class T>
__device__ bool is_finite_row(const T* row, int head_dim, int lane) {
  bool finite = true;
  for (int i = lane; i < head_dim; i += 32) finite = finite && isfinite(to_float(row[i]));
  return __all_sync(kAll, finite);
}

template <class T>
__device__ void store_row(T* to, const float (&sums)[kPerLane], float factor, int head_dim, int lane) {
#pragma unroll
  for (int c = 0; c < kPerLane; ++c)
    if (lane + 32 * c < head_dim) to[lane + 32 * c] = from_float<T>(sums[c] * factor);
}

template <class T>
__device__ void add_row(float (&sums)[kPerLane], float weight, const T* row, int head_dim, int lane) {
#pragma unroll
  for (int c = 0; c < kPerLane; ++c)
    if (lane + 32 * c < head_dim) sums[c] = fmaf(weight, to_float(row[lane + 32 * c]), sums[c]);
}

// A row as the kernels below deal them to warps.
struct Row {
  std::int64_t index = 0, position = 0, batch = 0;
  int head = 0;
  __device__ Row(std::int64_t row, std::int64_t tokens, int heads)
      : index(row), position(row % tokens), batch(row / tokens / heads), head(static_cast<int>(row / tokens % heads)) {}
};

template <class F>
__device__ void for_rows(std::int64_t rows, F f) {
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kWarps)
    f(row);
}

// Delta of eq. 8 for every branch, from the branch's own output.
template <class T>
__global__ void __launch_bounds__(kWarps * 32) deltas(const __grid_constant__ GradientRowLaunch p) {
  __shared__ float shared[kWarps][2][kMaxHeadDim];
  const GradientLaunch& g = p.gradient;
  const Launch& launch = g.common;
  if (p.rows.only_non_finite && launch.control->non_finite == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float *query = shared[threadIdx.x / 32][0], *dout = shared[threadIdx.x / 32][1];
  for_rows(p.rows.batch * launch.heads * launch.tokens, [&](std::int64_t index) {
    const Row row(index, launch.tokens, launch.heads);
    __syncwarp();
    load_row(query, row_of<T>(launch.q, launch.q_stride, row.batch, row.head, row.position), launch.head_dim, lane);
    load_row(dout, row_of<T>(g.dout, g.dout_stride, row.batch, row.head, row.position), launch.head_dim, lane);
    __syncwarp();
    const Walk walk(p, row.position);
    for (int b = 0; b < p.rows.branch_count; ++b) {
      const Group group = walk.group(b, row.head);
      float* delta = g.delta + b * p.delta_stride + row.index;
      if (group.count == 0 || (p.rows.only_non_finite && isfinite(*delta))) continue;
      const float lse_log2 = g.lse[row.index] * kLog2E;
      float sum = 0, values[kPerLane] = {};  // of the branch's own output, as infinities would have it
      for_keys<T>(g, group, row.batch, row.head, lse_log2, query, dout, p.rows.causal, lane,
                  [&](float weight, float, std::int64_t first, int here) {
                    sum += weight;
                    for (int j = 0; j < here; ++j)
                      add_row(values, __shfl_sync(kAll, weight, j),
                              row_of<T>(launch.v, launch.v_stride, row.batch, row.head / launch.sharers,
                                        group.first + (first + j) * group.step),
                              launch.head_dim, lane);
                  });
      sum = warp_sum(sum) + static_cast<float>(group.zero_keys) * exp2f(-lse_log2);
      float product = 0;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c)
        if (lane + 32 * c < launch.head_dim) product = fmaf(dout[lane + 32 * c], values[c] / sum, product);
      product = warp_sum(product);
      if (lane == 0) *delta = sum == 0 ? 0.0f : product;
    }
  });
}

// dq of all rows; `query` and `dout` are the warp's own.
template <class T>
__device__ void make_dq(const GradientRowLaunch& p, float* query, float* dout, int lane) {
  const GradientLaunch& g = p.gradient;
  const Launch& launch = g.common;
  for_rows(p.rows.batch * launch.heads * launch.tokens, [&](std::int64_t index) {
    const Row row(index, launch.tokens, launch.heads);
    T* dq = row_of<T>(g.dq, g.dq_stride, row.batch, row.head, row.position);
    if (p.rows.only_non_finite && is_finite_row(dq, launch.head_dim, lane)) return;
    __syncwarp();
    load_row(query, row_of<T>(launch.q, launch.q_stride, row.batch, row.head, row.position), launch.head_dim, lane);
    load_row(dout, row_of<T>(g.dout, g.dout_stride, row.batch, row.head, row.position), launch.head_dim, lane);
    __syncwarp();
    float sums[kPerLane] = {};
    const Walk walk(p, row.position);
    for (int b = 0; b < p.rows.branch_count; ++b) {
      const Group group = walk.group(b, row.head);
      if (group.count == 0) continue;
      const float delta = g.delta[b * p.delta_stride + row.index];
      for_keys<T>(g, group, row.batch, row.head, g.lse[row.index] * kLog2E, query, dout, p.rows.causal, lane,
                  [&](float weight, float dp, std::int64_t first, int here) {
                    const float ds = weight * (dp - delta);
                    for (int j = 0; j < here; ++j)
                      add_row(sums, __shfl_sync(kAll, ds, j),
                              row_of<T>(launch.k, launch.k_stride, row.batch, row.head / launch.sharers,
                                        group.first + (first + j) * group.step),
                              launch.head_dim, lane);
                  });
    }
    store_row(dq, sums, g.factor, launch.head_dim, lane);
  });
}

// dk and dv of all rows.
template <class T>
__device__ void make_dk_dv(const GradientRowLaunch& p, float* key, float* value, int lane) {
  const GradientLaunch& g = p.gradient;
  const Launch& launch = g.common;
  const int kv_heads = launch.heads / launch.sharers;
  for_rows(p.rows.batch * kv_heads * launch.tokens, [&](std::int64_t index) {
    const Row row(index, launch.tokens, kv_heads);
    T* dk = row_of<T>(g.dk, g.dk_stride, row.batch, row.head, row.position);
    T* dv = row_of<T>(g.dv, g.dv_stride, row.batch, row.head, row.position);
    if (p.rows.only_non_finite && is_finite_row(dk, launch.head_dim, lane) && is_finite_row(dv, launch.head_dim, lane))
      return;
    __syncwarp();
    load_row(key, row_of<T>(launch.k, launch.k_stride, row.batch, row.head, row.position), launch.head_dim, lane);
    load_row(value, row_of<T>(launch.v, launch.v_stride, row.batch, row.head, row.position), launch.head_dim, lane);
    __syncwarp();
    float key_sums[kPerLane] = {}, value_sums[kPerLane] = {};
    const Walk walk(p, row.position);
    for (int head = row.head * launch.sharers; head < (row.head + 1) * launch.sharers; ++head)
      for (int b = 0; b < p.rows.branch_count; ++b) {
        const Group group = walk.group(b, head);
        const std::int64_t stats = (row.batch * launch.heads + head) * launch.tokens;
        for (std::int64_t first = p.rows.causal ? group.own : 0; first < group.count; first += 32) {
          const int here = static_cast<int>(min(std::int64_t{32}, group.count - first));
          float weight = 0, ds = 0;
          if (lane < here) {
            const std::int64_t position = group.first + (first + lane) * group.step;
            const T* query = row_of<T>(launch.q, launch.q_stride, row.batch, head, position);
            const T* dout = row_of<T>(g.dout, g.dout_stride, row.batch, head, position);
            weight = exp2f(dot(key, query, launch.head_dim) * launch.scale_log2 - g.lse[stats + position] * kLog2E);
            ds = weight * (dot(value, dout, launch.head_dim) - g.delta[b * p.delta_stride + stats + position]);
          }
          for (int j = 0; j < here; ++j) {
            const std::int64_t position = group.first + (first + j) * group.step;
            add_row(key_sums, __shfl_sync(kAll, ds, j), row_of<T>(launch.q, launch.q_stride, row.batch, head, position),
                    launch.head_dim, lane);
            add_row(value_sums, __shfl_sync(kAll, weight, j),
                    row_of<T>(g.dout, g.dout_stride, row.batch, head, position), launch.head_dim, lane);
          }
        }
      }
    store_row(dk, key_sums, g.factor, launch.head_dim, lane);
    store_row(dv, value_sums, g.value_factor, launch.head_dim, lane);
  });
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32) results(const __grid_constant__ GradientRowLaunch p) {
  __shared__ float shared[kWarps][2][kMaxHeadDim];
  ptx::wait_for_previous();
  if (p.rows.only_non_finite && p.gradient.common.control->non_finite == 0) return;
  float(&own)[2][kMaxHeadDim] = shared[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  make_dq<T>(p, own[0], own[1], lane);
  make_dk_dv<T>(p, own[0], own[1], lane);
}

// Calls f.operator()<T>().
template <class F>
void with_type(DType dtype, F f) {
  if (dtype == DType::fp32) return f.template operator()<float>();
  if (dtype == DType::fp16) return f.template operator()<__half>();
  f.template operator()<__nv_bfloat16>();
}

}  // namespace

void prepare_gradient(DType dtype) {
  with_type(dtype, [&]<class T>() {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, deltas<T>), "load the kernel `rows`");
    check(cudaFuncGetAttributes(&attributes, results<T>), "load the kernel `rows`");
  });
}

void launch_gradient(const GradientRowLaunch& launch, GradientRows what, const LaunchShape& shape, int multiprocessors,
                     cudaStream_t stream) {
  with_type(shape.dtype, [&]<class T>() {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    set_overlap(config, attribute, shape.overlaps);
    // A launch that only looks whether there is something to mend should be over at once.
    config.gridDim = static_cast<unsigned>(multiprocessors * (launch.rows.only_non_finite ? 2 : 8));
    config.blockDim = kWarps * 32;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, what == GradientRows::deltas ? deltas<T> : results<T>, launch),
          "start the kernel `rows`");
  });
}

}  // namespace annulus::cuda::rows
