// Memory of pretend GPUs as their kernels see it. It is walled (support/walled_gpu.h).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "support/walled_gpu.h"

namespace annulus::pretend {

// A GPU stops where what is read or written at once does not begin at a multiple of its size.
inline void require_aligned(const void* address, std::int64_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(bytes) == 0) return;
  std::fprintf(stderr, "pretend GPU: misaligned address\n");
  std::abort();
}

// Where a kernel finds what an address of a GPU names, so many elements. Whatever else it is given is a bug: a GPU
// would stop here.
template <class T>
T* reached(T* address, std::int64_t count = 1) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  require_aligned(address, alignof(T));
  auto* const first = reinterpret_cast<Byte*>(address);
  const std::int64_t last = count * static_cast<std::int64_t>(sizeof(T)) - 1;
  Byte* const found = support::WalledBytes::reach(first);
  if (found != nullptr && (count == 1 || support::WalledBytes::reach(first + last) == found + last))
    return reinterpret_cast<T*>(found);
  std::fprintf(stderr, "pretend GPU: a kernel was given an address that is not of a GPU\n");
  std::abort();
}

}  // namespace annulus::pretend
