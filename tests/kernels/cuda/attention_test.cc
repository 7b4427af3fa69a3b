// annulus::Attention on a GPU: the caller's memory, stream and workspace, and what it says of itself.
#include "annulus/attention.h"

#include <gtest/gtest.h>

#include "reference/draw_inputs.h"
#include "support/device_call.h"
#include "support/refusal.h"
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
  DeviceTensor q, k, v, out;
  cuda::DeviceBuffer lse;

  DeviceCall(Call& given, bool aligned)
      : call(given),
        q(call.q, aligned),
        k(call.k, aligned),
        v(call.v, aligned),
        out(call.out, aligned),
        lse(call.lse.span().size_bytes()) {}

  ForwardArgs args(void* stream) const {
    ForwardArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.out = out.view();
    args.lse = {reinterpret_cast<float*>(lse.data()), call.lse.span().size()};
    args.stream = stream;
    return args;
  }
  reference::Result result() {
    out.bring_back();
    const std::span<float> to = call.lse.span();
    cuda::check(cudaMemcpy(to.data(), lse.data(), to.size_bytes(), cudaMemcpyDeviceToHost), "copy lse back");
    return call.forward_result();
  }
};

TEST_F(CudaAttention, ComputesInTheCallersMemory) {
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const Layout layout : {Layout::dense, Layout::apart, Layout::heads_major})
      for (const bool aligned : {true, false})
        for (const bool brings_workspace : {true, false}) {
          const Problem problem = small_problem(dtype);
          const Inputs inputs = draw_inputs(problem, 5, false);
          Call call(problem, inputs, {.options = {}, .inputs = layout, .outputs = layout});
          DeviceCall on_device(call, aligned);
          const Attention attention(problem, {.device = brings_workspace ? "cuda" : "cuda:0"});
          cuda::DeviceBuffer workspace(attention.workspace_bytes(Pass::forward));
          const cuda::Stream stream;
          ForwardArgs args = on_device.args(stream.get());
          if (brings_workspace) args.workspace = {workspace.data(), workspace.bytes()};
          attention.forward(args);
          stream.wait();
          EXPECT_EQ(Yardstick(problem, inputs).faults(on_device.result()), "");
          EXPECT_EQ(call.out.faults("out"), "");
        }
}

// Whatever synchronised or allocated would end the capture; the default stream is another one.
TEST_F(CudaAttention, CallsCanBeCapturedInAGraph) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 6, false);
  const Attention attention(problem, {.device = "cuda"});
  for (const bool brings_workspace : {true, false}) {
    Call call(problem, inputs);
    DeviceCall on_device(call, true);
    cuda::DeviceBuffer workspace(attention.workspace_bytes(Pass::forward));
    const cuda::Stream stream;
    ForwardArgs args = on_device.args(stream.get());
    if (brings_workspace) args.workspace = {workspace.data(), workspace.bytes()};
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "begin a capture");
    attention.forward(args);
    cuda::check(cudaStreamEndCapture(stream.get(), &graph), "end a capture");
    cuda::check(cudaGraphInstantiate(&ready, graph, 0), "make a graph");
    for (int i = 0; i < 2; ++i) cuda::check(cudaGraphLaunch(ready, stream.get()), "start a graph");
    stream.wait();
    EXPECT_EQ(Yardstick(problem, inputs).faults(on_device.result()), "");
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
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
  DeviceCall on_device(call, true);
  const cuda::Stream stream;
  attention.forward(on_device.args(stream.get()));
  stream.wait();
  EXPECT_EQ(Yardstick(problem, inputs).faults(on_device.result()), "");
}

TEST_F(CudaAttention, GradientsInTheCallersMemory) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 6);
  const Yardstick yardstick(problem, inputs);
  for (const bool deterministic : {false, true})
    for (const bool brings_workspace : {false, true}) {
      Call call(problem, inputs);
      DeviceCall on_device(call, true);
      DeviceTensor dout(call.dout, true), dq(call.dq, true), dk(call.dk, true), dv(call.dv, true);
      const Attention attention(problem, {.device = "cuda", .deterministic = deterministic});
      cuda::DeviceBuffer workspace(attention.workspace_bytes(Pass::backward));
      const cuda::Stream stream;
      const ForwardArgs forward = on_device.args(stream.get());
      attention.forward(forward);
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
      if (brings_workspace) args.workspace = {workspace.data(), workspace.bytes()};
      args.stream = stream.get();
      attention.backward(args);
      stream.wait();
      (void)on_device.result();
      for (DeviceTensor* tensor : {&dq, &dk, &dv}) tensor->bring_back();
      EXPECT_EQ(yardstick.faults(call.result()), "") << "deterministic " << deterministic;
    }
}

}  // namespace
}  // namespace annulus
