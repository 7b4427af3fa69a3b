#include "kernels/cuda/bridge.h"

#include <string>

#include "kernels/cuda/forward.h"

namespace {

thread_local std::string error;
thread_local std::string device;

template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& caught) {
    error = caught.what();
    return 1;
  }
}

annulus::Problem problem_of(const annulus_cuda_problem& given) {
  annulus::Problem problem;
  problem.batch = given.batch;
  problem.tokens = given.tokens;
  problem.heads = given.heads;
  problem.kv_heads = given.kv_heads;
  problem.head_dim = given.head_dim;
  problem.dtype = annulus::parse_dtype(given.dtype);
  problem.causal = given.causal != 0;
  if (given.scale != 0) problem.scale = given.scale;
  problem.pattern.phase = annulus::parse_phase(given.phase);
  for (size_t i = 0; i < given.branch_count; ++i) {
    annulus::Branch branch;
    branch.segment = given.segments[i];
    branch.dilation = given.dilations[i];
    problem.pattern.branches.push_back(branch);
  }
  problem.documents.assign(given.documents, given.documents + given.document_count);
  return annulus::resolve(problem);
}

}  // namespace

struct annulus_cuda_forward {
  annulus::Problem problem;
  annulus::cuda::Forward forward;
  std::string explanation;

  annulus_cuda_forward(const annulus::Problem& resolved, const std::string& kernel)
      : problem(resolved),
        forward(problem, annulus::make_plan(problem), {.kernel = kernel, .sweeps = {}}),
        explanation(forward.explain()) {}
};

int annulus_cuda_forward_create(const annulus_cuda_problem* problem, annulus_cuda_forward** result) {
  return guarded([&] { *result = new annulus_cuda_forward(problem_of(*problem), problem->kernel); });
}

void annulus_cuda_forward_destroy(annulus_cuda_forward* forward) { delete forward; }

size_t annulus_cuda_forward_workspace(const annulus_cuda_forward* forward) {
  return static_cast<size_t>(annulus::total_bytes(forward->forward.workspace()));
}

const char* annulus_cuda_forward_explain(const annulus_cuda_forward* forward) { return forward->explanation.c_str(); }

double annulus_cuda_forward_flop(const annulus_cuda_forward* forward) {
  return 4 * static_cast<double>(forward->problem.head_dim) * annulus::count_pairs(forward->problem);
}

int annulus_cuda_forward_run(const annulus_cuda_forward* forward, const void* q, const void* k, const void* v,
                             void* out, float* lse, void* workspace, void* stream) {
  return guarded([&] {
    const annulus::Problem& p = forward->problem;
    const std::array<std::int64_t, 4> query_shape{p.batch, p.tokens, p.heads, p.head_dim};
    const std::array<std::int64_t, 4> key_shape{p.batch, p.tokens, p.kv_heads, p.head_dim};
    annulus::ForwardArgs args;
    args.q = {q, p.dtype, query_shape};
    args.k = {k, p.dtype, key_shape};
    args.v = {v, p.dtype, key_shape};
    args.out = {out, p.dtype, query_shape};
    if (lse != nullptr) args.lse = {lse, static_cast<size_t>(p.batch * p.heads * p.tokens)};
    args.workspace = {static_cast<std::byte*>(workspace), annulus_cuda_forward_workspace(forward)};
    forward->forward.run(args, static_cast<annulus::cuda::StreamHandle>(stream));
  });
}

const char* annulus_cuda_device(void) {
  const int failed = guarded([] {
    const annulus::cuda::DeviceInfo info = annulus::cuda::device_info();
    device = info.name + ", sm_" + std::to_string(info.compute_capability) + ", " +
             std::to_string(info.multiprocessors) + " multiprocessors";
  });
  return failed != 0 ? nullptr : device.c_str();
}

const char* annulus_cuda_error(void) { return error.c_str(); }
