// One forward call on a GPU with everything around it: guarded tensors, poisoned outputs and workspace.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cuda/forward.h"
#include "kernels/cuda/memory.h"
#include "plan/plan.h"
#include "support/call.h"

namespace annulus::support {

// Skips where there is no GPU, and says why.
class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    try {
      device = cuda::device_info();
    } catch (const DeviceError& error) {
      GTEST_SKIP() << "no CUDA device: " << error.what();
    }
  }
  cuda::DeviceInfo device;
};

// A host tensor's memory on the device, its first element at a multiple of 16 bytes or just of its own size.
class DeviceTensor {
 public:
  DeviceTensor(HostTensor& host, bool aligned)
      : host_(host),
        shift_(aligned ? 128 - HostTensor::kGuardBytes : 0),
        memory_(host.storage().size() + shift_ + 128) {
    cuda::copy_to_device(memory_.data() + shift_, host.storage().data(), host.storage().size(), "copy a tensor");
  }
  TensorView view() const {
    TensorView view = host_.view();
    view.data = memory_.data() + shift_ + HostTensor::kGuardBytes;
    return view;
  }
  void bring_back() {
    cuda::check(
        cudaMemcpy(host_.storage().data(), memory_.data() + shift_, host_.storage().size(), cudaMemcpyDeviceToHost),
        "copy a tensor back");
  }

 private:
  HostTensor& host_;
  std::size_t shift_;
  cuda::DeviceBuffer memory_;
};

// Of every byte of a workspace: numbers, since results that are not finite would be computed again, row by row.
inline constexpr int kWorkspacePoison = 0x41;

struct DeviceWay {
  std::string kernel = "auto";
  std::vector<std::vector<int>> sweeps = {};
  bool aligned = true;
  bool wants_lse = true;
  Layout layout = Layout::dense;
};

inline std::string describe(const DeviceWay& way) {
  std::string text = "kernel " + way.kernel + (way.aligned ? "" : " misaligned") + " layout " +
                     std::to_string(static_cast<int>(way.layout)) + " sweeps";
  for (const std::vector<int>& sweep : way.sweeps) {
    text += " {";
    for (const int branch : sweep) text += " " + std::to_string(branch);
    text += " }";
  }
  return text;
}

// Runs forward on the device; the call has the results. Throws Unsupported where the kernel does not fit.
inline std::string run_on_device(Call& call, const DeviceWay& way) {
  const Plan plan = make_plan(call.problem);
  const cuda::Forward forward(call.problem, plan, {.kernel = way.kernel, .sweeps = way.sweeps});
  DeviceTensor q(call.q, way.aligned), k(call.k, way.aligned), v(call.v, way.aligned), out(call.out, way.aligned);
  const std::span<float> lse = call.lse.span();
  const auto workspace_bytes = static_cast<std::size_t>(total_bytes(forward.workspace()));
  cuda::DeviceBuffer lse_memory(lse.size_bytes()), workspace(workspace_bytes);
  const cuda::Stream stream;
  if (!lse.empty())
    cuda::check(cudaMemcpy(lse_memory.data(), lse.data(), lse.size_bytes(), cudaMemcpyHostToDevice), "copy lse");
  if (workspace_bytes > 0)
    cuda::check(cudaMemset(workspace.data(), kWorkspacePoison, workspace_bytes), "poison the workspace");
  cuda::check(cudaDeviceSynchronize(), "prepare");
  ForwardArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.out = out.view();
  if (way.wants_lse) args.lse = {reinterpret_cast<float*>(lse_memory.data()), lse.size()};
  args.workspace = {workspace.data(), workspace_bytes};
  forward.run(args, stream.get());
  stream.wait();
  out.bring_back();
  if (!lse.empty())
    cuda::check(cudaMemcpy(lse.data(), lse_memory.data(), lse.size_bytes(), cudaMemcpyDeviceToHost), "copy lse back");
  const std::string fault = call.out.faults("out");
  if (!fault.empty() || lse.empty()) return fault;
  if (!way.wants_lse) return call.lse.untouched() ? "" : "lse: written, though nobody asked";
  return call.lse.faults();
}

}  // namespace annulus::support
