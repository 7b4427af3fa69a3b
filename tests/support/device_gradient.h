// Forward, then backward on a GPU with everything around them: guarded tensors, poisoned outputs and workspace.
#pragma once

#include "kernels/cuda/backward.h"
#include "support/device_call.h"

namespace annulus::support {

struct GradientWay {
  std::string kernel = "auto";
  bool deterministic = false;
  std::vector<std::vector<int>> sweeps = {};
  std::int64_t tiles_ahead = -1;
  bool aligned = true;
  Layout layout = Layout::dense;
};

inline std::string describe(const GradientWay& way) {
  DeviceWay same;
  same.kernel = way.kernel;
  same.sweeps = way.sweeps;
  same.aligned = way.aligned;
  same.layout = way.layout;
  return describe(same) + (way.deterministic ? " deterministic" : "") +
         (way.tiles_ahead < 0 ? "" : " slots " + std::to_string(way.tiles_ahead) + " tiles ahead");
}

// Backward on the device, after forward; the call has the results. Throws Unsupported where the kernel does not fit.
inline std::string run_backward_on_device(Call& call, const GradientWay& way) {
  const cuda::Backward backward(
      call.problem, make_plan(call.problem),
      {.kernel = way.kernel, .deterministic = way.deterministic, .sweeps = way.sweeps, .tiles_ahead = way.tiles_ahead});
  DeviceTensor q(call.q, way.aligned), k(call.k, way.aligned), v(call.v, way.aligned), out(call.out, way.aligned),
      dout(call.dout, way.aligned), dq(call.dq, way.aligned), dk(call.dk, way.aligned), dv(call.dv, way.aligned);
  const std::span<float> lse = call.lse.span();
  const auto workspace_bytes = static_cast<std::size_t>(total_bytes(backward.workspace()));
  cuda::DeviceBuffer lse_memory(lse.size_bytes()), workspace(workspace_bytes);
  const cuda::Stream stream;
  if (!lse.empty())
    cuda::check(cudaMemcpy(lse_memory.data(), lse.data(), lse.size_bytes(), cudaMemcpyHostToDevice), "copy lse");
  if (workspace_bytes > 0)
    cuda::check(cudaMemset(workspace.data(), kWorkspacePoison, workspace_bytes), "poison the workspace");
  cuda::check(cudaDeviceSynchronize(), "prepare");
  BackwardArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.out = out.view();
  args.lse = {reinterpret_cast<const float*>(lse_memory.data()), lse.size()};
  args.dout = dout.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.workspace = {workspace.data(), workspace_bytes};
  backward.run(args, stream.get());
  stream.wait();
  std::string fault;
  for (const auto& [tensor, host, name] :
       {std::tuple{&dq, &call.dq, "dq"}, std::tuple{&dk, &call.dk, "dk"}, std::tuple{&dv, &call.dv, "dv"}}) {
    tensor->bring_back();
    if (fault.empty()) fault = host->faults(name);
  }
  return fault;
}

}  // namespace annulus::support
