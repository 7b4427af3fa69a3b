// What nvcc knows without being told, for the kernels' sources as g++ compiles them: every thread is a fiber
// (machine.h).
#pragma once

#include <cuda_runtime.h>
#include <math.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

#include "pretend_lanes/machine.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // a block is an OS thread

extern thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::isfinite;
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}

#define __log2f log2f  // the C library has declared the name
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

// Loads and stores that say which caches they want.
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcg(T* to, const T& value) {
  *to = value;
}
template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}

template <class T>
T atomicAdd(T* to, T value) {
  annulus::machine::note_progress();
  return std::atomic_ref<T>(*to).fetch_add(value);
}
inline void __threadfence() {}  // see ptx::fence_gpu
inline void __nanosleep(unsigned) { annulus::machine::give_way(); }

inline void __syncthreads() { annulus::machine::block_sync(0, static_cast<int>(blockDim.x)); }

inline void annulus_require_all(unsigned mask) {
  if (mask != 0xffffffffu) annulus::machine::fail("a mask that leaves out lanes: machine.cc has none");
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  annulus_require_all(mask);
  annulus::machine::meet(annulus::machine::Meeting::sync);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  annulus_require_all(mask);
  return annulus::machine::exchange(annulus::machine::Meeting::shuffle, value)[from & 31];
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with) {
  annulus_require_all(mask);
  return annulus::machine::exchange(annulus::machine::Meeting::shuffle,
                                    value)[annulus::machine::lane() ^ static_cast<unsigned>(with)];
}
inline bool __any_sync(unsigned mask, bool value) {
  annulus_require_all(mask);
  const bool* const all = annulus::machine::exchange(annulus::machine::Meeting::vote, value);
  bool any = false;
  for (int i = 0; i < 32; ++i) any = any || all[i];
  return any;
}
inline bool __all_sync(unsigned mask, bool value) { return !__any_sync(mask, !value); }
