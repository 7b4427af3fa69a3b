// wgmma as the backward kernel needs it beside wgmma_sm90.cuh: A and B from shared memory, either of them stored with
// the summed index contiguous (0) or along its rows (1).
//
//   multiply_first    D = A B     D is written alone, so that its registers are free before
//   multiply_next     D += A B
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace annulus::cuda::ptx {

#define ANNULUS_8(k, d, i) \
  k(d[i]), k(d[i + 1]), k(d[i + 2]), k(d[i + 3]), k(d[i + 4]), k(d[i + 5]), k(d[i + 6]), k(d[i + 7])
#define ANNULUS_32(k, d, i) ANNULUS_8(k, d, i), ANNULUS_8(k, d, i + 8), ANNULUS_8(k, d, i + 16), ANNULUS_8(k, d, i + 24)
#define ANNULUS_NAMES_32                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ANNULUS_NAMES_64                                                                              \
  ANNULUS_NAMES_32                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define ANNULUS_MULTIPLY(n, type, flag, names, a_name, b_name, ta_name, tb_name, ...)                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type \
               "." type " {" names "}, " a_name ", " b_name ", p, 1, 1, " ta_name ", " tb_name ";\n}\n"             \
               : __VA_ARGS__                                                                                        \
               : "l"(a), "l"(b), "n"(kAlongA), "n"(kAlongB))
#define ANNULUS_OUT(x) "=f"(x)
#define ANNULUS_IN_OUT(x) "+f"(x)

#define ANNULUS_MULTIPLY_BOTH(name, flag, k)                                                                   \
  template <class T, int kAlongA, int kAlongB>                                                                 \
  __device__ __forceinline__ void name(float(&d)[32], std::uint64_t a, std::uint64_t b) {                      \
    if constexpr (std::is_same_v<T, __half>)                                                                   \
      ANNULUS_MULTIPLY("64", "f16", flag, ANNULUS_NAMES_32, "%32", "%33", "%34", "%35", ANNULUS_32(k, d, 0));  \
    else                                                                                                       \
      ANNULUS_MULTIPLY("64", "bf16", flag, ANNULUS_NAMES_32, "%32", "%33", "%34", "%35", ANNULUS_32(k, d, 0)); \
  }                                                                                                            \
  template <class T, int kAlongA, int kAlongB>                                                                 \
  __device__ __forceinline__ void name(float(&d)[64], std::uint64_t a, std::uint64_t b) {                      \
    if constexpr (std::is_same_v<T, __half>)                                                                   \
      ANNULUS_MULTIPLY("128", "f16", flag, ANNULUS_NAMES_64, "%64", "%65", "%66", "%67", ANNULUS_32(k, d, 0),  \
                       ANNULUS_32(k, d, 32));                                                                  \
    else                                                                                                       \
      ANNULUS_MULTIPLY("128", "bf16", flag, ANNULUS_NAMES_64, "%64", "%65", "%66", "%67", ANNULUS_32(k, d, 0), \
                       ANNULUS_32(k, d, 32));                                                                  \
  }

ANNULUS_MULTIPLY_BOTH(multiply_first, "0", ANNULUS_OUT)
ANNULUS_MULTIPLY_BOTH(multiply_next, "1", ANNULUS_IN_OUT)

// D = A B with A in registers, both bf16 whatever the inputs are; B stored with the summed index contiguous. As the
// first of a group: behind others ptxas would close the group before it.
__device__ __forceinline__ void multiply_numbers(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ANNULUS_NAMES_32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
      : ANNULUS_32(ANNULUS_OUT, d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_numbers(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ANNULUS_NAMES_64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
      : ANNULUS_32(ANNULUS_OUT, d, 0), ANNULUS_32(ANNULUS_OUT, d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef ANNULUS_MULTIPLY_BOTH
#undef ANNULUS_IN_OUT
#undef ANNULUS_OUT
#undef ANNULUS_MULTIPLY
#undef ANNULUS_NAMES_64
#undef ANNULUS_NAMES_32
#undef ANNULUS_32
#undef ANNULUS_8

}  // namespace annulus::cuda::ptx
