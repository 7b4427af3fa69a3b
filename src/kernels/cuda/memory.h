// What CUDA hands out, owned: the current device, memory, streams, events.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"

namespace annulus::cuda {

// A device is the calling thread's current one for as long as this lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&before_), "find a CUDA device");
    changed_ = before_ != device;
    if (changed_) check(cudaSetDevice(device), "use cuda:" + std::to_string(device));
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes), "allocate " + std::to_string(bytes) + " bytes");
  }
  ~DeviceBuffer() {
    if (data_ != nullptr) cudaFree(data_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Returns when the bytes are there. cudaMemcpy alone returns when it has read them, and a stream that does not wait for
// the default stream would run ahead of the rest.
inline void copy_to_device(void* to, const void* from, std::size_t bytes, const std::string& what) {
  if (bytes == 0) return;
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), what);
  check(cudaStreamSynchronize(cudaStreamLegacy), what);
}

// A host list on the device. Waits for the copy: for planning, not for calls.
template <class T>
DeviceBuffer to_device(const std::vector<T>& list) {
  DeviceBuffer buffer(list.size() * sizeof(T));
  copy_to_device(buffer.data(), list.data(), buffer.bytes(), "copy a table");
  return buffer;
}

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "finish the work on a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "create an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "record an event"); }
  bool passed() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status != cudaErrorNotReady) check(status, "ask for an event");
    return status == cudaSuccess;
  }
  double ms_since(const Event& start) const {  // waits for this event
    check(cudaEventSynchronize(event_), "wait for an event");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start.event_, event_), "read a timer");
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace annulus::cuda
