// wgmma m64nNk16 with fp32 accumulators, one instruction a function.
//
//   multiply_shared    D = A B or D += A B    A and B from shared memory, both with the summed index contiguous
//   multiply_add       D += A B               A from registers, B from shared memory with its columns contiguous
//
// An instruction names every accumulator register, so the lists below are long; macros write them, for this file alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace annulus::cuda::ptx {

// Registers first to first + 7 of an accumulator array as operands.
#define ANNULUS_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ANNULUS_32(d, i) ANNULUS_8(d, i), ANNULUS_8(d, i + 8), ANNULUS_8(d, i + 16), ANNULUS_8(d, i + 24)

// Their names in the instruction.
#define ANNULUS_NAMES_32                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ANNULUS_NAMES_64                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define ANNULUS_NAMES_80                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"

#define ANNULUS_MULTIPLY_SHARED(n, type, names, a_name, b_name, flag_name, ...)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag_name ", 0;\nwgmma.mma_async.sync.aligned.m64n" n \
               "k16.f32." type "." type " {" names "}, " a_name ", " b_name ", p, 1, 1, 0, 0;\n}\n"      \
               : __VA_ARGS__                                                                             \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

template <class T>
__device__ __forceinline__ void multiply_shared(float (&d)[64], std::uint64_t a, std::uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    ANNULUS_MULTIPLY_SHARED("128", "f16", ANNULUS_NAMES_64, "%64", "%65", "%66", ANNULUS_32(d, 0), ANNULUS_32(d, 32));
  else
    ANNULUS_MULTIPLY_SHARED("128", "bf16", ANNULUS_NAMES_64, "%64", "%65", "%66", ANNULUS_32(d, 0), ANNULUS_32(d, 32));
}

template <class T>
__device__ __forceinline__ void multiply_shared(float (&d)[80], std::uint64_t a, std::uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    ANNULUS_MULTIPLY_SHARED("160", "f16", ANNULUS_NAMES_80, "%80", "%81", "%82", ANNULUS_32(d, 0), ANNULUS_32(d, 32),
                            ANNULUS_8(d, 64), ANNULUS_8(d, 72));
  else
    ANNULUS_MULTIPLY_SHARED("160", "bf16", ANNULUS_NAMES_80, "%80", "%81", "%82", ANNULUS_32(d, 0), ANNULUS_32(d, 32),
                            ANNULUS_8(d, 64), ANNULUS_8(d, 72));
}

#define ANNULUS_MULTIPLY_ADD(n, type, names, a_names, b_name, ...)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" names "}, {" a_names "}, " b_name \
               ", 1, 1, 1, 1;\n"                                                                                     \
               : __VA_ARGS__                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
  if constexpr (std::is_same_v<T, __half>)
    ANNULUS_MULTIPLY_ADD("64", "f16", ANNULUS_NAMES_32, "%32, %33, %34, %35", "%36", ANNULUS_32(d, 0));
  else
    ANNULUS_MULTIPLY_ADD("64", "bf16", ANNULUS_NAMES_32, "%32, %33, %34, %35", "%36", ANNULUS_32(d, 0));
}

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
  if constexpr (std::is_same_v<T, __half>)
    ANNULUS_MULTIPLY_ADD("128", "f16", ANNULUS_NAMES_64, "%64, %65, %66, %67", "%68", ANNULUS_32(d, 0),
                         ANNULUS_32(d, 32));
  else
    ANNULUS_MULTIPLY_ADD("128", "bf16", ANNULUS_NAMES_64, "%64, %65, %66, %67", "%68", ANNULUS_32(d, 0),
                         ANNULUS_32(d, 32));
}

#undef ANNULUS_MULTIPLY_ADD
#undef ANNULUS_MULTIPLY_SHARED
#undef ANNULUS_NAMES_80
#undef ANNULUS_NAMES_64
#undef ANNULUS_NAMES_32
#undef ANNULUS_32
#undef ANNULUS_8

}  // namespace annulus::cuda::ptx
