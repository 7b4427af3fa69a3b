// The instructions of src/kernels/cuda/ptx_sm90.cuh on a pretend GPU.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device.h"
#include "pretend_lanes/tensor_copy.h"

namespace annulus::cuda::ptx {

inline std::uint32_t shared_address(const void* p) { return machine::shared_address(p); }

// ---- mbarrier

inline void mbarrier_init(std::uint32_t barrier, std::uint32_t count) { machine::mbarrier_init(barrier, count); }
inline void mbarrier_arrive(std::uint32_t barrier) { machine::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  machine::mbarrier_arrive(barrier, bytes);
}
inline bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity) {
  return machine::mbarrier_passed(barrier, parity);
}
inline bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  machine::give_way();
  return machine::mbarrier_passed(barrier, parity);
}
inline bool mbarrier_try_wait_asleep(std::uint32_t barrier, std::uint32_t parity) {
  return mbarrier_try_wait(barrier, parity);
}
inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) { machine::mbarrier_wait(barrier, parity); }
inline void mbarrier_wait_asleep(std::uint32_t barrier, std::uint32_t parity) {
  machine::mbarrier_wait(barrier, parity);
}
inline void fence_mbarrier_init() {}
inline void fence_async() {}

// ---- Named barriers

inline void named_sync(int id, int threads) { machine::block_sync(id, threads); }
inline void named_arrive(int id, int threads) { machine::block_arrive(id, threads); }

// ---- Bulk tensor copies

inline void tensor_load(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier, int element, int row,
                        int residue, int head, int batch) {
  machine::copy_tensor(to, *map, barrier, {element, row, residue, head, batch});
}

// ---- wgmma bookkeeping

inline void wgmma_fence() { machine::meet(machine::Meeting::wgmma_fence); }
inline void wgmma_commit() { machine::commit_products(); }
template <int kPending>
void wgmma_wait() {
  machine::wait_products(kPending);
}
template <class T, int kCount>
void pin(T (&)[kCount]) {}
template <int kRegisters>
void registers_up() {
  machine::meet(machine::Meeting::registers);
}
template <int kRegisters>
void registers_down() {
  machine::meet(machine::Meeting::registers);
}

inline std::uint64_t descriptor(std::uint32_t address, std::uint32_t leading_bytes, std::uint32_t stride_bytes) {
  return std::uint64_t{(address & 0x3FFFF) >> 4} | std::uint64_t{leading_bytes >> 4} << 16 |
         std::uint64_t{stride_bytes >> 4} << 32 | std::uint64_t{1} << 62;
}
inline std::uint64_t plain_descriptor(std::uint32_t address) {
  return std::uint64_t{(address & 0x3FFFF) >> 4} | std::uint64_t{128 >> 4} << 32;
}

// ---- Shared memory

inline void store_matrix_x4(std::uint32_t to, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  machine::require_aligned(machine::shared_place(to, 16), 16);
  const std::uint32_t* const rows = machine::exchange(machine::Meeting::store_matrix, to);
  const unsigned lane = machine::lane();
  const std::uint32_t words[4] = {a, b, c, d};
  for (unsigned i = 0; i < 4; ++i)
    *reinterpret_cast<std::uint32_t*>(machine::shared_place(rows[8 * i + lane / 4] + lane % 4 * 4, 4)) = words[i];
}
inline uint4* aligned_16(std::uint32_t address) {
  std::byte* const place = machine::shared_place(address, 16);
  machine::require_aligned(place, 16);
  return reinterpret_cast<uint4*>(place);
}
inline uint4 load_shared_16(std::uint32_t address) { return *aligned_16(address); }
inline void store_shared_16(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  *aligned_16(address) = {a, b, c, d};
}

// ---- Arithmetic

template <class T>
std::uint32_t multiply_packed(std::uint32_t a, std::uint32_t b) {
  const auto product = [&](int shift) {
    const T x{static_cast<std::uint16_t>(a >> shift)}, y{static_cast<std::uint16_t>(b >> shift)};
    return static_cast<std::uint32_t>(T(static_cast<float>(x) * static_cast<float>(y)).bits) << shift;
  };
  return product(0) | product(16);
}

inline void add_4(float* to, float a, float b, float c, float d) {
  const float terms[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) std::atomic_ref<float>(to[i]).fetch_add(terms[i], std::memory_order_relaxed);
}

}  // namespace annulus::cuda::ptx
