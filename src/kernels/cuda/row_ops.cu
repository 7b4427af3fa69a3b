// A warp a row, whatever the strides.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/row_ops.h"
#include "kernels/cuda/start.h"

namespace annulus::cuda::ops {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAll = 0xffffffffu;
constexpr const char* kStart = "start a kernel over rows";

// A tensor as kernels see it.
template <class T>
struct Tensor {
  T* data = nullptr;
  std::int64_t batch = 0, row = 0, head = 0;  // strides

  __device__ T* at(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return data + b * batch + i * row + h * head;
  }
};
template <class T, class View>
Tensor<T> tensor(const View& view) {
  return {static_cast<T*>(view.data), view.stride[0], view.stride[1], view.stride[2]};
}

struct Shape {
  std::int64_t batch = 0, rows = 0, heads = 0;
  int width = 0;

  template <class View>
  explicit Shape(const View& view)
      : batch(view.shape[0]), rows(view.shape[1]), heads(view.shape[2]), width(static_cast<int>(view.shape[3])) {}
  __host__ __device__ std::int64_t count() const { return batch * rows * heads; }
};

// f(batch, row, head, lane) for every row of a shape.
template <class F>
__global__ void __launch_bounds__(kThreads) for_each_row(const Shape shape, const F f) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads / 32) + threadIdx.x / 32; i < shape.count();
       i += step)
    f(i / (shape.rows * shape.heads), i / shape.heads % shape.rows, i % shape.heads, lane);
}

template <class F>
void start_rows(const Shape& shape, cudaStream_t stream, const F& f) {
  if (shape.count() == 0 || shape.width == 0) return;
  const std::int64_t blocks = (shape.count() + kThreads / 32 - 1) / (kThreads / 32);
  cuda::start(for_each_row<F>, std::min<std::int64_t>(blocks, 1 << 16), kThreads, stream, kStart, shape, f);
}

// Of a kernel with a thread for each of so many elements, or more elements a thread.
std::int64_t element_blocks(std::int64_t count) {
  return std::min<std::int64_t>((count + kThreads - 1) / kThreads, 1 << 14);
}

// Calls f.operator()<T>().
template <class F>
void with_type(DType dtype, F f) {
  if (dtype == DType::fp32) return f.template operator()<float>();
  if (dtype == DType::fp16) return f.template operator()<__half>();
  f.template operator()<__nv_bfloat16>();
}

__device__ float warp_sum(float x) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
  return x;
}

template <class T>
struct Copy {
  Tensor<const T> from;
  Tensor<T> to;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    const T* source = from.at(b, i, h);
    T* target = to.at(b, i, h);
    for (int e = lane; e < width; e += 32) target[e] = source[e];
  }
};

struct Add {
  Tensor<const float> from;
  Tensor<float> to;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    const float* source = from.at(b, i, h);
    float* target = to.at(b, i, h);
    for (int e = lane; e < width; e += 32) target[e] += source[e];
  }
};

struct Clear {
  Tensor<float> to;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    for (int e = lane; e < width; e += 32) to.at(b, i, h)[e] = 0.0f;
  }
};

template <class T>
struct Round {
  Tensor<const float> from;
  Tensor<T> to;
  int width;
  float factor;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    const float* source = from.at(b, i, h);
    T* target = to.at(b, i, h);
    for (int e = lane; e < width; e += 32) target[e] = from_float<T>(source[e] * factor);
  }
};

// Eq. 5 for one row: a partial result counts as one key with logit `lse`.
struct Merge {
  Tensor<const float> out, lse;
  States states;
  std::int64_t head, first, stride;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t, int lane) const {
    const float x = *lse.at(b, i, 0) * 1.442695040888963407f;
    if (x == -INFINITY) return;  // nothing seen
    const std::int64_t row = (b * states.heads + head) * states.rows + first + i * stride;
    const float2 before = states.sums[row];
    __syncwarp();
    const float now = before.y == 0.0f ? x : fmaxf(before.x, x);
    const float shrink = before.y == 0.0f ? 0.0f : exp2f(before.x - now), weight = exp2f(x - now);
    const float* source = out.at(b, i, 0);
    float* values = states.values + row * width;
    for (int e = lane; e < width; e += 32)
      values[e] = (before.y == 0.0f ? 0.0f : values[e] * shrink) + weight * source[e];
    if (lane == 0) states.sums[row] = {now, before.y * shrink + weight};
  }
};

template <class T>
struct Finish {
  States states;
  Tensor<T> out;
  float* lse;
  float scale;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    const std::int64_t row = (b * states.heads + h) * states.rows + i;
    const float2 sums = states.sums[row];
    const float factor = sums.y == 0.0f ? 0.0f : scale / sums.y;
    const float* values = states.values + row * width;
    T* to = out.at(b, i, h);
    for (int e = lane; e < width; e += 32) to[e] = from_float<T>(sums.y == 0.0f ? 0.0f : values[e] * factor);
    if (lse == nullptr || lane != 0) return;
    lse[row] = sums.y == 0.0f
                   ? -INFINITY
                   : static_cast<float>(0.693147180559945309 * (static_cast<double>(sums.x) + log2f(sums.y)));
  }
};

template <class T, class Out>
struct Dot {
  Tensor<const T> dout;
  Tensor<const Out> out;
  float* delta;
  float factor;
  std::int64_t rows, heads;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    float sum = 0.0f;
    for (int e = lane; e < width; e += 32) sum = fmaf(to_float(dout.at(b, i, h)[e]), to_float(out.at(b, i, h)[e]), sum);
    sum = warp_sum(sum);
    if (lane == 0) delta[(b * heads + h) * rows + i] = sum * factor;
  }
};

// Of 16 neighbours in the sums, four belong to a thread of the quad that added them: columns 2 c, 2 c + 1, and the same
// of the next 8.
struct AddSums {
  const float* sums;
  SumLayout layout;
  Tensor<float> to;
  std::int64_t heads;
  int width;
  __device__ void operator()(std::int64_t b, std::int64_t i, std::int64_t h, int lane) const {
    const float* head = sums + (b * heads + h) * layout.rows * width;
    const int row = layout.row(static_cast<int>(i));
    float* target = to.at(b, i, h);
    for (int e = lane; e < width; e += 32) {
      const int column = e % 16, owner = column % 8 / 2, place = owner * 4 + column / 8 * 2 + column % 2;
      target[e] += head[layout.place(row, width, e / 16 * 16) + place];
    }
  }
};

__global__ void reordered(const float* from, std::int64_t heads, std::int64_t tokens, const SumLayout layout,
                          float* to) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < heads * tokens; i += step)
    to[i / tokens * layout.rows + layout.row(static_cast<int>(i % tokens))] = from[i];
}

__global__ void scale(float2* sums, std::int64_t count, float factor) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < count; i += step)
    sums[i].x *= factor;
}

}  // namespace

void copy(const ConstTensorView& from, const TensorView& to, cudaStream_t stream) {
  const Shape shape(to);
  with_type(to.dtype, [&]<class T>() {
    start_rows(shape, stream, Copy<T>{tensor<const T>(from), tensor<T>(to), shape.width});
  });
}

void add(const ConstTensorView& source, const TensorView& target, cudaStream_t stream) {
  const Shape shape(target);
  start_rows(shape, stream, Add{tensor<const float>(source), tensor<float>(target), shape.width});
}

void clear(const TensorView& target, cudaStream_t stream) {
  const Shape shape(target);
  start_rows(shape, stream, Clear{tensor<float>(target), shape.width});
}

void round(const ConstTensorView& source, float factor, const TensorView& target, cudaStream_t stream) {
  const Shape shape(target);
  with_type(target.dtype, [&]<class T>() {
    start_rows(shape, stream, Round<T>{tensor<const float>(source), tensor<T>(target), shape.width, factor});
  });
}

void scale_maxima(float2* sums, std::int64_t count, float factor, cudaStream_t stream) {
  if (count == 0) return;
  start(scale, element_blocks(count), kThreads, stream, kStart, sums, count, factor);
}

void merge(const ConstTensorView& out, const ConstTensorView& lse, const States& states, std::int64_t head,
           const Rows& rows, cudaStream_t stream) {
  const Shape shape(out);
  start_rows(
      shape, stream,
      Merge{tensor<const float>(out), tensor<const float>(lse), states, head, rows.first, rows.stride, shape.width});
}

void finish(const States& states, float scale, const TensorView& out, float* lse, cudaStream_t stream) {
  const Shape shape(out);
  with_type(out.dtype, [&]<class T>() {
    start_rows(shape, stream, Finish<T>{states, tensor<T>(out), lse, scale, shape.width});
  });
}

void dot(const ConstTensorView& dout, const ConstTensorView& out, float factor, float* delta, cudaStream_t stream) {
  const Shape shape(dout);
  with_type(dout.dtype, [&]<class T>() {
    if (out.dtype == DType::fp32)
      return start_rows(shape, stream,
                        Dot<T, float>{tensor<const T>(dout), tensor<const float>(out), delta, factor, shape.rows,
                                      shape.heads, shape.width});
    start_rows(
        shape, stream,
        Dot<T, T>{tensor<const T>(dout), tensor<const T>(out), delta, factor, shape.rows, shape.heads, shape.width});
  });
}

void reorder(const float* from, std::int64_t heads, std::int64_t tokens, const SumLayout& layout, float* to,
             cudaStream_t stream) {
  if (heads * tokens == 0) return;
  start(reordered, element_blocks(heads * tokens), kThreads, stream, kStart, from, heads, tokens, layout, to);
}

void add_sums(const float* sums, const SumLayout& layout, const TensorView& target, cudaStream_t stream) {
  const Shape shape(target);
  start_rows(shape, stream, AddSums{sums, layout, tensor<float>(target), shape.heads, shape.width});
}

}  // namespace annulus::cuda::ops
