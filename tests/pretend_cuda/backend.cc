// libannulus_cuda.so for machines without a GPU: what ranks, transports and the tool do with GPUs is tested everywhere,
// on GPUs that are made of threads and walled memory. Kernels are those of the CPU, so nothing here tests a CUDA
// kernel.
//
// It is found as the real one is, beside libannulus: tests name the folder that it is in as LD_LIBRARY_PATH.
//
//   ANNULUS_PRETEND_GPUS      how many there are: 2
//   ANNULUS_PRETEND_GPU_MIB   memory of each: 4096
#include "kernels/cuda/backend.h"

#include <cstring>

#include "pretend_cuda/kernels.h"
#include "pretend_cuda/memory.h"
#include "pretend_cuda/timeline.h"

namespace annulus::pretend {
namespace {

class Copies final : public DeviceCopies {
 public:
  Copies(int gpu, int lanes) : copies_(lanes, gpu) {}

  int device() const override { return copies_.device(); }
  int use(int device) noexcept override { return copies_.use(device); }
  void* lane(int index) override { return copies_.lane(index); }
  std::unique_ptr<DeviceEvent> event() override { return copies_.event(); }
  void hold(void* stream, DeviceEvent& event) override { copies_.hold(stream, event); }
  std::unique_ptr<OwnedBytes> host_memory(std::int64_t bytes) override { return copies_.host_memory(bytes); }
  std::unique_ptr<OwnedBytes> device_memory(std::int64_t bytes) override {
    return std::make_unique<GpuBytes>(device(), bytes);
  }
  void reach(int device) override { copies_.reach(device); }
  void settle() noexcept override { copies_.settle(); }

  void gather(std::span<const StridedBlock> blocks, int, std::byte* packed, int lane) override {
    queue_slice(stream(lane), "copy", total_bytes(blocks),
                [blocks = std::vector(blocks.begin(), blocks.end()), to = here_or_pinned(packed)]() mutable {
                  for (StridedBlock& block : blocks) {
                    if (block.bytes() == 0) continue;
                    block.data = reached(block.data, "what is sent");
                    to = pack(block, to);
                  }
                });
  }
  void copy(std::span<const std::byte> from, std::byte* to, int lane) override {
    queue_slice(stream(lane), "copy", static_cast<std::int64_t>(from.size()),
                [from = std::span{here_or_pinned(from.data()), from.size()}, to = here_or_pinned(to)] {
                  std::ranges::copy(from, to);
                });
  }

 private:
  support::PretendStream& stream(int lane) { return support::PretendStream::at(copies_.lane(lane)); }
  template <class Byte>
  static Byte* here_or_pinned(Byte* address) {
    Byte* const found = support::WalledBytes::reach(address);
    return found != nullptr ? found : address;
  }

  support::PretendCopies copies_;
};

// A problem on one GPU.
class PretendPasses final : public Passes {
 public:
  PretendPasses(const Problem& problem, const Plan& plan, const cuda::PassOptions& options)
      : problem_(problem),
        plan_(plan),
        gpu_(options.device),
        kernels_(problem_, plan_, options, {{all_rows()}, false}) {}

  std::string instruction_set() const override { return std::string(kernels_.instruction_set()); }
  int threads() const override { return 0; }
  std::string explain() const override { return "kernel " + instruction_set() + ", of a pretend GPU\n"; }
  std::vector<MemoryComponent> workspace(Pass pass) const override { return kernels_.workspace(pass); }

  void forward(const ForwardArgs& args) const override {
    with_workspace(args, Pass::forward, [&](const ForwardArgs& ready) {
      const KeySource own = own_keys({ready.k, ready.v, {}, {}});
      kernels_.forward(ready, {.sources = {&own, 1}});
    });
  }
  void backward(const BackwardArgs& args) const override {
    with_workspace(args, Pass::backward, [&](const BackwardArgs& ready) {
      const KeySource own = own_keys({ready.k, ready.v, ready.dk, ready.dv});
      kernels_.backward(ready, {.sources = {&own, 1}, .dq = ready.dq});
    });
  }

 private:
  Rows all_rows() const { return {0, 1, problem_.tokens}; }
  KeySource own_keys(const KeyTensors& tensors) const { return {problem_, {.owner = 0, .rows = all_rows()}, tensors}; }

  template <class Args, class Run>
  void with_workspace(Args args, Pass pass, Run run) const {
    const std::lock_guard lock(mutex_);  // kernels have one stream at a time
    kernels_.stream = args.stream;
    if (!args.workspace.empty()) return run(args);
    const auto own = std::make_shared<GpuBytes>(gpu_, total_bytes(workspace(pass)));
    args.workspace = own->bytes();
    run(args);
    support::PretendStream::at(args.stream).queue([own] {});
  }

  Problem problem_;
  Plan plan_;
  int gpu_;
  mutable std::mutex mutex_;
  mutable PretendKernels kernels_;
};

// What ranks on GPUs refuse; see rank_kernels.cc.
void check_ranks(const Problem& problem) {
  if (problem.pattern.pad_like_torchscale && !problem.causal)
    throw Unsupported("ranks on GPUs have no zero keys; got pad_like_torchscale: leave it out");
}

class PretendBackend final : public cuda::Backend {
 public:
  int current_device() const override { return std::max(0, support::PretendCopies::current_device); }
  int device_count() const override { return static_cast<int>(number_from("ANNULUS_PRETEND_GPUS", 2)); }
  cuda::DeviceInfo info(int device) const override {
    if (device >= device_count() || device >= kMostGpus)
      throw DeviceError("there are " + std::to_string(device_count()) + " pretend GPUs; got " + std::to_string(device));
    cuda::DeviceInfo info;
    info.name = "pretend GPU";
    info.id = "pretend " + std::to_string(device);
    info.compute_capability = 90;
    info.multiprocessors = 1;
    info.memory_bytes = memory_bytes();
    info.free_bytes = free_bytes(device);
    return info;
  }
  std::unique_ptr<Passes> passes(const Problem& problem, const Plan& plan,
                                 const cuda::PassOptions& options) const override {
    return std::make_unique<PretendPasses>(problem, plan, options);
  }
  std::unique_ptr<Kernels> kernels(const Problem& problem, const Plan& plan, const cuda::PassOptions& options,
                                   const Shard& shard) const override {
    check_ranks(problem);
    return std::make_unique<PretendKernels>(problem, plan, options, shard);
  }
  std::unique_ptr<DeviceCopies> copies(int device, int lanes) const override {
    return std::make_unique<Copies>(device, lanes);
  }
  LinkMaker nccl_links(int device) const override {
    LinkMaker maker;
    maker.trouble = "NCCL needs a GPU; got a pretend one";
    maker.gpu = "pretend " + std::to_string(device);
    maker.text = maker.gpu;
    return maker;
  }
  std::unique_ptr<cuda::DeviceMemory> allocate(int device, std::size_t bytes) const override {
    return std::make_unique<Memory>(device, bytes);
  }
  double time(int, const std::function<void(void* stream)>& queue) const override {
    support::PretendStream stream;
    const auto begin = std::chrono::steady_clock::now();
    queue(&stream);
    stream.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::unique_ptr<cuda::Timeline> timeline(int) const override { return std::make_unique<PretendTimeline>(); }
  Peak measure_peak(int, DType dtype) const override {
    return annulus::measure_peak(instruction_sets().front(), dtype,
                                 static_cast<int>(std::thread::hardware_concurrency()));
  }
};

}  // namespace
}  // namespace annulus::pretend

extern "C" annulus::cuda::Backend* annulus_cuda_backend(const char* version) {
  return std::strcmp(version, ANNULUS_VERSION) == 0 ? new annulus::pretend::PretendBackend() : nullptr;
}
