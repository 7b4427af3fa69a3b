// The CUDA runtime of GPUs that are made of threads: a stream is one, an event a number that it has passed, memory is
// walled. As with CUDA, streams do not wait for each other, and a copy without a stream waits for none but the default
// one.
//
//   ANNULUS_PRETEND_GPUS      how many there are: 2
//   ANNULUS_PRETEND_GPU_MIB   memory of each: 4096
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "pretend_cuda/memory.h"
#include "support/pretend_gpu.h"

using annulus::support::PretendStream;
using annulus::support::WalledBytes;

namespace {

using Clock = std::chrono::steady_clock;

thread_local int current_device = 0;

constexpr int kMostGpus = 8;

std::int64_t number_from(const char* variable, std::int64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoll(text);
}
int count_devices() {
  return static_cast<int>(std::min<std::int64_t>(number_from("ANNULUS_PRETEND_GPUS", 2), kMostGpus));
}
std::int64_t gpu_bytes() { return number_from("ANNULUS_PRETEND_GPU_MIB", 4096) << 20; }

class Allocations {
 public:
  static Allocations& all() {
    static auto& all = *new Allocations;  // memory may outlive whatever ends before it
    return all;
  }

  void* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto& taken = taken_[static_cast<std::size_t>(current_device)];
    if (taken + static_cast<std::int64_t>(bytes) > gpu_bytes()) return nullptr;
    auto memory = std::make_unique<WalledBytes>(static_cast<std::int64_t>(bytes));
    void* const data = memory->bytes().data();
    std::memset(annulus::pretend::reached(static_cast<std::byte*>(data)), 0xff, bytes);  // NaN, for who reads it so
    taken += static_cast<std::int64_t>(bytes);
    blocks_.emplace(static_cast<std::byte*>(data), Block{current_device, std::move(memory)});
    return data;
  }
  void free(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<std::byte*>(data));
    taken_[static_cast<std::size_t>(found->second.device)] -=
        static_cast<std::int64_t>(found->second.memory->bytes().size());
    blocks_.erase(found);
  }
  std::int64_t free_bytes() {
    const std::lock_guard lock(mutex_);
    return gpu_bytes() - taken_[static_cast<std::size_t>(current_device)];
  }
  // -1: not of a GPU.
  int device_of(const void* data) {
    const std::lock_guard lock(mutex_);
    auto found = blocks_.upper_bound(static_cast<const std::byte*>(data));
    if (found == blocks_.begin()) return -1;
    --found;
    const auto bytes = static_cast<std::ptrdiff_t>(found->second.memory->bytes().size());
    return static_cast<const std::byte*>(data) - found->first < bytes ? found->second.device : -1;
  }

 private:
  struct Block {
    int device;
    std::unique_ptr<WalledBytes> memory;
  };
  std::mutex mutex_;
  std::map<const std::byte*, Block, std::less<>> blocks_;
  std::array<std::int64_t, kMostGpus> taken_{};
};

// Memory of a GPU, or the host's own.
template <class Byte>
Byte* here(Byte* address) {
  Byte* const found = WalledBytes::reach(address);
  return found != nullptr ? found : address;
}

struct Moments {
  std::mutex mutex;
  std::condition_variable news;
  std::int64_t recorded = 0, passed = 0;
  Clock::time_point when;  // the last one

  void wait(std::int64_t moment) {
    std::unique_lock lock(mutex);
    news.wait(lock, [&] { return passed >= moment; });
  }
  std::int64_t last() {
    const std::lock_guard lock(mutex);
    return recorded;
  }
};

}  // namespace

struct CUevent_st {
  std::shared_ptr<Moments> moments = std::make_shared<Moments>();
};

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return error == cudaErrorInvalidDevice ? "invalid device ordinal" : "an error of a pretend GPU";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= count_devices()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = count_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, "pretend GPU");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->sharedMemPerBlockOptin = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "pretend:%d", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) { return cudaSuccess; }

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = static_cast<std::size_t>(Allocations::all().free_bytes());
  *total = static_cast<std::size_t>(gpu_bytes());
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  *data = Allocations::all().take(bytes);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  PretendStream::wait_for_all();
  Allocations::all().free(data);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t) { return cudaMalloc(data, bytes); }
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  PretendStream::at(stream).queue([data] { Allocations::all().free(data); });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  *data = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  PretendStream::wait_for_all();
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  PretendStream::at(nullptr).wait();
  std::memcpy(here(static_cast<std::byte*>(to)), here(static_cast<const std::byte*>(from)), bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                         std::size_t height, cudaMemcpyKind kind) {
  for (std::size_t i = 0; i < height; ++i)
    cudaMemcpy(static_cast<std::byte*>(to) + i * to_pitch, static_cast<const std::byte*>(from) + i * from_pitch, width,
               kind);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  PretendStream::at(stream).queue([to = static_cast<std::byte*>(to), from = static_cast<const std::byte*>(from),
                                   bytes] { std::memcpy(here(to), here(from), bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  PretendStream::at(stream).queue([to = static_cast<std::byte*>(to), value, bytes] {
    annulus::pretend::reached(to + bytes - 1);  // all of it
    std::memset(annulus::pretend::reached(to), value, bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const int device = Allocations::all().device_of(data);
  *attributes = {device < 0 ? cudaMemoryTypeUnregistered : cudaMemoryTypeDevice, device};
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }

cudaError_t cudaDeviceSynchronize() {
  PretendStream::wait_for_all();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new PretendStream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<PretendStream*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  PretendStream::at(stream).wait();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  PretendStream::at(stream).queue(
      [moments = event->moments, moment = event->moments->last()] { moments->wait(moment); });
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(event->moments->mutex);
  PretendStream::at(stream).queue([moments = event->moments, moment = ++event->moments->recorded] {
    const std::lock_guard passing(moments->mutex);
    moments->passed = std::max(moments->passed, moment);
    moments->when = Clock::now();
    moments->news.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(event->moments->mutex);
  return event->moments->passed >= event->moments->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  event->moments->wait(event->moments->last());
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  const std::scoped_lock lock(begin->moments->mutex, end->moments->mutex);
  *ms = std::chrono::duration<float, std::milli>(end->moments->when - begin->moments->when).count();
  return cudaSuccess;
}
