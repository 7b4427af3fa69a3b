// The instructions of src/kernels/cuda/ptx.cuh on a pretend GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "device.h"

namespace annulus::cuda::ptx {

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

template <class T>
std::uint32_t pack(float low, float high) {
  return T(low).bits | static_cast<std::uint32_t>(T(high).bits) << 16;
}

inline void let_next_start() {}
inline void wait_for_previous() {}  // launches do not overlap here

inline std::atomic_ref<unsigned> counter_at(const unsigned* counter) {
  return std::atomic_ref<unsigned>(*const_cast<unsigned*>(counter));
}
inline void arrive_global(unsigned* counter, unsigned count) {
  counter_at(counter).fetch_add(count, std::memory_order_release);
  machine::note_progress();
}
inline unsigned load_acquire(const unsigned* counter) {
  machine::give_way();
  return counter_at(counter).load(std::memory_order_acquire);
}
inline unsigned load_relaxed(const unsigned* counter) {
  machine::give_way();
  return counter_at(counter).load(std::memory_order_acquire);
}
inline void fence_gpu() {}  // ThreadSanitizer knows none: counters are as ordered as with it
inline void add_relaxed(unsigned* counter, unsigned count) {
  counter_at(counter).fetch_add(count, std::memory_order_acq_rel);
  machine::note_progress();
}

inline void wait_global(const unsigned* counter, unsigned count) {
  while (load_acquire(counter) < count) {
  }
}

}  // namespace annulus::cuda::ptx
