// Address space without memory behind it until it is touched: offsets beyond 2^31 elements for the price of a few
// pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace annulus::support {

class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) data_ = nullptr;
  }
  ~SparseMemory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }  // null: the system has no such address space

 private:
  void* data_;
  std::size_t bytes_;
};

}  // namespace annulus::support
