// Instructions that every GPU from sm_80 on has, one a function.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace annulus::cuda::ptx {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers in one register, `low` in the lower half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t r;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Launches of a chain overlap on sm_90: the next kernel may start when every block has let it, and waits itself until
// this one is over and its writes are seen. Elsewhere, and where a launch does not ask for it, nothing happens.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Counters between blocks. What was written before an arrival is seen after a load that saw it.
__device__ __forceinline__ void arrive_global(unsigned* counter, unsigned count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// The same in parts, so that one fence serves a load before it and an addition behind it.
__device__ __forceinline__ unsigned load_relaxed(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void add_relaxed(unsigned* counter, unsigned count) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

__device__ __forceinline__ void wait_global(const unsigned* counter, unsigned count) {
  while (load_acquire(counter) < count) {
  }
}

}  // namespace annulus::cuda::ptx
