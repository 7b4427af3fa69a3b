// Memory of pretend GPUs, walled (support/walled_gpu.h) and counted: what does not fit is refused.
#pragma once

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "support/walled_gpu.h"

namespace annulus::pretend {

inline constexpr int kMostGpus = 8;

inline std::int64_t number_from(const char* variable, std::int64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoll(text);
}
inline std::int64_t gpu_bytes() { return number_from("ANNULUS_PRETEND_GPU_MIB", 4096) << 20; }

// Where a kernel finds what an address of a GPU names. Whatever else it is given is a bug: a GPU would stop here.
template <class T>
T* reached(T* address) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  auto* const found = support::WalledBytes::reach(reinterpret_cast<Byte*>(address));
  if (found != nullptr) return reinterpret_cast<T*>(found);
  std::fprintf(stderr, "pretend GPU: a kernel was given an address that is not of a GPU\n");
  std::abort();
}

}  // namespace annulus::pretend
