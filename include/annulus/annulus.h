// Annulus for C and for every language that can call C. The meaning of all numbers: docs/semantics.md; of all calls:
// annulus/attention.h.
//
//   annulus_branch branches[] = {{.segment = 2048, .dilation = 1}, {.segment = 4096, .dilation = 2}};
//   annulus_problem problem = {.struct_size = sizeof problem, .batch = 1, .tokens = n, .heads = 12, .head_dim = 64,
//                              .branches = branches, .branch_count = 2};
//   annulus_attention* attention;
//   if (annulus_create(&problem, NULL, &attention) != ANNULUS_OK) puts(annulus_last_error());
//
// Every struct starts out as zeros: a field left at 0 or NULL has its default. Structs with `struct_size` may grow at
// their end in later versions; the others never change. Nothing passed in is kept after the call returns. Functions
// return one of annulus_status, never throw, and write nothing when they fail, except to *attention, *bytes, *length
// and *count where they say so.
#ifndef ANNULUS_ANNULUS_H_
#define ANNULUS_ANNULUS_H_

// NOLINTBEGIN: names and headers of C

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ANNULUS_API __attribute__((visibility("default")))
#else
#define ANNULUS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum annulus_status {
  ANNULUS_OK = 0,
  ANNULUS_INVALID_ARGUMENT = 1,  // the caller can mend it
  ANNULUS_UNSUPPORTED = 2,       // right in principle, but this device or build cannot do it
  ANNULUS_OUT_OF_MEMORY = 3,
  ANNULUS_DEVICE_ERROR = 4,
  ANNULUS_TRANSPORT_ERROR = 5,
  ANNULUS_INTERNAL = 6  // a bug in Annulus: please report it
};

enum annulus_dtype { ANNULUS_FP32 = 0, ANNULUS_BF16 = 1, ANNULUS_FP16 = 2 };

// The presets of docs/semantics.md, section 5: they decide phase, gradient, output scale and the heads of each branch.
enum annulus_preset {
  ANNULUS_PRESET_LONGNET = 0,
  ANNULUS_PRESET_TORCHSCALE = 1,
  ANNULUS_PRESET_RESIDUE = 2,
  ANNULUS_PRESET_HEAD_GROUPS = 3
};

enum annulus_phase {
  ANNULUS_PHASE_DEFAULT = 0,  // the preset's
  ANNULUS_PHASE_BY_HEAD = 1,
  ANNULUS_PHASE_BY_HEAD_BLOCK = 2,
  ANNULUS_PHASE_EVERY = 3,
  ANNULUS_PHASE_TABLE = 4
};

enum annulus_gradient {
  ANNULUS_GRADIENT_DEFAULT = 0,  // the preset's
  ANNULUS_GRADIENT_EXACT = 1,
  ANNULUS_GRADIENT_DETACHED = 2
};

enum annulus_pass { ANNULUS_FORWARD = 0, ANNULUS_BACKWARD = 1 };

typedef struct annulus_branch {
  int64_t segment;         // w >= 1
  int64_t dilation;        // r >= 1
  int64_t first_head;      // the heads that take part: [first_head, first_head + head_count)
  int64_t head_count;      // 0: up to the last head
  const int64_t* classes;  // [class_count]: the class of head first_head + i. ANNULUS_PHASE_TABLE only, otherwise null
  int64_t class_count;
} annulus_branch;

typedef struct annulus_problem {
  size_t struct_size;              // sizeof(annulus_problem)
  int64_t batch;                   // 0: nothing to do
  int64_t tokens;                  // N; 0: nothing to do
  int64_t heads;                   // H, of the queries
  int64_t kv_heads;                // H_kv, divides heads; 0: heads
  int64_t head_dim;                // D
  const annulus_branch* branches;  // [branch_count], not null
  int64_t branch_count;            // >= 1
  const int64_t* documents;        // [document_bounds]: cu_seqlens 0, ..., tokens; may be null: one document
  int64_t document_bounds;         // the number of documents + 1
  const double* scale;             // of the logits; may be null: 1 / sqrt(head_dim)
  const double* output_scale;      // may be null: the preset's
  int32_t dtype;                   // annulus_dtype
  int32_t preset;                  // annulus_preset
  int32_t phase;                   // annulus_phase; not with ANNULUS_PRESET_HEAD_GROUPS
  int32_t gradient;                // annulus_gradient
  int32_t causal;                  // 0 or 1
  int32_t pad_like_torchscale;     // 0 or 1
} annulus_problem;

typedef struct annulus_options {
  size_t struct_size;           // sizeof(annulus_options)
  const char* instruction_set;  // may be null: the best this CPU has; on a GPU a kernel by name
  int32_t threads;              // 0: all cores this process may use
  int32_t deterministic;        // 1: on a GPU dq too has the same bits run after run, at some cost; 0 otherwise
  const char* device;           // may be null: "cpu". "cuda", "cuda:1": every pointer in a call is to that GPU's memory
} annulus_options;

// [batch, tokens, heads, head_dim]. Strides are in elements and stride[3] is 1; all four 0 means dense, in the order of
// the shape.
typedef struct annulus_tensor {
  void* data;     // not null unless the tensor is empty; inputs are only read
  int32_t dtype;  // annulus_dtype, the problem's
  int64_t shape[4];
  int64_t stride[4];
} annulus_tensor;

typedef struct annulus_forward_args {
  size_t struct_size;      // sizeof(annulus_forward_args)
  annulus_tensor q;        // [batch, tokens, heads, head_dim]
  annulus_tensor k;        // [batch, tokens, kv_heads, head_dim]
  annulus_tensor v;        // [batch, tokens, kv_heads, head_dim]
  annulus_tensor out;      // like q; written
  float* lse;              // [batch, heads, tokens], natural log; written; may be null: not wanted
  size_t lse_count;        // elements at lse: batch * heads * tokens, or 0 with null
  void* workspace;         // 64-byte aligned; may be null: allocated for the call
  size_t workspace_bytes;  // at least annulus_workspace_bytes, or 0 with null
  void* stream;            // on a GPU: the CUDA stream that the work is queued on. The call does not wait for it
} annulus_forward_args;

typedef struct annulus_backward_args {
  size_t struct_size;      // sizeof(annulus_backward_args)
  annulus_tensor q;        // as in forward
  annulus_tensor k;        // as in forward
  annulus_tensor v;        // as in forward
  annulus_tensor out;      // the result of forward; read
  annulus_tensor dout;     // like q
  annulus_tensor dq;       // like q; written
  annulus_tensor dk;       // like k; written
  annulus_tensor dv;       // like v; written
  const float* lse;        // [batch, heads, tokens], the result of forward; not null
  size_t lse_count;        // batch * heads * tokens
  void* workspace;         // 64-byte aligned; may be null: allocated for the call
  size_t workspace_bytes;  // at least annulus_workspace_bytes, or 0 with null
  void* stream;            // as in forward
} annulus_backward_args;

// Dense fp64 tensors of the problem's shapes.
typedef struct annulus_reference_args {
  size_t struct_size;    // sizeof(annulus_reference_args)
  const double* q;       // [batch, tokens, heads, head_dim]
  const double* k;       // [batch, tokens, kv_heads, head_dim]
  const double* v;       // [batch, tokens, kv_heads, head_dim]
  const double* dout;    // like q; may be null: forward
  double* out;           // like q; written by forward
  double* lse;           // [batch, heads, tokens]; written by forward
  double *dq, *dk, *dv;  // like q, k and v; written by backward
  int32_t threads;       // 0: all cores
  int32_t reserved;      // 0
} annulus_reference_args;

typedef struct annulus_memory_component {
  char name[32];  // q, k, v, out, lse, dout, dq, dk, dv, delta, tiles, ...; ends with a 0
  int64_t bytes;
} annulus_memory_component;

typedef struct annulus_attention annulus_attention;

// "0.1.0"; lives for ever.
ANNULUS_API const char* annulus_version(void);

// What went wrong in the last call of this thread that failed; "" when none has. Valid until the thread's next call.
ANNULUS_API const char* annulus_last_error(void);

// Checks and plans. `options` may be null. *attention is the new handle, or null when this fails.
ANNULUS_API int annulus_create(const annulus_problem* problem, const annulus_options* options,
                               annulus_attention** attention);

// Null is allowed and does nothing.
ANNULUS_API void annulus_destroy(annulus_attention* attention);

// One handle may serve several threads at once, on distinct outputs and workspaces.
ANNULUS_API int annulus_forward(const annulus_attention* attention, const annulus_forward_args* args);
ANNULUS_API int annulus_backward(const annulus_attention* attention, const annulus_backward_args* args);

// *bytes: what a workspace for `pass` (annulus_pass) must have at least.
ANNULUS_API int annulus_workspace_bytes(const annulus_attention* attention, int pass, size_t* bytes);

// The plan, for people. Like snprintf: writes as much as fits into buffer[capacity] with a 0 at its end, and sets
// *length to the length of the whole text without that 0. `buffer` may be null when capacity is 0; `length` may be
// null.
ANNULUS_API int annulus_explain(const annulus_attention* attention, char* buffer, size_t capacity, size_t* length);

// Everything that a pass holds, tensors included. Writes as many as fit into components[capacity] and sets *count to
// how many there are. `components` may be null when capacity is 0; `count` is not null.
ANNULUS_API int annulus_memory(const annulus_attention* attention, int pass, annulus_memory_component* components,
                               size_t capacity, size_t* count);

// The problem in fp64, by the reference that results are judged by: for gradient checks and doubts, on short sequences.
// problem->dtype does not matter. With `dout` the gradients alone are written, without it the outputs.
ANNULUS_API int annulus_reference(const annulus_problem* problem, const annulus_reference_args* args);

#ifdef __cplusplus
}
#endif

// NOLINTEND

#endif  // ANNULUS_ANNULUS_H_
