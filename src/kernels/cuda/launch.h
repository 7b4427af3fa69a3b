// What every forward kernel is given, and the memory that a launch shares.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "annulus/tensor.h"
#include "kernels/cuda/meeting.h"
#include "kernels/cuda/tiling.h"

namespace annulus::cuda {

struct Strides {  // in elements; those of one head are contiguous
  std::int64_t batch = 0;
  std::int64_t token = 0;
  std::int64_t head = 0;
};

inline Strides strides_of(const ConstTensorView& view) { return {view.stride[0], view.stride[1], view.stride[2]}; }

// Zeroed on the stream before every launch.
struct Control {
  unsigned long long next_tile = 0;
  unsigned non_finite = 0;          // a result has NaN or infinity: attend_rows.cu computes such rows again
  unsigned started = 0;             // blocks of the Hopper backward kernel
  unsigned long long next_run = 0;  // of dq that is rounded: see delta.cuh
};

struct Launch {
  Tiling tiling;
  const Stretch* stretches = nullptr;
  int stretch_count = 0;
  std::int64_t tile_count = 0;

  const void* q = nullptr;  // [batch, tokens, heads, head_dim]
  const void* k = nullptr;  // [batch, tokens, kv_heads, head_dim]
  const void* v = nullptr;  // [batch, tokens, kv_heads, head_dim]
  void* out = nullptr;      // [batch, tokens, heads, head_dim]
  float* lse = nullptr;     // [batch, heads, tokens] or null
  Strides q_stride, k_stride, v_stride, out_stride;
  std::int64_t tokens = 0;
  int heads = 0;
  int sharers = 1;  // query heads of one key/value head
  int head_dim = 0;
  float scale_log2 = 0;  // of the logits, times log2 e
  float output_scale = 1;

  Control* control = nullptr;
  unsigned* sets = nullptr;      // [set]: arrivals
  float2* state_sums = nullptr;  // [row]: (m, l), m in the kernel's own units; (0, 0): nothing yet. Zeroed with control
  float* state_values = nullptr;  // [row, head_dim]: acc

  Meetings meetings;  // instead of stretches, where there are any: the kernel `mma` alone
};

// All rows of the result, row by row; see attend_rows.cu.
struct RowLaunch {
  Launch common;
  const std::int64_t* documents = nullptr;  // [document_count + 1]: non-empty documents
  int document_count = 0;
  std::int64_t batch = 0;
  bool only_non_finite = false;  // repeat rows that have NaN or infinity, if control says that there are any
  // Branches as the problem has them, since there may be more than a tiling holds.
  int branch_count = 0;
  const std::int64_t* segments = nullptr;   // [branch]
  const std::int64_t* dilations = nullptr;  // [branch]
  const std::int64_t* classes = nullptr;    // [branch, head]: kNoClass, kEveryClass or a class
  bool causal = false;
  bool padded = false;  // pad_like_torchscale
};

}  // namespace annulus::cuda
