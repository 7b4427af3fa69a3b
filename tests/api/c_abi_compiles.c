/* The header is C, and this is how C uses it: every struct, every enumeration and every function once, compiled as C99.
 */
#include "annulus/annulus.h"

enum { kTokens = 4, kHeads = 2, kHeadDim = 3, kSize = kTokens * kHeads * kHeadDim };

static annulus_tensor dense(float* data) {
  annulus_tensor tensor = {.data = data, .dtype = ANNULUS_FP32, .shape = {1, kTokens, kHeads, kHeadDim}};
  return tensor;
}

static int attend(const annulus_attention* attention, float* v, float* out, float* dv) {
  float q[kSize] = {0}, k[kSize] = {0}, dout[kSize] = {0}, dq[kSize], dk[kSize], lse[kHeads * kTokens];
  for (int i = 0; i < kSize; ++i) dout[i] = 1.0f;

  annulus_forward_args forward = {.struct_size = sizeof forward};
  forward.q = dense(q);
  forward.k = dense(k);
  forward.v = dense(v);
  forward.out = dense(out);
  forward.lse = lse;
  forward.lse_count = kHeads * kTokens;
  int status = annulus_forward(attention, &forward);
  if (status != ANNULUS_OK) return status;

  annulus_backward_args backward = {.struct_size = sizeof backward};
  backward.q = dense(q);
  backward.k = dense(k);
  backward.v = dense(v);
  backward.out = dense(out);
  backward.dout = dense(dout);
  backward.dq = dense(dq);
  backward.dk = dense(dk);
  backward.dv = dense(dv);
  backward.lse = lse;
  backward.lse_count = kHeads * kTokens;
  return annulus_backward(attention, &backward);
}

/* Two segments of two tokens. Queries and keys are 0, so that each output is the mean of its segment's values. */
int annulus_example_in_c(float* v, float* out, float* dv);
int annulus_example_in_c(float* v, float* out, float* dv) {
  const annulus_branch branches[] = {{.segment = 2, .dilation = 1}};
  const annulus_problem problem = {.struct_size = sizeof problem,
                                   .batch = 1,
                                   .tokens = kTokens,
                                   .heads = kHeads,
                                   .head_dim = kHeadDim,
                                   .branches = branches,
                                   .branch_count = 1,
                                   .dtype = ANNULUS_FP32,
                                   .preset = ANNULUS_PRESET_LONGNET,
                                   .phase = ANNULUS_PHASE_BY_HEAD,
                                   .gradient = ANNULUS_GRADIENT_EXACT};
  const annulus_options options = {.struct_size = sizeof options, .threads = 1};
  annulus_attention* attention = NULL;
  int status = annulus_create(&problem, &options, &attention);
  if (status != ANNULUS_OK) return status;

  size_t bytes = 0, length = 0, count = 0;
  char text[16];
  annulus_memory_component components[4];
  status = attend(attention, v, out, dv);
  if (status == ANNULUS_OK) status = annulus_workspace_bytes(attention, ANNULUS_FORWARD, &bytes);
  if (status == ANNULUS_OK) status = annulus_explain(attention, text, sizeof text, &length);
  if (status == ANNULUS_OK) status = annulus_memory(attention, ANNULUS_BACKWARD, components, 4, &count);
  annulus_destroy(attention);
  if (annulus_version() == NULL || annulus_last_error() == NULL) return ANNULUS_INTERNAL;
  return status;
}
