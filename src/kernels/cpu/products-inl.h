// Products of register blocks, and exp2: the arithmetic of every tile, compiled once per instruction set.
//
// C (+)= A B of M rows by two vectors. A is read one float at a time (a broadcast), B one row of two vectors at a time.
// Operands are packed so that both walk through memory in order:
//   panels   [rows / kRows][k][kPanel]        the left factor, element (i, k) of a block at k * kPanel + i
//   columns  [rows / kColumns][k][kColumns]   the right factor of q . k: element k of kColumns rows side by side
//   rows     [rows][padded(head_dim)]         the right factor of P v
// Scores stay in a small rectangle of scratch and serve as left factors, straight (stride, 1) or transposed (1,
// stride).
#if defined(ANNULUS_KERNELS_CPU_PRODUCTS_INL_H) == defined(HWY_TARGET_TOGGLE)  // once per target
#ifdef ANNULUS_KERNELS_CPU_PRODUCTS_INL_H
#undef ANNULUS_KERNELS_CPU_PRODUCTS_INL_H
#else
#define ANNULUS_KERNELS_CPU_PRODUCTS_INL_H
#endif

#include <hwy/highway.h>

#include <cstdint>

// The family of instruction sets that is being compiled: AVX-512, AVX2 and the compiler's baseline are enough, what
// lies between only costs compile time. Highway numbers better ones lower, and knows NEON by two names.
#undef ANNULUS_TARGET
#define ANNULUS_SKIPPED 0
#define ANNULUS_BASELINE 1
#define ANNULUS_NEON 2
#define ANNULUS_AVX2 3
#define ANNULUS_AVX512 4
#if HWY_ARCH_X86 && (HWY_TARGET == HWY_AVX3 || (HWY_TARGET < HWY_AVX3 && HWY_TARGET == HWY_STATIC_TARGET))
#define ANNULUS_TARGET ANNULUS_AVX512
#elif HWY_TARGET == HWY_AVX2
#define ANNULUS_TARGET ANNULUS_AVX2
#elif HWY_TARGET != HWY_STATIC_TARGET
#define ANNULUS_TARGET ANNULUS_SKIPPED
#elif HWY_TARGET == HWY_NEON || (defined(HWY_NEON_WITHOUT_AES) && HWY_TARGET == HWY_NEON_WITHOUT_AES)
#define ANNULUS_TARGET ANNULUS_NEON
#else
#define ANNULUS_TARGET ANNULUS_BASELINE
#endif

#if ANNULUS_TARGET != ANNULUS_SKIPPED

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using Index = std::int64_t;

// Tile sizes and their reasons. 14 x 2 accumulators + 2 of B + 1 of A fill the 32 registers of AVX-512 and NEON, 6 x 2
// the 16 of AVX2.
#undef ANNULUS_VECTOR_FP16
#define ANNULUS_VECTOR_FP16 1
#if ANNULUS_TARGET == ANNULUS_AVX512
constexpr Index kLanes = 16, kRows = 14, kPanel = 16;
#elif ANNULUS_TARGET == ANNULUS_AVX2
constexpr Index kLanes = 8, kRows = 6, kPanel = 8;
#elif ANNULUS_TARGET == ANNULUS_NEON
constexpr Index kLanes = 4, kRows = 14, kPanel = 16;
#else
#undef ANNULUS_VECTOR_FP16
#define ANNULUS_VECTOR_FP16 0
constexpr Index kLanes = HWY_TARGET == HWY_SCALAR ? 1 : HWY_MAX_BYTES / 4, kRows = 4, kPanel = 4;
#endif
constexpr Index kColumns = 2 * kLanes;
constexpr Index kQueryTile = kRows * (84 / kRows);
constexpr Index kKeyChunk = 512;                // scores of a tile and packed keys and values share the level-2 cache
constexpr Index kScoreStride = kKeyChunk + 16;  // not a power of two: rows of scores must not share cache sets
constexpr Index kBackwardQueries = kRows * (112 / kRows);
constexpr Index kBackwardKeys = 256;
constexpr Index kSlopeStride = kBackwardKeys + 16;
static_assert(kKeyChunk % kColumns == 0 && kBackwardKeys % kColumns == 0);

// Max and Min that keep a NaN: x86 returns the second argument when either is NaN, ARM returns NaN, others must be
// asked.
#undef ANNULUS_MAX_KEEPS_NAN
#define ANNULUS_MAX_KEEPS_NAN (ANNULUS_TARGET == ANNULUS_NEON || (HWY_ARCH_X86 && HWY_TARGET < HWY_EMU128))
HWY_INLINE V at_least(D d, float low, V x) {
#if !ANNULUS_MAX_KEEPS_NAN
  return hn::IfThenElse(hn::Lt(x, hn::Set(d, low)), hn::Set(d, low), x);
#else
  return hn::Max(hn::Set(d, low), x);
#endif
}

HWY_INLINE V at_most(D d, float high, V x) {
#if !ANNULUS_MAX_KEEPS_NAN
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, high)), hn::Set(d, high), x);
#else
  return hn::Min(hn::Set(d, high), x);
#endif
}

// 2^x for x <= 127, relative error 8e-8: minimax polynomial of degree 5 on [-0.5, 0.5]. Exactly 0 for x <= -127, so
// that a masked logit of -inf weighs nothing at all.
HWY_INLINE V exp2(D d, V x) {
  const hn::RebindToSigned<D> di;
  x = at_least(d, -127.0f, x);
  const V magic =
      hn::Set(d, 12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, into the low mantissa bits
  const V t = hn::Add(x, magic);
  const V f = hn::Sub(x, hn::Sub(t, magic));
  V p = hn::Set(d, 1.327647217e-3f);
  p = hn::MulAdd(p, f, hn::Set(d, 9.675541331e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550713273e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402211972e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931469671e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, t))));
}

// C[M x vectors] (+)= A B over `depth`: A(i, k) = a[i * kRowStep + k * kDepthStep], row k of B at b + k * b_stride.
template <int M, int kVectors, bool kAccumulate, Index kRowStep, Index kDepthStep>
HWY_INLINE void multiply_block(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, Index b_stride, Index depth,
                               float* HWY_RESTRICT c, Index c_stride) {
  const D d;
  V sum[static_cast<std::size_t>(M)][static_cast<std::size_t>(kVectors)];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      sum[i][v] = kAccumulate ? hn::LoadU(d, c + i * c_stride + v * kLanes) : hn::Zero(d);
  for (Index k = 0; k < depth; ++k, a += kDepthStep, b += b_stride) {
    V right[static_cast<std::size_t>(kVectors)];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = hn::LoadU(d, b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const V left = hn::Set(d, a[i * kRowStep]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(left, right[v], sum[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[i][v], d, c + i * c_stride + v * kLanes);
}

// The same for the m <= kRows rows at an end: each count has its own block, so nothing is padded and nothing beyond is
// touched.
template <int kVectors, bool kAccumulate, Index kRowStep, Index kDepthStep>
HWY_NOINLINE void multiply(Index m, const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, Index b_stride,
                           Index depth, float* HWY_RESTRICT c, Index c_stride) {
#define ANNULUS_BLOCK(M)                                                                                  \
  case M:                                                                                                 \
    if constexpr (M <= kRows)                                                                             \
      multiply_block<M, kVectors, kAccumulate, kRowStep, kDepthStep>(a, b, b_stride, depth, c, c_stride); \
    break;
  switch (m) {
    ANNULUS_BLOCK(1)
    ANNULUS_BLOCK(2)
    ANNULUS_BLOCK(3)
    ANNULUS_BLOCK(4)
    ANNULUS_BLOCK(5)
    ANNULUS_BLOCK(6)
    ANNULUS_BLOCK(7)
    ANNULUS_BLOCK(8)
    ANNULUS_BLOCK(9)
    ANNULUS_BLOCK(10)
    ANNULUS_BLOCK(11)
    ANNULUS_BLOCK(12)
    ANNULUS_BLOCK(13)
    ANNULUS_BLOCK(14)
    default:
      break;
  }
#undef ANNULUS_BLOCK
}

// Scores of m panel rows with kColumns packed columns.
HWY_INLINE void multiply_columns(Index m, const float* panel, const float* columns, Index head_dim, float* scores,
                                 Index stride) {
  multiply<2, false, 1, kPanel>(m, panel, columns, kColumns, head_dim, scores, stride);
}

// C (+)= A B for all padded(head_dim) columns of B; the last vector may stand alone.
template <Index kRowStep, Index kDepthStep>
HWY_INLINE void multiply_rows(Index m, const float* a, const float* b, Index width, Index depth, float* c,
                              Index c_stride) {
  Index column = 0;
  for (; column + kColumns <= width; column += kColumns)
    multiply<2, true, kRowStep, kDepthStep>(m, a, b + column, width, depth, c + column, c_stride);
  if (column < width) multiply<1, true, kRowStep, kDepthStep>(m, a, b + column, width, depth, c + column, c_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace annulus::cpu
HWY_AFTER_NAMESPACE();

#endif  // a target that we compile
#endif  // once per target
