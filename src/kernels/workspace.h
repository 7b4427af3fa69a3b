// Carving a workspace, and measuring how large it must be, in one code path: without memory the carver only counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/memory.h"

namespace annulus {

class Carver {
 public:
  explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}

  // `count` objects from the next multiple of kAlignment on; null while measuring. Parts of one component need not lie
  // together.
  template <class T>
  T* take(const std::string& component, std::int64_t count) {
    const std::int64_t bytes =
        (count * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    std::byte* start = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += bytes;
    if (components_.empty() || components_.back().name != component) components_.push_back({component, 0});
    components_.back().bytes += bytes;
    return reinterpret_cast<T*>(start);
  }

  bool measuring() const { return memory_ == nullptr; }
  std::int64_t used_bytes() const { return used_; }
  const std::vector<MemoryComponent>& components() const { return components_; }

  // Lines of caches: 64 bytes on a CPU, 128 on a GPU, where what a warp adds at once is four of them.
  static constexpr std::int64_t kAlignment = 512;

 private:
  std::byte* memory_;
  std::int64_t used_ = 0;
  std::vector<MemoryComponent> components_;
};

}  // namespace annulus
