// The instructions of src/kernels/cuda/ptx_mma.cuh on a pretend GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device.h"

namespace annulus::cuda::ptx {

// ---- Copies that arrive later, in groups

inline void copy_16(void* to, const void* from, bool there) { machine::copy_later(to, from, 16, there); }
inline void copy_4(void* to, const void* from, bool there) { machine::copy_later(to, from, 4, there); }
inline void commit_copies() { machine::commit_copies(); }
template <int kPending>
void wait_copies() {
  machine::wait_copies(kPending);
}

// ---- Fragments

inline void load_matrix_x4(std::uint32_t (&r)[4], const void* at) {
  machine::require_aligned(at, 16);
  const void* const* const rows = machine::exchange(machine::Meeting::load_matrix, at);
  const unsigned lane = machine::lane();
  for (unsigned i = 0; i < 4; ++i) r[i] = static_cast<const std::uint32_t*>(rows[8 * i + lane / 4])[lane % 4];
}
inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* at) {
  machine::require_aligned(at, 16);
  const void* const* const rows = machine::exchange(machine::Meeting::load_matrix, at);
  const unsigned lane = machine::lane();
  for (unsigned i = 0; i < 4; ++i) {
    const auto element = [&](unsigned row) {
      return std::uint32_t{static_cast<const std::uint16_t*>(rows[8 * i + row])[lane / 4]};
    };
    r[i] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
  }
}

// ---- Products

template <class T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const std::uint32_t b[2] = {b0, b1};
  machine::multiply_now(std::is_same_v<T, __half> ? machine::Number::fp16 : machine::Number::bf16, d, a, b);
}
inline void mma_m16n8k8(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                        std::uint32_t b0, std::uint32_t b1) {
  const std::uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  machine::multiply_now(machine::Number::tf32, d, a, b);
}

}  // namespace annulus::cuda::ptx
