#include "kernels/cuda/backend.h"

#include <cuda_runtime.h>

#include <map>

#include "kernels/cuda/memory.h"
#include "plan/plan.h"

namespace annulus::cuda {
namespace {

std::vector<MemoryComponent> tensors_of(const Problem& problem) {
  const std::int64_t rows = problem.batch * problem.tokens;
  const std::int64_t row_bytes = problem.head_dim * size_of(problem.dtype);
  const std::int64_t of_q = rows * problem.heads * row_bytes;
  const std::int64_t of_k = rows * problem.kv_heads * row_bytes;
  return {{"q", of_q}, {"k", of_k}, {"v", of_k}, {"out", of_q}, {"lse", rows * problem.heads * 4}};
}

class Work : public DeviceForward {
 public:
  Work(const Problem& problem, const std::string& kernel)
      : problem_(problem), forward_(problem, make_plan(problem), {.kernel = kernel, .sweeps = {}}) {
    const std::int64_t free = device_info().free_bytes;
    const std::int64_t needed = total_bytes(memory());
    if (needed > free)
      throw OutOfMemory("a problem must fit into the GPU's memory; it needs " + std::to_string(needed) + " bytes and " +
                        std::to_string(free) + " are free: give smaller sizes or use several devices");
    for (const MemoryComponent& tensor : tensors_of(problem))
      tensors_[tensor.name] = DeviceBuffer(static_cast<std::size_t>(tensor.bytes));
    workspace_ = DeviceBuffer(static_cast<std::size_t>(total_bytes(forward_.workspace())));
  }

  void put(const std::string& name, const void* host) override {
    const DeviceBuffer& tensor = tensors_.at(name);
    if (tensor.bytes() > 0)
      check(cudaMemcpy(tensor.data(), host, tensor.bytes(), cudaMemcpyHostToDevice), "copy " + name + " to the device");
  }

  double run() override {
    const std::array<std::int64_t, 4> q_shape{problem_.batch, problem_.tokens, problem_.heads, problem_.head_dim};
    const std::array<std::int64_t, 4> k_shape{problem_.batch, problem_.tokens, problem_.kv_heads, problem_.head_dim};
    ForwardArgs args;
    args.q = {data("q"), problem_.dtype, q_shape};
    args.k = {data("k"), problem_.dtype, k_shape};
    args.v = {data("v"), problem_.dtype, k_shape};
    args.out = {data("out"), problem_.dtype, q_shape};
    args.lse = {static_cast<float*>(data("lse")), tensors_.at("lse").bytes() / sizeof(float)};
    args.workspace = {workspace_.data(), workspace_.bytes()};
    begin_.record(stream_.get());
    forward_.run(args, stream_.get());
    end_.record(stream_.get());
    return end_.ms_since(begin_) * 1e-3;
  }

  void get(const std::string& name, void* host) override {
    const DeviceBuffer& tensor = tensors_.at(name);
    if (tensor.bytes() > 0)
      check(cudaMemcpy(host, tensor.data(), tensor.bytes(), cudaMemcpyDeviceToHost),
            "copy " + name + " from the device");
  }

  std::string kernel() const override { return forward_.kernel(); }
  std::string explain() const override { return forward_.explain(); }
  std::vector<MemoryComponent> memory() const override {
    std::vector<MemoryComponent> all = tensors_of(problem_);
    for (const MemoryComponent& part : forward_.workspace()) all.push_back(part);
    return all;
  }

 private:
  void* data(const std::string& name) const { return tensors_.at(name).data(); }

  Problem problem_;
  Forward forward_;
  std::map<std::string, DeviceBuffer> tensors_;
  DeviceBuffer workspace_;
  Stream stream_;
  Event begin_, end_;
};

class CudaBackend : public Backend {
 public:
  DeviceInfo device() const override { return device_info(); }
  std::unique_ptr<DeviceForward> forward(const Problem& problem, const std::string& kernel) const override {
    return std::make_unique<Work>(problem, kernel);
  }

  // What the tensor cores of one multiprocessor do in a clock, dense, times the highest clock.
  NominalPeak peak(const Problem& problem) const override {
    const DeviceInfo info = device_info();
    int kilohertz = 0;
    int device = 0;
    check(cudaGetDevice(&device), "find the device");
    check(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device), "ask for the clock rate");
    const double half_flop = info.compute_capability >= 90 ? 4096 : info.compute_capability == 80 ? 2048 : 1024;
    const bool fp32 = problem.dtype == DType::fp32;  // three TF32 products at half the rate
    const double flop_per_clock = fp32 ? half_flop / 6 : half_flop;
    return {flop_per_clock * info.multiprocessors * kilohertz * 1e3,
            std::string(fp32 ? "3 x TF32" : std::string(name(problem.dtype))) + " tensor cores at the highest clock"};
  }
};

}  // namespace
}  // namespace annulus::cuda

extern "C" annulus::cuda::Backend* annulus_cuda_backend() { return new annulus::cuda::CudaBackend(); }
