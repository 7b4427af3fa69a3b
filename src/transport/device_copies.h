// DeviceCopies: what a transport needs of a GPU to move memory there, as an interface without CUDA in it. The CUDA
// backend makes one for each rank (kernels/cuda/copies.cc).
//
// Copies are queued on lanes, streams of its own that run beside the rank's work and before it where both could. Each
// lane keeps its order; between lanes, and between a lane and a stream of anybody else, events do. Nothing here waits
// for the GPU but what says so. Any thread may call anything at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "annulus/strided_block.h"

namespace annulus {

// A moment in the work of a stream. Before it is first recorded it counts as passed.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual void record(void* stream) = 0;  // a stream of the device that the event was made on
  virtual bool passed() = 0;
  virtual void wait() = 0;  // the calling thread
};

// Bytes that live as long as this does.
class OwnedBytes {
 public:
  virtual ~OwnedBytes() = default;
  virtual std::span<std::byte> bytes() = 0;
};

class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;  // waits for its copies

  virtual int device() const = 0;
  virtual void* lane(int index) = 0;  // a CUDA stream
  virtual std::unique_ptr<DeviceEvent> event() = 0;
  // What is queued from now on, on a stream of this device, runs after an event of any device.
  virtual void hold(void* stream, DeviceEvent& event) = 0;
  virtual std::unique_ptr<OwnedBytes> host_memory(std::int64_t bytes) = 0;  // that GPUs reach at full speed
  virtual std::unique_ptr<OwnedBytes> device_memory(std::int64_t bytes) = 0;

  // Makes a device the calling thread's, and returns the one that was. Libraries that are given memory of a device look
  // for it there.
  virtual int use(int device) noexcept = 0;

  // Opens the way to memory of another device, where there is one.
  virtual void reach(int device) = 0;

  // Packs blocks that lie on `device` to `packed`, which lies here or in host_memory(); on a lane.
  virtual void gather(std::span<const StridedBlock> blocks, int device, std::byte* packed, int lane) = 0;
  // Dense bytes from here or host_memory() to here or host_memory(); on a lane.
  virtual void copy(std::span<const std::byte> from, std::byte* to, int lane) = 0;

  // Returns when nothing of what was queued so far reads or writes any memory.
  virtual void settle() noexcept = 0;
};

// The device of copies is the calling thread's for as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(DeviceCopies& copies) noexcept : copies_(copies), before_(copies.use(copies.device())) {}
  ~OnDevice() { copies_.use(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  DeviceCopies& copies_;
  int before_;
};

}  // namespace annulus
