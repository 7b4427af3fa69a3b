#include "kernels/cuda/backend.h"

#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/cuda/backward.h"
#include "kernels/cuda/copies.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/nccl_link.h"
#include "kernels/cuda/peak.h"
#include "kernels/cuda/rank_kernels.h"
#include "kernels/cuda/timeline.h"
#include "plan/plan.h"

namespace annulus::cuda {
namespace {

// Whoever hands host memory to a GPU should read that, not that the device has died.
void check_reachable(const char* name, const void* data, int device) {
  if (data == nullptr) return;
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, data), std::string("ask where ") + name + " lies");
  const std::string here = "cuda:" + std::to_string(device);
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device)
    throw InvalidArgument(std::string(name) + " must lie in the memory of " + here + "; got memory of cuda:" +
                          std::to_string(attributes.device) + ": copy it, or use that device");
  if (attributes.type != cudaMemoryTypeUnregistered) return;
  int reads_all = 0;
  check(cudaDeviceGetAttribute(&reads_all, cudaDevAttrPageableMemoryAccess, device), "ask what the device can read");
  if (reads_all == 0)
    throw InvalidArgument(std::string(name) + " must lie in memory that " + here +
                          " can reach; got memory of the host: copy it to the device, or use device cpu");
}

// A workspace for one call that brought none: from the stream's own pool, so that nobody waits.
class OwnWorkspace {
 public:
  OwnWorkspace(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    if (bytes > 0) check(cudaMallocAsync(&data_, bytes, stream), "allocate a workspace of " + std::to_string(bytes));
  }
  ~OwnWorkspace() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  OwnWorkspace(const OwnWorkspace&) = delete;
  OwnWorkspace& operator=(const OwnWorkspace&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

class GpuPasses : public Passes {
 public:
  GpuPasses(const Problem& problem, const Plan& plan, const PassOptions& options)
      : device_(options.device),
        problem_(problem),
        plan_(plan),
        options_(options),
        forward_(problem, plan, {.kernel = options.kernel, .sweeps = {}}) {}

  std::string instruction_set() const override { return forward_.kernel(); }
  int threads() const override { return 0; }
  std::string explain() const override { return forward_.explain(); }

  std::vector<MemoryComponent> workspace(Pass pass) const override {
    return pass == Pass::forward ? forward_.workspace() : planned_backward().workspace();
  }

  void forward(const ForwardArgs& args) const override {
    const DeviceScope scope(device_);
    check_reachable("q", args.q.data, device_);
    check_reachable("k", args.k.data, device_);
    check_reachable("v", args.v.data, device_);
    check_reachable("out", args.out.data, device_);
    check_reachable("lse", args.lse.data(), device_);
    check_reachable("the workspace", args.workspace.data(), device_);
    with_workspace(args, Pass::forward,
                   [&](const ForwardArgs& ready, cudaStream_t stream) { forward_.run(ready, stream); });
  }

  void backward(const BackwardArgs& args) const override {
    const DeviceScope scope(device_);
    const std::pair<const char*, const void*> given[] = {
        {"q", args.q.data},       {"k", args.k.data},
        {"v", args.v.data},       {"out", args.out.data},
        {"lse", args.lse.data()}, {"dout", args.dout.data},
        {"dq", args.dq.data},     {"dk", args.dk.data},
        {"dv", args.dv.data},     {"the workspace", args.workspace.data()}};
    for (const auto& [name, data] : given) check_reachable(name, data, device_);
    with_workspace(args, Pass::backward,
                   [&](const BackwardArgs& ready, cudaStream_t stream) { planned_backward().run(ready, stream); });
  }

 private:
  // Planned when it is first asked for: many only go forward.
  const Backward& planned_backward() const {
    const std::lock_guard lock(mutex_);
    if (!backward_) {
      const DeviceScope scope(device_);
      backward_.emplace(
          problem_, plan_,
          BackwardOptions{.kernel = options_.kernel, .deterministic = options_.deterministic, .sweeps = {}});
    }
    return *backward_;
  }

  template <class Args, class Run>
  void with_workspace(Args args, Pass pass, Run run) const {
    const auto stream = static_cast<cudaStream_t>(args.stream);
    if (!args.workspace.empty()) return run(args, stream);
    const auto bytes = static_cast<std::size_t>(total_bytes(workspace(pass)));
    const OwnWorkspace own(bytes, stream);
    args.workspace = {own.data(), bytes};
    run(args, stream);
  }

  int device_;
  Problem problem_;
  Plan plan_;
  PassOptions options_;
  Forward forward_;
  mutable std::mutex mutex_;
  mutable std::optional<Backward> backward_;
};

class Memory : public DeviceMemory {
 public:
  Memory(int device, std::size_t bytes) : device_(device), buffer_(bytes) {}

  void* data() const override { return buffer_.data(); }
  void put(const void* host) override {
    const DeviceScope scope(device_);
    copy_to_device(buffer_.data(), host, buffer_.bytes(), "copy to the device");
  }
  void get(void* host) const override {
    const DeviceScope scope(device_);
    if (buffer_.bytes() > 0)
      check(cudaMemcpy(host, buffer_.data(), buffer_.bytes(), cudaMemcpyDeviceToHost), "copy from the device");
  }

 private:
  int device_;
  DeviceBuffer buffer_;
};

class CudaBackend : public Backend {
 public:
  int current_device() const override {
    int device = 0;
    check(cudaGetDevice(&device), "find a CUDA device");
    return device;
  }
  int device_count() const override {
    int count = 0;
    check(cudaGetDeviceCount(&count), "count the CUDA devices");
    return count;
  }
  DeviceInfo info(int device) const override {
    const DeviceScope scope(device);
    return device_info();
  }
  std::unique_ptr<Passes> passes(const Problem& problem, const Plan& plan, const PassOptions& options) const override {
    const DeviceScope scope(options.device);
    return std::make_unique<GpuPasses>(problem, plan, options);
  }
  std::unique_ptr<Kernels> kernels(const Problem& problem, const Plan& plan, const PassOptions& options,
                                   const Shard& shard) const override {
    const DeviceScope scope(options.device);
    return make_rank_kernels(problem, plan, options, shard);
  }
  std::unique_ptr<DeviceCopies> copies(int device, int lanes) const override { return make_copies(device, lanes); }
  LinkMaker nccl_links(int device) const override { return cuda::nccl_links(device); }
  std::unique_ptr<DeviceMemory> allocate(int device, std::size_t bytes) const override {
    const DeviceScope scope(device);
    return std::make_unique<Memory>(device, bytes);
  }
  double time(int device, const std::function<void(void* stream)>& queue,
              const std::function<void()>& meanwhile) const override {
    const DeviceScope scope(device);
    const Stream stream;
    Event begin, end;
    begin.record(stream.get());
    queue(stream.get());
    end.record(stream.get());
    while (meanwhile && !end.passed()) {
      meanwhile();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return end.ms_since(begin) * 1e-3;
  }
  std::unique_ptr<Timeline> timeline(int device) const override {
    const DeviceScope scope(device);
    return make_timeline();
  }
  Peak measure_peak(int device, DType dtype) const override {
    const DeviceScope scope(device);
    return cuda::measure_peak(device_info(), dtype);
  }
};

}  // namespace
}  // namespace annulus::cuda

extern "C" annulus::cuda::Backend* annulus_cuda_backend(const char* version) {
  return std::strcmp(version, ANNULUS_VERSION) == 0 ? new annulus::cuda::CudaBackend() : nullptr;
}
