// A pretend GPU whose memory nobody touches but its own lanes and whoever asks where it can be reached, as an MPI that
// is CUDA-aware would: any other access is a segmentation fault, as on a GPU, and so is one after the memory is gone.
// The memory is mapped twice, at its own address without any rights and elsewhere with all of them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <stdexcept>

#include "support/pretend_gpu.h"

namespace annulus::support {

class WalledBytes final : public OwnedBytes {
 public:
  explicit WalledBytes(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    if (bytes_ == 0) return;
    const int file = memfd_create("walled", 0);
    if (file < 0 || ftruncate(file, bytes) != 0) throw std::runtime_error("no memory for a walled GPU");
    walled_ = map(file, PROT_NONE);
    reached_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
    const std::lock_guard lock(all().mutex);
    all().by_address[walled_] = this;
    if (all().open > 0) protect(PROT_READ | PROT_WRITE);
  }
  ~WalledBytes() override {
    if (bytes_ == 0) return;
    const std::lock_guard lock(all().mutex);
    all().by_address.erase(walled_);
    munmap(walled_, bytes_);
    munmap(reached_, bytes_);
  }
  WalledBytes(const WalledBytes&) = delete;
  WalledBytes& operator=(const WalledBytes&) = delete;

  std::span<std::byte> bytes() override { return {walled_, bytes_}; }

  // Kernels touch memory at its own address: while any runs, there is no wall.
  static void open_walls() {
    const std::lock_guard lock(all().mutex);
    if (all().open++ == 0)
      for (const auto& [address, bytes] : all().by_address) bytes->protect(PROT_READ | PROT_WRITE);
  }
  static void close_walls() {
    const std::lock_guard lock(all().mutex);
    if (--all().open == 0)
      for (const auto& [address, bytes] : all().by_address) bytes->protect(PROT_NONE);
  }

  // Where the byte at an address can be touched; null: it is not a walled one.
  static std::byte* reach(const void* address) {
    const auto* const at = static_cast<const std::byte*>(address);
    const std::lock_guard lock(all().mutex);
    const auto next = all().by_address.upper_bound(at);
    if (next == all().by_address.begin()) return nullptr;
    const WalledBytes& found = *std::prev(next)->second;
    const auto offset = static_cast<std::size_t>(at - found.walled_);
    return offset < found.bytes_ ? found.reached_ + offset : nullptr;
  }

 private:
  struct All {
    std::mutex mutex;
    std::map<const std::byte*, WalledBytes*, std::less<>> by_address;
    int open = 0;
  };
  static All& all() {
    static auto& all = *new All;  // memory that is kept for MPI outlives everything
    return all;
  }
  void protect(int rights) const {
    if (mprotect(walled_, bytes_, rights) != 0) throw std::runtime_error("a wall that does not move");
  }
  std::byte* map(int file, int rights) const {
    void* const at = mmap(nullptr, bytes_, rights, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) throw std::runtime_error("no addresses for a walled GPU");
    return static_cast<std::byte*>(at);
  }

  std::size_t bytes_;
  std::byte *walled_ = nullptr, *reached_ = nullptr;
};

struct OpenWalls {
  OpenWalls() { WalledBytes::open_walls(); }
  ~OpenWalls() { WalledBytes::close_walls(); }
  OpenWalls(const OpenWalls&) = delete;
  OpenWalls& operator=(const OpenWalls&) = delete;
};

class WalledCopies final : public DeviceCopies {
 public:
  WalledCopies(int lanes, int device) : copies_(lanes, device) {}

  int device() const override { return copies_.device(); }
  int use(int device) noexcept override { return copies_.use(device); }
  void* lane(int index) override { return copies_.lane(index); }
  std::unique_ptr<DeviceEvent> event() override { return copies_.event(); }
  void hold(void* stream, DeviceEvent& event) override { copies_.hold(stream, event); }
  std::unique_ptr<OwnedBytes> host_memory(std::int64_t bytes) override { return copies_.host_memory(bytes); }
  std::unique_ptr<OwnedBytes> device_memory(std::int64_t bytes) override {
    return std::make_unique<WalledBytes>(bytes);
  }
  void reach(int device) override { copies_.reach(device); }
  void gather(std::span<const StridedBlock> blocks, int device, std::byte* packed, int lane) override {
    copies_.gather(blocks, device, inside(packed), lane);
  }
  void copy(std::span<const std::byte> from, std::byte* to, int lane) override {
    copies_.copy({inside(from.data()), from.size()}, inside(to), lane);
  }
  void settle() noexcept override { copies_.settle(); }

 private:
  template <class Byte>
  static Byte* inside(Byte* address) {
    std::byte* const reached = WalledBytes::reach(address);
    return reached != nullptr ? reached : address;
  }

  PretendCopies copies_;
};

}  // namespace annulus::support
