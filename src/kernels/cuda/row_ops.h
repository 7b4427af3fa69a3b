// What ranks do with rows beside attention, at the rate of memory: states and sums begin, meet and become results.
#pragma once

#include <cuda_runtime.h>

#include "annulus/tensor.h"
#include "kernels/cuda/gradient_launch.h"
#include "plan/rows.h"

namespace annulus::cuda::ops {

// Softmax states as the kernels keep them: row (batch * heads + head) * rows + i.
struct States {
  float2* sums = nullptr;   // (m, l), m in log2 units; l = 0: nothing yet
  float* values = nullptr;  // [row, head_dim]: acc
  std::int64_t rows = 0;
  std::int64_t heads = 0;
};

// For tensors of one shape, every stride.
void copy(const ConstTensorView& from, const TensorView& to, cudaStream_t stream);
void add(const ConstTensorView& source, const TensorView& target, cudaStream_t stream);                  // fp32
void round(const ConstTensorView& source, float factor, const TensorView& target, cudaStream_t stream);  // from fp32
void clear(const TensorView& target, cudaStream_t stream);                                               // fp32

// m *= factor: from the units of the kernel `sm90`.
void scale_maxima(float2* sums, std::int64_t count, float factor, cudaStream_t stream);
// A partial result of one head: fp32 values [batch, n, 1, head_dim] and their lse [batch, n, 1, 1].
void merge(const ConstTensorView& out, const ConstTensorView& lse, const States& states, std::int64_t head,
           const Rows& rows, cudaStream_t stream);
// out = values / l * scale, and lse [batch, heads, rows] unless null.
void finish(const States& states, float scale, const TensorView& out, float* lse, cudaStream_t stream);

// delta = rowsum(dout * out) * factor, [batch, heads, rows]; out of dout's type or fp32.
void dot(const ConstTensorView& dout, const ConstTensorView& out, float factor, float* delta, cudaStream_t stream);
// `to` = `from`, [heads, tokens], with rows in the order of the sums of dq: [heads, layout.rows].
void reorder(const float* from, std::int64_t heads, std::int64_t tokens, const SumLayout& layout, float* to,
             cudaStream_t stream);
// target += the sums of dq that the kernel `sm90` has added up, in its own order.
void add_sums(const float* sums, const SumLayout& layout, const TensorView& target, cudaStream_t stream);

}  // namespace annulus::cuda::ops
