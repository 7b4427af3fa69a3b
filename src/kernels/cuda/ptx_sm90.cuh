// One Hopper instruction a function: barriers, bulk tensor copies, bookkeeping of wgmma. Addresses of shared memory
// have 32 bits.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace annulus::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}
// For long waits: asleep until the barrier wakes it (at most for so many ns). The wait above asks every 36 cycles, by
// the pipe of shared memory that all others need.
__device__ __forceinline__ void mbarrier_wait_asleep(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  do
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity), "n"(100'000)
        : "memory");
  while (done == 0);
}
// At once. (`try_wait` may sleep, even without a time.)
__device__ __forceinline__ bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// After a short sleep at most.
__device__ __forceinline__ bool mbarrier_try_wait_asleep(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity), "n"(2'000)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Between what this thread wrote to shared memory and what the copy engine and the tensor cores do there next.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Named barriers, 1 to 15

__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Bulk tensor copies. Coordinates fastest first: (element, row, residue, head, batch)

__device__ __forceinline__ void tensor_load(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier,
                                            int element, int row, int residue, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(element), "r"(row), "r"(residue), "r"(head), "r"(batch)
      : "memory");
}

// ---- wgmma bookkeeping

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Not an instruction: tells the compiler that these registers change here, so that no use of them moves above a wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Shared memory as wgmma sees it: 128-byte swizzle, address and offsets in units of 16 bytes.
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t address, std::uint32_t leading_bytes,
                                                    std::uint32_t stride_bytes) {
  return std::uint64_t{(address & 0x3FFFF) >> 4} | std::uint64_t{leading_bytes >> 4} << 16 |
         std::uint64_t{stride_bytes >> 4} << 32 | std::uint64_t{1} << 62;
}

// Rows of 16 bytes, 8 of them after each other; the same once more for the second half of what is summed over.
__device__ __forceinline__ std::uint64_t plain_descriptor(std::uint32_t address) {
  return std::uint64_t{(address & 0x3FFFF) >> 4} | std::uint64_t{128 >> 4} << 32;
}

__device__ __forceinline__ void store_matrix_x4(std::uint32_t to, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                                std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_16(std::uint32_t address, std::uint32_t a, std::uint32_t b,
                                                std::uint32_t c, std::uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ---- Arithmetic

// Two products in the type itself.
template <class T>
__device__ __forceinline__ std::uint32_t multiply_packed(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  if constexpr (std::is_same_v<T, __half>)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// In memory, of all who add to it in any order.
__device__ __forceinline__ void add_4(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

}  // namespace annulus::cuda::ptx
