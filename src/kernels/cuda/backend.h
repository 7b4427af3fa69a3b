// The CUDA backend as libannulus sees it: an interface without CUDA in it. It lives in a library of its own,
// libannulus_cuda.so, which load.h finds when a GPU is asked for and not before.
//
//   const cuda::Backend& backend = cuda::load_backend();
//   std::unique_ptr<Passes> passes = backend.passes(problem, plan, {.device = 0});
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/forward.h"
#include "kernels/kernels.h"
#include "kernels/passes.h"
#include "kernels/peak.h"
#include "transport/device_copies.h"
#include "transport/device_link.h"

namespace annulus::cuda {

// What a null stream means, as a stream that is not null (cudaStreamLegacy).
inline void* const kDefaultStream = reinterpret_cast<void*>(1);

struct PassOptions {
  int device = 0;
  std::string kernel = "auto";  // or one of kKernels
  bool deterministic = false;   // dq too has the same bits run after run
};

// Memory of a device, for programs that have no CUDA of their own: the tool. Copies wait until they are done.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* data() const = 0;
  virtual void put(const void* host) = 0;
  virtual void get(void* host) const = 0;
};

// What a GPU did from begin to end, on the clock of the host.
struct DeviceSlice {
  const char* what = "";  // attend, copy and so on: a literal
  std::int64_t bytes = 0;
  std::chrono::steady_clock::time_point begin, end;
};

class Timeline {
 public:
  virtual ~Timeline() = default;
  // Everything so far, in the order in which it was queued. Waits for it.
  virtual std::vector<DeviceSlice> slices() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual int current_device() const = 0;  // of the calling thread
  virtual int device_count() const = 0;
  virtual DeviceInfo info(int device) const = 0;
  // Takes a resolved problem and its plan.
  virtual std::unique_ptr<Passes> passes(const Problem& problem, const Plan& plan,
                                         const PassOptions& options) const = 0;
  // Of one rank. Problem and plan must outlive them.
  virtual std::unique_ptr<Kernels> kernels(const Problem& problem, const Plan& plan, const PassOptions& options,
                                           const Shard& shard) const = 0;

  // What transports move memory of the device with.
  virtual std::unique_ptr<DeviceCopies> copies(int device, int lanes = 1) const = 0;
  virtual LinkMaker nccl_links(int device) const = 0;

  virtual std::unique_ptr<DeviceMemory> allocate(int device, std::size_t bytes) const = 0;
  // Seconds, by the device's own clock, of what `queue` puts on the stream that it is given. `meanwhile` is called now
  // and then until that is done.
  virtual double time(int device, const std::function<void(void* stream)>& queue,
                      const std::function<void()>& meanwhile = {}) const = 0;
  // Records what ranks and transports of the calling thread do on a device, for as long as it lives.
  virtual std::unique_ptr<Timeline> timeline(int device) const = 0;
  // What the tensor cores do in a loop that does nothing else, on numbers of this type.
  virtual Peak measure_peak(int device, DType dtype) const = 0;
};

// What the library exports: a backend, or null where it is not of this version.
using MakeBackend = Backend* (*)(const char* version);
inline constexpr const char* kMakeBackend = "annulus_cuda_backend";

}  // namespace annulus::cuda
