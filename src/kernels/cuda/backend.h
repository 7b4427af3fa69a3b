// The backend as a program sees it that loads the library only when a GPU is asked for: tensors of one problem on the
// device, filled from and read back to host memory.
//
//   const std::unique_ptr<cuda::Backend> backend(load());   // annulus_cuda_backend in libannulus_cuda.so
//   auto work = backend->forward(problem, "auto");
//   work->put("q", q);  ...  work->run();  work->get("out", out);
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "annulus/memory.h"
#include "annulus/problem.h"
#include "kernels/cuda/forward.h"

namespace annulus::cuda {

class DeviceForward {
 public:
  virtual ~DeviceForward() = default;
  virtual void put(const std::string& name, const void* host) = 0;  // q, k, v: dense
  virtual double run() = 0;                                         // seconds, by the device's own clock
  virtual void get(const std::string& name, void* host) = 0;        // out, lse: dense
  virtual std::string kernel() const = 0;
  virtual std::string explain() const = 0;
  virtual std::vector<MemoryComponent> memory() const = 0;  // tensors included
};

// The most FLOP/s that the device can do on such a problem, and how that is known.
struct NominalPeak {
  double flop_per_s = 0;
  std::string what;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual DeviceInfo device() const = 0;
  // Throws OutOfMemory before anything is allocated where the problem does not fit.
  virtual std::unique_ptr<DeviceForward> forward(const Problem& problem, const std::string& kernel) const = 0;
  virtual NominalPeak peak(const Problem& problem) const = 0;
};

using MakeBackend = Backend* (*)();
inline constexpr const char* kMakeBackend = "annulus_cuda_backend";

}  // namespace annulus::cuda
