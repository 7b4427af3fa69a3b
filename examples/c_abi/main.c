// Annulus from C: forward and backward with an installed library.
//   cc main.c $(pkg-config --cflags --libs annulus) && ./a.out
// All values are one half, so every softmax gives one half back; the weights of a row sum to 1, so dv sums to dout.
#include <annulus/annulus.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 4099, kHeads = 4, kHeadDim = 32, kElements = kTokens * kHeads * kHeadDim };

static float* filled(float value) {
  float* data = malloc(kElements * sizeof(float));
  if (data == NULL) exit(3);
  for (int i = 0; i < kElements; ++i) data[i] = value;
  return data;
}

static annulus_tensor view(float* data) {
  annulus_tensor tensor = {.data = data, .dtype = ANNULUS_FP32, .shape = {1, kTokens, kHeads, kHeadDim}};
  return tensor;
}

static void check(int status) {
  if (status == ANNULUS_OK) return;
  fprintf(stderr, "%s\n", annulus_last_error());
  exit(1);
}

static double sum(const float* data) {
  double total = 0;
  for (int i = 0; i < kElements; ++i) total += data[i];
  return total;
}

static int is_near(double x, double expected) { return x > expected - 1e-5 && x < expected + 1e-5; }

int main(void) {
  annulus_branch branches[] = {{.segment = 512, .dilation = 1}, {.segment = 2048, .dilation = 4}};
  annulus_problem problem = {.struct_size = sizeof problem,
                             .batch = 1,
                             .tokens = kTokens,
                             .heads = kHeads,
                             .head_dim = kHeadDim,
                             .branches = branches,
                             .branch_count = 2,
                             .causal = 1};
  annulus_attention* attention = NULL;
  check(annulus_create(&problem, NULL, &attention));

  float *q = filled(0.5f), *k = filled(0.25f), *v = filled(0.5f), *dout = filled(1);
  float *out = filled(0), *dq = filled(0), *dk = filled(0), *dv = filled(0);
  static float lse[kHeads * kTokens];
  annulus_forward_args forward = {.struct_size = sizeof forward,
                                  .q = view(q),
                                  .k = view(k),
                                  .v = view(v),
                                  .out = view(out),
                                  .lse = lse,
                                  .lse_count = kHeads * kTokens};
  check(annulus_forward(attention, &forward));
  annulus_backward_args backward = {.struct_size = sizeof backward,
                                    .q = view(q),
                                    .k = view(k),
                                    .v = view(v),
                                    .out = view(out),
                                    .dout = view(dout),
                                    .dq = view(dq),
                                    .dk = view(dk),
                                    .dv = view(dv),
                                    .lse = lse,
                                    .lse_count = kHeads * kTokens};
  check(annulus_backward(attention, &backward));

  const double mean = sum(out) / kElements, mean_dv = sum(dv) / kElements;
  printf("annulus %s: mean of out %.6f (0.5 expected), of dv %.6f (1 expected)\n", annulus_version(), mean, mean_dv);
  annulus_destroy(attention);

  branches[0].segment = 0;
  if (annulus_create(&problem, NULL, &attention) != ANNULUS_INVALID_ARGUMENT) return 1;
  printf("a mistake gives a code and a sentence: %s\n", annulus_last_error());

  float* all[] = {q, k, v, dout, out, dq, dk, dv};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) free(all[i]);
  return is_near(mean, 0.5) && is_near(mean_dv, 1) ? 0 : 1;
}
