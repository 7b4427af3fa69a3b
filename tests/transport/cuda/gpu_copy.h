// Memory of the host on the GPU as it lies, and back; and what to do where there is no GPU.
#pragma once

#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <optional>

#include "annulus/transport.h"
#include "kernels/cuda/forward.h"
#include "kernels/cuda/memory.h"
#include "transport/payload.h"

namespace annulus {

// Why there is no GPU here, or nothing.
inline std::optional<std::string> why_no_gpu() {
  try {
    cuda::device_info();
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

// The bytes from a block's first to its last.
inline std::int64_t extent(const StridedBlock& block) {
  std::int64_t bytes = block.run_bytes;
  for (const Axis& axis : block.axes) bytes += (axis.count - 1) * axis.stride_bytes;
  return bytes;
}

// An exchange's memory on the GPU, and back.
class GpuCopy {
 public:
  GpuCopy(const Exchange& host, cudaStream_t stream) : exchange(host), host_receives_(host.receives) {
    exchange.stream = stream;
    for (Send& send : exchange.sends)
      for (StridedBlock& block : send.blocks)
        block.data = block.bytes() > 0 ? upload(block.data, extent(block), stream) : nullptr;
    for (Receive& receive : exchange.receives)
      receive.bytes = {upload(receive.bytes.data(), static_cast<std::int64_t>(receive.bytes.size()), stream),
                       receive.bytes.size()};
  }

  void bring_back(cudaStream_t stream) const {
    for (std::size_t i = 0; i < host_receives_.size(); ++i)
      if (!host_receives_[i].bytes.empty())
        cuda::check(cudaMemcpyAsync(host_receives_[i].bytes.data(), exchange.receives[i].bytes.data(),
                                    host_receives_[i].bytes.size(), cudaMemcpyDeviceToHost, stream),
                    "bring back");
    cuda::check(cudaStreamSynchronize(stream), "bring back");
  }

  Exchange exchange;

 private:
  std::byte* upload(const std::byte* host, std::int64_t bytes, cudaStream_t stream) {
    if (bytes == 0) return nullptr;
    const auto shift = reinterpret_cast<std::uintptr_t>(host) % 16;  // alignments as on the host
    const cuda::DeviceBuffer& buffer = memory_.emplace_back(static_cast<std::size_t>(bytes) + shift);
    cuda::check(
        cudaMemcpyAsync(buffer.data() + shift, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream),
        "upload");
    return buffer.data() + shift;
  }

  std::deque<cuda::DeviceBuffer> memory_;
  std::vector<Receive> host_receives_;
};

// A main that skips everything where there is no GPU, and says why; `run` runs the tests.
inline int run_on_gpu(const std::function<int()>& run) {
  const auto reason = why_no_gpu();
  if (!reason) return run();
  std::printf("Skipped: no CUDA device: %s\n", reason->c_str());
  return 0;
}

}  // namespace annulus
