// Memory of the pretend GPUs, walled (support/walled_gpu.h) and counted: an allocation that does not fit is refused, as
// on a GPU, and freeing one waits for everything that is under way.
#pragma once

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>

#include "annulus/errors.h"
#include "kernels/cuda/backend.h"
#include "support/walled_gpu.h"

namespace annulus::pretend {

inline constexpr int kMostGpus = 8;

inline std::int64_t number_from(const char* variable, std::int64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoll(text);
}

// Taken on each GPU, in bytes; ANNULUS_PRETEND_GPU_MIB is what each has.
inline std::array<std::atomic<std::int64_t>, kMostGpus>& taken_bytes() {
  static std::array<std::atomic<std::int64_t>, kMostGpus> taken{};
  return taken;
}
inline std::int64_t memory_bytes() { return number_from("ANNULUS_PRETEND_GPU_MIB", 4096) << 20; }
inline std::int64_t free_bytes(int gpu) { return memory_bytes() - taken_bytes()[static_cast<std::size_t>(gpu)]; }

class GpuBytes final : public OwnedBytes {
 public:
  GpuBytes(int gpu, std::int64_t bytes) : taken_(taken_bytes()[static_cast<std::size_t>(gpu)]), walled_(take(bytes)) {}
  ~GpuBytes() override { taken_ -= static_cast<std::int64_t>(walled_.bytes().size()); }

  std::span<std::byte> bytes() override { return walled_.bytes(); }

 private:
  std::int64_t take(std::int64_t bytes) {
    if ((taken_ += bytes) <= memory_bytes()) return bytes;
    taken_ -= bytes;
    throw OutOfMemory("the pretend GPU refused " + std::to_string(bytes) + " bytes");
  }

  std::atomic<std::int64_t>& taken_;
  support::WalledBytes walled_;
};

// Where a kernel finds what an address of a GPU names. Whatever else it is given is a bug: a GPU would stop here.
template <class Byte>
Byte* reached(Byte* address, const char* what) {
  if (address == nullptr) return nullptr;
  auto* const found = support::WalledBytes::reach(address);
  if (found != nullptr) return reinterpret_cast<Byte*>(found);
  std::fprintf(stderr, "pretend GPU: %s is not memory of a GPU\n", what);
  std::abort();
}

class Memory final : public cuda::DeviceMemory {
 public:
  Memory(int gpu, std::size_t bytes) : bytes_(gpu, static_cast<std::int64_t>(bytes)) {
    std::ranges::fill(inside(), std::byte{0xff});  // NaN, for who reads what nobody has written
  }
  ~Memory() override { support::PretendStream::wait_for_all(); }

  void* data() const override { return bytes_.bytes().data(); }
  void put(const void* host) override {
    support::PretendStream::wait_for_all();
    if (!inside().empty()) std::memcpy(inside().data(), host, inside().size());
  }
  void get(void* host) const override {
    support::PretendStream::wait_for_all();
    if (!inside().empty()) std::memcpy(host, inside().data(), inside().size());
  }

 private:
  std::span<std::byte> inside() const {
    const std::span<std::byte> all = bytes_.bytes();
    return {reached(all.data(), "memory"), all.size()};
  }

  mutable GpuBytes bytes_;
};

}  // namespace annulus::pretend
