// annulus::Attention on a GPU: the caller's memory, stream and workspace, and what it says of itself.
#include "annulus/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "reference/draw_inputs.h"
#include "support/device_call.h"
#include "support/refusal.h"
#include "support/test_scale.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::Call;
using support::DeviceTensor;
using support::Layout;
using support::Yardstick;

class CudaAttention : public support::OnDevice {};

Problem small_problem(DType dtype = DType::bf16) {
  Problem problem;
  problem.batch = 2;
  problem.tokens = 333;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 64;
  problem.dtype = dtype;
  problem.causal = true;
  problem.pattern = make_pattern(Preset::longnet, {100, 200}, {1, 2}, 4);
  return resolve(problem);
}

// A call with its tensors on the device.
struct DeviceCall {
  Call& call;
  DeviceTensor q, k, v, out, dout, dq, dk, dv;
  cuda::DeviceBuffer lse;

  explicit DeviceCall(Call& given, bool aligned = true)
      : call(given),
        q(call.q, aligned),
        k(call.k, aligned),
        v(call.v, aligned),
        out(call.out, aligned),
        dout(call.dout, aligned),
        dq(call.dq, aligned),
        dk(call.dk, aligned),
        dv(call.dv, aligned),
        lse(call.lse.span().size_bytes()) {}

  ForwardArgs forward_args(void* stream) const {
    ForwardArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.out = out.view();
    args.lse = {reinterpret_cast<float*>(lse.data()), call.lse.span().size()};
    args.stream = stream;
    return args;
  }
  BackwardArgs backward_args(void* stream) const {
    const ForwardArgs forward = forward_args(stream);
    BackwardArgs args;
    args.q = forward.q;
    args.k = forward.k;
    args.v = forward.v;
    args.out = forward.out;
    args.lse = forward.lse;
    args.dout = dout.view();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    args.stream = stream;
    return args;
  }
  reference::Result forward_result() {
    out.bring_back();
    const std::span<float> to = call.lse.span();
    cuda::check(cudaMemcpy(to.data(), lse.data(), to.size_bytes(), cudaMemcpyDeviceToHost), "copy lse back");
    return call.forward_result();
  }
  reference::Result result() {
    (void)forward_result();
    for (DeviceTensor* tensor : {&dq, &dk, &dv}) tensor->bring_back();
    return call.result();
  }
};

TEST_F(CudaAttention, ComputesInTheCallersMemory) {
  std::int64_t number = 0;
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const Layout layout : {Layout::dense, Layout::apart, Layout::heads_major})
      for (const bool aligned : {true, false})
        for (const bool brings_workspace : {true, false}) {
          if (!support::is_taken(number++)) continue;
          const Problem problem = small_problem(dtype);
          const Inputs inputs = draw_inputs(problem, 5, false);
          Call call(problem, inputs, {.options = {}, .inputs = layout, .outputs = layout});
          DeviceCall on_device(call, aligned);
          const Attention attention(problem, {.device = brings_workspace ? "cuda" : "cuda:0"});
          cuda::DeviceBuffer workspace(attention.workspace_bytes(Pass::forward));
          const cuda::Stream stream;
          ForwardArgs args = on_device.forward_args(stream.get());
          if (brings_workspace) args.workspace = {workspace.data(), workspace.bytes()};
          attention.forward(args);
          stream.wait();
          EXPECT_EQ(Yardstick(problem, inputs).faults(on_device.forward_result()), "");
          EXPECT_EQ(call.out.faults("out"), "");
        }
}

// Whatever synchronised or allocated would end the capture; the default stream is another one.
TEST_F(CudaAttention, CallsCanBeCapturedInAGraph) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 6);
  const Yardstick yardstick(problem, inputs);
  for (const bool deterministic : {false, true})
    for (const bool brings_workspace : {true, false}) {
      const Attention attention(problem, {.device = "cuda", .deterministic = deterministic});
      Call call(problem, inputs);
      DeviceCall on_device(call);
      cuda::DeviceBuffer workspace(
          std::max(attention.workspace_bytes(Pass::forward), attention.workspace_bytes(Pass::backward)));
      const cuda::Stream stream;
      ForwardArgs forward = on_device.forward_args(stream.get());
      BackwardArgs backward = on_device.backward_args(stream.get());
      if (brings_workspace) forward.workspace = backward.workspace = {workspace.data(), workspace.bytes()};
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t ready = nullptr;
      const cudaError_t begun = cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal);
      if (begun == cudaErrorNotSupported) GTEST_SKIP() << "a device without graphs: a pretend GPU has none";
      cuda::check(begun, "begin a capture");
      attention.forward(forward);
      attention.backward(backward);
      cuda::check(cudaStreamEndCapture(stream.get(), &graph), "end a capture");
      cuda::check(cudaGraphInstantiate(&ready, graph, 0), "make a graph");
      for (int i = 0; i < 3; ++i) cuda::check(cudaGraphLaunch(ready, stream.get()), "start a graph");
      stream.wait();
      EXPECT_EQ(yardstick.faults(on_device.result()), "") << "deterministic " << deterministic;
      cudaGraphExecDestroy(ready);
      cudaGraphDestroy(graph);
    }
}

// Blocks of one call start when those of others end, on multiprocessors that they leave: some have not started when the
// first ones have no tile left.
TEST_F(CudaAttention, StreamsShareTheDevice) {
  struct Way {
    std::vector<std::int64_t> segments, dilations;
    bool causal = false, deterministic = false;
  };
  const std::vector<Way> ways = {{{512}, {1}, true},         {{512}, {1}},
                                 {{512}, {2}, true, true},   {{128, 512}, {1, 4}},
                                 {{128, 512}, {1, 4}, true}, {{256, 512}, {1, 2}, false, true}};
  struct Running {
    Problem problem;
    Inputs inputs;
    Call call;
    DeviceCall on_device;
    Attention attention;
    cuda::Stream stream;

    Running(const Problem& given, bool deterministic, std::uint64_t seed)
        : problem(given),
          inputs(draw_inputs(problem, seed)),
          call(problem, inputs),
          on_device(call),
          attention(problem, {.device = "cuda", .deterministic = deterministic}) {}
  };
  for (const std::int64_t head_dim : {64, 128}) {
    std::vector<std::unique_ptr<Running>> all;
    for (const Way& way : ways) {
      Problem problem = small_problem();
      problem.batch = 1;
      problem.documents.clear();
      problem.tokens = 521 + static_cast<std::int64_t>(4000 * support::test_scale());
      problem.head_dim = head_dim;
      problem.causal = way.causal;
      problem.pattern = make_pattern(Preset::residue, way.segments, way.dilations, problem.heads);
      all.push_back(std::make_unique<Running>(resolve(problem), way.deterministic, all.size()));
    }
    for (int i = 0; i < 3; ++i)
      for (const auto& one : all) {
        one->attention.forward(one->on_device.forward_args(one->stream.get()));
        one->attention.backward(one->on_device.backward_args(one->stream.get()));
      }
    for (const auto& one : all) {
      one->stream.wait();
      EXPECT_EQ(Yardstick(one->problem, one->inputs).faults(one->on_device.result()), "") << one->attention.explain();
    }
  }
}

TEST_F(CudaAttention, SaysWhatItIs) {
  const Problem problem = small_problem();
  const Attention attention(problem, {.device = "cuda"});
  const std::string kernel = device.compute_capability == 90 ? "sm90" : "mma";
  EXPECT_EQ(attention.instruction_set(), kernel);
  EXPECT_EQ(attention.threads(), 0);
  EXPECT_NE(attention.explain().find("kernel " + kernel), std::string::npos) << attention.explain();
  EXPECT_NE(attention.explain().find("333"), std::string::npos) << attention.explain();
  std::int64_t tensors = 0, workspace = 0;
  for (const MemoryComponent& part : attention.memory(Pass::forward))
    (part.name == "control" || part.name == "state" ? workspace : tensors) += part.bytes;
  EXPECT_EQ(tensors, 2 * 333 * ((4 + 2 + 2 + 4) * 64 * 2 + 4 * 4));
  EXPECT_EQ(workspace, static_cast<std::int64_t>(attention.workspace_bytes(Pass::forward)));
  EXPECT_EQ(Attention(problem, {.instruction_set = "mma", .device = "cuda"}).instruction_set(), "mma");
}

TEST_F(CudaAttention, RefusesWhatItCannotDo) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 7, false);
  Call call(problem, inputs);
  const Attention attention(problem, {.device = "cuda"});
  support::expect_refused([&] { attention.forward(call.forward_args()); },
                          {"q must lie in memory", "memory of the host", "device cpu"});
  EXPECT_TRUE(call.lse.untouched());
  EXPECT_THROW(Attention(problem, {.device = "cuda:4095"}), DeviceError);
  support::expect_refused([&] { Attention(problem, {.instruction_set = "fast", .device = "cuda"}); },
                          {"one of sm90, mma, rows", "'fast'"});
  // Work that was refused leaves the device as it was.
  DeviceCall on_device(call);
  const cuda::Stream stream;
  attention.forward(on_device.forward_args(stream.get()));
  stream.wait();
  EXPECT_EQ(Yardstick(problem, inputs).faults(on_device.forward_result()), "");
}

TEST_F(CudaAttention, GradientsInTheCallersMemory) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 6);
  const Yardstick yardstick(problem, inputs);
  for (const bool deterministic : {false, true})
    for (const bool brings_workspace : {false, true}) {
      Call call(problem, inputs);
      DeviceCall on_device(call);
      const Attention attention(problem, {.device = "cuda", .deterministic = deterministic});
      cuda::DeviceBuffer workspace(attention.workspace_bytes(Pass::backward));
      const cuda::Stream stream;
      attention.forward(on_device.forward_args(stream.get()));
      BackwardArgs args = on_device.backward_args(stream.get());
      if (brings_workspace) args.workspace = {workspace.data(), workspace.bytes()};
      attention.backward(args);
      stream.wait();
      EXPECT_EQ(yardstick.faults(on_device.result()), "") << "deterministic " << deterministic;
    }
}

}  // namespace
}  // namespace annulus
