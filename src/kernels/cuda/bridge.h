// The backend by C functions, for callers in other languages: device pointers, a CUDA stream. The benchmarks use it.
//
// Functions return 0, or 1 and leave a message in annulus_cuda_error (of the calling thread).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct annulus_cuda_problem {
  int64_t batch, tokens, heads, kv_heads, head_dim;
  const char* dtype;  // "bf16", "fp16", "fp32"
  const char* phase;  // "by_head", "by_head_block", "every"
  int causal;
  double scale;  // 0: 1 / sqrt(head_dim)
  size_t branch_count;
  const int64_t* segments;
  const int64_t* dilations;
  size_t document_count;  // entries of documents; 0: one document
  const int64_t* documents;
  const char* kernel;  // "auto", or a kernel by name
};

struct annulus_cuda_forward;

int annulus_cuda_forward_create(const annulus_cuda_problem* problem, annulus_cuda_forward** result);
void annulus_cuda_forward_destroy(annulus_cuda_forward* forward);
size_t annulus_cuda_forward_workspace(const annulus_cuda_forward* forward);
const char* annulus_cuda_forward_explain(const annulus_cuda_forward* forward);
double annulus_cuda_forward_flop(const annulus_cuda_forward* forward);
// Dense tensors [batch, tokens, heads, head_dim]; lse [batch, heads, tokens] or null. Returns when the work is queued.
int annulus_cuda_forward_run(const annulus_cuda_forward* forward, const void* q, const void* k, const void* v,
                             void* out, float* lse, void* workspace, void* stream);

// "NVIDIA H200, sm_90, 132 multiprocessors", or null and an error.
const char* annulus_cuda_device(void);
const char* annulus_cuda_error(void);

}  // extern "C"
