// Row by row: one warp a query, every key that the query sees and no other.
//
// Slow and exact in every corner: any type, head size, stride and number of branches. It has two uses. Fast kernels
// mask keys by a weight of 0, and 0 * NaN is NaN: where a result of theirs is not finite, the row is computed again
// here, so that NaN and infinities reach exactly the rows that may see them. And problems that no other kernel takes
// come here.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/forward_kernels.h"
#include "kernels/cuda/start.h"

namespace annulus::cuda::rows {
namespace {

constexpr int kWarps = 4;
constexpr int kPerLane = kMaxHeadDim / 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ float warp_max(float x) {
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, d));
  return x;
}
__device__ float warp_sum(float x) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}

// The softmax state of one row (kernels/softmax_state.h). Lane i has elements i, i + 32, ...
struct RowState {
  float maximum = -INFINITY;  // in log2 units
  float sum = 0;
  float values[kPerLane] = {};
  bool seen = false;       // a key, whatever its logit
  bool undefined = false;  // a logit of NaN or +inf: all is NaN

  __device__ void move_to(float now) {
    const float shrink = maximum == -INFINITY ? 0.0f : exp2f(maximum - now);
    sum *= shrink;
    for (float& x : values) x *= shrink;
    maximum = now;
  }
};

// The keys of one group that the row sees: `count` of them, `stride` elements apart.
template <class T>
__device__ void attend_keys(const RowLaunch& p, const float* query, const T* keys, std::int64_t key_stride,
                            const T* values, std::int64_t value_stride, std::int64_t count, int lane, RowState& state) {
  const int head_dim = p.common.head_dim;
  for (std::int64_t first = 0; first < count && !state.undefined; first += 32) {
    const int here = static_cast<int>(min(std::int64_t{32}, count - first));
    float logit = -INFINITY;
    if (lane < here) {
      const T* key = keys + (first + lane) * key_stride;
      float dot = 0;
      for (int i = 0; i < head_dim; ++i) dot = fmaf(query[i], to_float(key[i]), dot);
      logit = dot * p.common.scale_log2;
    }
    state.seen = true;
    state.undefined = __any_sync(kAll, !(logit < INFINITY));
    const float top = warp_max(logit);
    if (state.undefined || (top == -INFINITY && state.maximum == -INFINITY)) continue;
    if (top > state.maximum) state.move_to(top);
    const float weight = exp2f(logit - state.maximum);
    state.sum += warp_sum(weight);
    for (int j = 0; j < here; ++j) {
      const float w = __shfl_sync(kAll, weight, j);
      const T* value = values + (first + j) * value_stride;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c)
        if (lane + 32 * c < head_dim) state.values[c] = fmaf(w, to_float(value[lane + 32 * c]), state.values[c]);
    }
  }
}

template <class T>
__device__ void attend_row(const RowLaunch& p, std::int64_t batch, int head, std::int64_t position, const float* query,
                           int lane, RowState& state) {
  const Launch& launch = p.common;
  int document = 0;
  for (int end = p.document_count; end - document > 1;) {  // the last one that begins at or before the position
    const int middle = (document + end) / 2;
    if (p.documents[middle] <= position)
      document = middle;
    else
      end = middle;
  }
  const std::int64_t begin = p.documents[document];
  const std::int64_t length = p.documents[document + 1] - begin;
  const std::int64_t at = position - begin;
  const std::int64_t kv_head = head / launch.sharers;
  const T* keys = static_cast<const T*>(launch.k) + batch * launch.k_stride.batch + kv_head * launch.k_stride.head;
  const T* values = static_cast<const T*>(launch.v) + batch * launch.v_stride.batch + kv_head * launch.v_stride.head;
  double zero_keys = 0;
  for (int b = 0; b < p.branch_count; ++b) {
    const std::int64_t taken = p.classes[static_cast<std::int64_t>(b) * launch.heads + head];
    if (taken == kNoClass) continue;
    const std::int64_t dilation = p.dilations[b];
    const std::int64_t segment_begin = at / p.segments[b] * p.segments[b];
    const std::int64_t segment = min(p.segments[b], length - segment_begin);
    const std::int64_t own = (at - segment_begin) % dilation;
    if (taken != kEveryClass && taken != own) continue;
    const std::int64_t all = 1 + (segment - 1 - own) / dilation;
    const std::int64_t count = p.causal ? (at - segment_begin) / dilation + 1 : all;
    const std::int64_t first = begin + segment_begin + own;
    const std::int64_t step = all > 1 ? dilation : 0;  // a single row has no stride of its own
    attend_keys(p, query, keys + first * launch.k_stride.token, step * launch.k_stride.token,
                values + first * launch.v_stride.token, step * launch.v_stride.token, count, lane, state);
    if (p.padded && segment < p.segments[b]) {
      const std::int64_t filled = 1 + (min(p.segments[b], length) - 1) / dilation;
      zero_keys += static_cast<double>(max(filled - all, std::int64_t{0}));
    }
  }
  if (zero_keys > 0) {
    if (!(state.maximum >= 0)) state.move_to(0);
    state.sum += static_cast<float>(zero_keys) * exp2f(-state.maximum);
  }
}

template <class T>
__device__ bool is_finite_row(const T* row, int head_dim, int lane) {
  bool finite = true;
  for (int i = lane; i < head_dim; i += 32) finite = finite && isfinite(to_float(row[i]));
  return __all_sync(kAll, finite);
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32) attend(const __grid_constant__ RowLaunch p) {
  __shared__ float queries[kWarps][kMaxHeadDim];
  const Launch& launch = p.common;
  if (p.only_non_finite && launch.control->non_finite == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* query = queries[threadIdx.x / 32];
  const std::int64_t rows = p.batch * launch.heads * launch.tokens;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t position = row % launch.tokens;
    const int head = static_cast<int>(row / launch.tokens % launch.heads);
    const std::int64_t batch = row / launch.tokens / launch.heads;
    T* out = static_cast<T*>(launch.out) + batch * launch.out_stride.batch + position * launch.out_stride.token +
             head * launch.out_stride.head;
    if (p.only_non_finite && is_finite_row(out, launch.head_dim, lane)) continue;
    const T* from = static_cast<const T*>(launch.q) + batch * launch.q_stride.batch + position * launch.q_stride.token +
                    head * launch.q_stride.head;
    __syncwarp();
    for (int i = lane; i < launch.head_dim; i += 32) query[i] = to_float(from[i]);
    __syncwarp();
    RowState state;
    attend_row<T>(p, batch, head, position, query, lane, state);
    if (state.undefined) state.sum = NAN;
    // Nothing seen: 0. Seen, but all logits -inf: 0 / 0.
    const float factor = state.seen || state.sum > 0 ? launch.output_scale / state.sum : 0.0f;
#pragma unroll
    for (int c = 0; c < kPerLane; ++c)
      if (lane + 32 * c < launch.head_dim)
        out[lane + 32 * c] = from_float<T>(state.sum == 0 && state.seen ? NAN : state.values[c] * factor);
    if (launch.lse != nullptr && lane == 0)
      launch.lse[row] =
          state.sum == 0
              ? -INFINITY
              : static_cast<float>((static_cast<double>(state.maximum) + log2(static_cast<double>(state.sum))) *
                                   0.693147180559945309417);
  }
}

template <class T>
void launch_as(const RowLaunch& launch, int blocks, cudaStream_t stream) {
  start(attend<T>, blocks, kWarps * 32, stream, "start the kernel `rows`", launch);
}

template <class T>
void prepare_as() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, attend<T>), "load the kernel `rows`");
}

}  // namespace

void prepare(DType dtype) {
  if (dtype == DType::fp32) return prepare_as<float>();
  if (dtype == DType::fp16) return prepare_as<__half>();
  prepare_as<__nv_bfloat16>();
}

void launch(const RowLaunch& launch, DType dtype, int multiprocessors, cudaStream_t stream) {
  // A launch that only looks whether there is something to mend should be over at once.
  const int blocks = multiprocessors * (launch.only_non_finite ? 2 : 8);
  if (dtype == DType::fp32) return launch_as<float>(launch, blocks, stream);
  if (dtype == DType::fp16) return launch_as<__half>(launch, blocks, stream);
  launch_as<__nv_bfloat16>(launch, blocks, stream);
}

}  // namespace annulus::cuda::rows
