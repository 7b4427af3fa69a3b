// Memory of pretend GPUs as their kernels see it. It is walled (support/walled_gpu.h).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "support/walled_gpu.h"

namespace annulus::pretend {

// Where a kernel finds what an address of a GPU names. Whatever else it is given is a bug: a GPU would stop here.
template <class T>
T* reached(T* address) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  auto* const found = support::WalledBytes::reach(reinterpret_cast<Byte*>(address));
  if (found != nullptr) return reinterpret_cast<T*>(found);
  std::fprintf(stderr, "pretend GPU: a kernel was given an address that is not of a GPU\n");
  std::abort();
}

// A GPU stops where a number does not begin at a multiple of its size.
inline void require_aligned(const void* address, std::int64_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(bytes) == 0) return;
  std::fprintf(stderr, "pretend GPU: misaligned address\n");
  std::abort();
}

}  // namespace annulus::pretend
