// Tiles on Highway: one source, compiled once per instruction set, no -march.
//
// Everything is a product C (+)= A B of a register block: M rows of C by two vectors. A is read one float at a time (a broadcast), B one
// row of two vectors at a time. Operands are packed so that both walk through memory in order:
//   panels   [rows / kRows][k][kPanel]        the left factor, element (i, k) of a block at k * kPanel + i
//   columns  [rows / kColumns][k][kColumns]   the right factor of q . k: element k of kColumns rows side by side
//   rows     [rows][padded(head_dim)]         the right factor of P v
// Scores stay in a small square of scratch and serve as left factors, straight (kScoreStride, 1) or transposed (1, kScoreStride).
// NaN payloads are made canonical while packing, since exp2 below adds integers to the bits of its argument.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/cpu/tile_sources.h"
#include "kernels/softmax_state.h"
#include "numeric/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/tiles_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// AVX-512, AVX2 and the baseline of the compiler (plain C++ or SSE2 on x86, NEON on ARM) are enough. What lies between only costs compile time.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_STATIC_TARGET

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using Index = std::int64_t;

// Tile sizes and their reasons. 14 x 2 accumulators + 2 of B + 1 of A fill the 32 registers of AVX-512 and NEON, 6 x 2 the 16 of AVX2.
#undef ANNULUS_VECTOR_FP16
#define ANNULUS_VECTOR_FP16 1
#if HWY_TARGET == HWY_AVX3
constexpr Index kLanes = 16, kRows = 14, kPanel = 16;
#elif HWY_TARGET == HWY_AVX2
constexpr Index kLanes = 8, kRows = 6, kPanel = 8;
#elif HWY_TARGET == HWY_NEON
constexpr Index kLanes = 4, kRows = 14, kPanel = 16;
#else
#undef ANNULUS_VECTOR_FP16
#define ANNULUS_VECTOR_FP16 0
constexpr Index kLanes = HWY_TARGET == HWY_SCALAR ? 1 : HWY_MAX_BYTES / 4, kRows = 4, kPanel = 4;
#endif
constexpr Index kColumns = 2 * kLanes;
constexpr Index kQueryTile = kRows * (84 / kRows);
constexpr Index kKeyChunk = 256;                // scores of a tile stay in the level-2 cache, packed keys and values too
constexpr Index kScoreStride = kKeyChunk + 16;  // not a power of two: rows of scores must not share cache sets
constexpr Index kBackwardQueries = kRows * (112 / kRows);
constexpr Index kBackwardKeys = 256;
static_assert(kKeyChunk % kColumns == 0 && kBackwardKeys % kColumns == 0);

// ---------------------------------------------------------------------------------------------------------------- arithmetic

// 2^x for x <= 127, relative error 8e-8: minimax polynomial of degree 5 on [-0.5, 0.5]. Exactly 0 for x <= -127, so that a masked logit of
// -inf weighs nothing at all. Max returns its second argument when one is NaN.
HWY_INLINE V exp2(D d, V x) {
  const hn::RebindToSigned<D> di;
  x = hn::Max(hn::Set(d, -127.0f), x);
  const V magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, into the low mantissa bits
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

// The same for the m <= kRows rows at an end: each count has its own block, so nothing is padded and nothing beyond is touched.
template <int kVectors, bool kAccumulate, Index kRowStep, Index kDepthStep>
HWY_NOINLINE void multiply(Index m, const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, Index b_stride, Index depth,
                           float* HWY_RESTRICT c, Index c_stride) {
#define ANNULUS_BLOCK(M)                                                                                 \
  case M:                                                                                                \
    if constexpr (M <= kRows)                                                                            \
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
HWY_INLINE void multiply_columns(Index m, const float* panel, const float* columns, Index head_dim, float* scores) {
  multiply<2, false, 1, kPanel>(m, panel, columns, kColumns, head_dim, scores, kScoreStride);
}

// C (+)= A B for all padded(head_dim) columns of B; the last vector may stand alone.
template <Index kRowStep, Index kDepthStep>
HWY_INLINE void multiply_rows(Index m, const float* a, const float* b, Index width, Index depth, float* c, Index c_stride) {
  Index column = 0;
  for (; column + kColumns <= width; column += kColumns)
    multiply<2, true, kRowStep, kDepthStep>(m, a, b + column, width, depth, c + column, c_stride);
  if (column < width) multiply<1, true, kRowStep, kDepthStep>(m, a, b + column, width, depth, c + column, c_stride);
}

// ------------------------------------------------------------------------------------------------------------------- packing

// The elements of one vector, as fp32.
template <class Tag>
HWY_INLINE hn::Vec<Tag> load(Tag d, const float* p) {
  return hn::LoadU(d, p);
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> load(Tag d, const BFloat16* p) {
  const hn::Rebind<std::uint16_t, Tag> d16;
  const hn::RebindToUnsigned<Tag> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, &p->bits))));
}
template <class Tag>
HWY_INLINE hn::Vec<Tag> load(Tag d, const Float16* p) {
#if ANNULUS_VECTOR_FP16
  const hn::Rebind<hwy::float16_t, Tag> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#else
  HWY_ALIGN float x[hn::MaxLanes(d)];
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) x[i] = to_float(p[i]);
  return hn::Load(d, x);
#endif
}

template <class Tag>
HWY_INLINE hn::Vec<Tag> canonical(Tag d, hn::Vec<Tag> x) {
  const hn::RebindToUnsigned<Tag> du;
  return hn::IfThenElse(hn::IsNaN(x), hn::BitCast(d, hn::Set(du, 0x7fc00000u)), x);
}
HWY_INLINE float canonical(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

// Watches for NaN and infinities: x - x is 0 for all other values.
struct Watch {
  V seen;
  explicit Watch(D d) : seen(hn::Zero(d)) {}
  HWY_INLINE void look(V x) { seen = hn::Or(seen, hn::Sub(x, x)); }
  HWY_INLINE bool finite([[maybe_unused]] D d) const { return hn::AllTrue(d, hn::Eq(seen, hn::Zero(d))); }
};

// Transposing goes four rows by four elements at a time where there are vectors, else one by one.
#if HWY_TARGET == HWY_SCALAR
constexpr Index kStep = 1;
template <Index kWidth, class T>
Index transpose_quads(const T* const*, Index, float, float*) {
  return 0;
}
#else
constexpr Index kStep = 4;
template <Index kWidth, class T>
HWY_INLINE Index transpose_quads(const T* const* row, Index head_dim, float scale, float* target) {
  const hn::FixedTag<float, 4> d4;
  const hn::RepartitionToWide<decltype(d4)> d2;
  const auto factor = hn::Set(d4, scale);
  Index k = 0;
  for (; k + 4 <= head_dim; k += 4, target += 4 * kWidth) {
    hn::Vec<decltype(d4)> x[4];
    for (Index u = 0; u < 4; ++u)
      x[u] = row[u] != nullptr ? hn::Mul(factor, canonical(d4, load(d4, row[u] + k))) : hn::Zero(d4);
    const auto a = hn::BitCast(d2, hn::InterleaveLower(d4, x[0], x[1]));
    const auto b = hn::BitCast(d2, hn::InterleaveLower(d4, x[2], x[3]));
    const auto e = hn::BitCast(d2, hn::InterleaveUpper(d4, x[0], x[1]));
    const auto f = hn::BitCast(d2, hn::InterleaveUpper(d4, x[2], x[3]));
    hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, a, b)), d4, target);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, a, b)), d4, target + kWidth);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, e, f)), d4, target + 2 * kWidth);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, e, f)), d4, target + 3 * kWidth);
  }
  return k;
}
#endif

// Rows i of the source, kBlock of them side by side (kWidth floats) for every k; lanes beyond the rows are 0.
template <Index kBlock, Index kWidth, class T>
void transpose_rows(const T* source, Index stride, Index count, Index head_dim, std::pair<float, float*> scaled_target) {
  auto [scale, target] = scaled_target;
  for (Index block = 0; block < count; block += kBlock, target += kWidth * head_dim) {
    const Index rows = std::min(kBlock, count - block);
    for (Index i = 0; i < kWidth; i += kStep) {
      const T* row[kStep];
      for (Index u = 0; u < kStep; ++u) row[u] = i + u < rows ? source + (block + i + u) * stride : nullptr;
      Index k = transpose_quads<kWidth>(row, head_dim, scale, target + i);
      for (; k < head_dim; ++k)
        for (Index u = 0; u < kStep; ++u)
          target[k * kWidth + i + u] = row[u] != nullptr ? scale * canonical(to_float(row[u][k])) : 0.0f;
    }
  }
}

template <class T>
bool copy_rows(const T* source, Index stride, Index count, Index head_dim, std::pair<float, float*> scaled_target) {
  const D d;
  auto [scale, target] = scaled_target;
  const V factor = hn::Set(d, scale);
  const Index width = padded(head_dim);
  Watch watch(d);
  bool tail_finite = true;
  for (Index i = 0; i < count; ++i, source += stride, target += width) {
    Index k = 0;
    for (; k + kLanes <= head_dim; k += kLanes) {
      const V x = hn::Mul(factor, canonical(d, load(d, source + k)));
      watch.look(x);
      hn::StoreU(x, d, target + k);
    }
    for (; k < head_dim; ++k) {
      target[k] = scale * canonical(to_float(source[k]));
      tail_finite = tail_finite && std::isfinite(target[k]);
    }
    for (; k < width; ++k) target[k] = 0.0f;
  }
  return tail_finite && watch.finite(d);
}

template <class F>
auto with_type(const SourceRows& rows, F f) {
  switch (rows.dtype) {
    case DType::bf16:
      return f(static_cast<const BFloat16*>(rows.data));
    case DType::fp16:
      return f(static_cast<const Float16*>(rows.data));
    case DType::fp32:
      break;
  }
  return f(static_cast<const float*>(rows.data));
}

// Returns whether all of them are finite.
bool pack_rows(const SourceRows& rows, float scale, float* packed) {
  return with_type(rows, [&](const auto* data) {
    return copy_rows(data, rows.stride, rows.count, rows.head_dim, {scale, packed});
  });
}

template <Index kBlock, Index kWidth>
void pack_transposed(const SourceRows& rows, float scale, float* packed) {
  with_type(rows, [&](const auto* data) {
    transpose_rows<kBlock, kWidth>(data, rows.stride, rows.count, rows.head_dim, {scale, packed});
  });
}

void pack_panels(const SourceRows& rows, float scale, float* packed) { pack_transposed<kRows, kPanel>(rows, scale, packed); }
void pack_columns(const SourceRows& rows, float* packed) { pack_transposed<kColumns, kColumns>(rows, 1.0f, packed); }

// ------------------------------------------------------------------------------------------------------------------- forward

// How many keys of the chunk row i may see.
HWY_INLINE Index visible_keys(Index i, Index diagonal, Index key_count) {
  return std::clamp<Index>(i + diagonal + 1, 0, key_count);
}

// Turns a row of logits (log2 units) into weights 2^(x - m) and takes them into the state. `extent` is a multiple of kColumns.
HWY_INLINE void soften_row(float* scores, Index extent, Index width, float& maximum, float& sum, float* values) {
  const D d;
  V top0 = hn::Set(d, kNothing), top1 = top0;
  for (Index j = 0; j < extent; j += kColumns) {
    top0 = hn::Max(top0, hn::LoadU(d, scores + j));
    top1 = hn::Max(top1, hn::LoadU(d, scores + j + kLanes));
  }
  const float top = std::max(kLowest, hn::GetLane(hn::MaxOfLanes(d, hn::Max(top0, top1))));
  if (!(top <= maximum + kLazyLog2)) {
    const float shrink = std::exp2(maximum - top);
    sum *= shrink;
    maximum = top;
    const V factor = hn::Set(d, shrink);
    for (Index k = 0; k < width; k += kLanes) hn::StoreU(hn::Mul(factor, hn::LoadU(d, values + k)), d, values + k);
  }
  const V m = hn::Set(d, maximum);
  V sum0 = hn::Zero(d), sum1 = sum0;
  for (Index j = 0; j < extent; j += kColumns) {
    const V p0 = exp2(d, hn::Sub(hn::LoadU(d, scores + j), m));
    const V p1 = exp2(d, hn::Sub(hn::LoadU(d, scores + j + kLanes), m));
    hn::StoreU(p0, d, scores + j);
    hn::StoreU(p1, d, scores + j + kLanes);
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
  }
  sum += hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

// 0 * NaN is NaN: where a value that is not finite stands behind the diagonal, weights of 0 must not meet it.
void add_values_one_by_one(const AttendTile& tile, const float* scores) {
  const Index width = padded(tile.head_dim);
  const auto* values = static_cast<const float*>(tile.values);
  for (Index i = 0; i < tile.query_count; ++i)
    for (Index j = 0; j < visible_keys(i, tile.diagonal, tile.key_count); ++j)
      for (Index k = 0; k < width; ++k)
        tile.state.values[i * tile.state.step * width + k] += scores[i * kScoreStride + j] * values[j * width + k];
}

void attend(const AttendTile& tile) {
  const auto* queries = static_cast<const float*>(tile.queries);
  const auto* keys = static_cast<const float*>(tile.keys);
  auto* scores = static_cast<float*>(tile.scores);
  const Index width = padded(tile.head_dim);
  const bool one_by_one = !tile.values_finite && tile.diagonal < tile.key_count - 1;
  // Columns outside, rows inside: kColumns packed keys stay in the level-1 cache for all rows of the tile.
  for (Index j = 0; j < visible_keys(tile.query_count - 1, tile.diagonal, tile.key_count); j += kColumns)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      if (j < visible_keys(i + m - 1, tile.diagonal, tile.key_count))
        multiply_columns(m, queries + i / kRows * kPanel * tile.head_dim, keys + j * tile.head_dim, tile.head_dim,
                         scores + i * kScoreStride + j);
    }
  for (Index i = 0; i < tile.query_count; i += kRows) {
    const Index m = std::min(kRows, tile.query_count - i);
    const Index block_keys = visible_keys(i + m - 1, tile.diagonal, tile.key_count);
    if (block_keys == 0) continue;
    const Index extent = round_up(block_keys, kColumns);
    for (Index row = i; row < i + m; ++row) {
      float* row_scores = scores + row * kScoreStride;
      const Index visible = visible_keys(row, tile.diagonal, tile.key_count);
      std::fill(row_scores + visible, row_scores + extent, visible > 0 ? kNothing : 0.0f);
      const StateRows state = tile.state.from(row, tile.head_dim);
      if (visible > 0) soften_row(row_scores, extent, width, *state.maximum, *state.sum, state.values);
    }
    if (!one_by_one)
      multiply_rows<kScoreStride, 1>(m, scores + i * kScoreStride, static_cast<const float*>(tile.values), width, block_keys,
                                     tile.state.from(i, tile.head_dim).values, tile.state.step * width);
  }
  if (one_by_one) add_values_one_by_one(tile, scores);
}

Index query_tile_bytes(Index head_dim) { return kQueryTile / kRows * kPanel * head_dim * 4; }
Index key_chunk_bytes(Index head_dim) { return kKeyChunk * padded(head_dim) * 4; }
void pack_queries(const SourceRows& rows, float scale_log2, void* packed) {
  pack_panels(rows, scale_log2, static_cast<float*>(packed));
}
void pack_keys(const SourceRows& rows, void* packed) { pack_columns(rows, static_cast<float*>(packed)); }
bool pack_values(const SourceRows& rows, void* packed) { return pack_rows(rows, 1.0f, static_cast<float*>(packed)); }

// ------------------------------------------------------------------------------------------------------------------ backward

struct Gradients {
  float* weights;  // P, [query][kScoreStride]
  float* slopes;   // dP, then dS / scale
};

// Eq. 6 for one row: P = 2^(s - G), dS = P (dP - Delta); behind the visible keys both are 0.
HWY_INLINE void differentiate_row(float* weights, float* slopes, Index visible, Index extent, float lse_log2, float delta) {
  const D d;
  const V g = hn::Set(d, lse_log2), shift = hn::Set(d, delta);
  for (Index j = 0; j < visible; j += kLanes) {
    const V p = exp2(d, hn::Sub(hn::LoadU(d, weights + j), g));
    hn::StoreU(p, d, weights + j);
    hn::StoreU(hn::Mul(p, hn::Sub(hn::LoadU(d, slopes + j), shift)), d, slopes + j);
  }
  std::fill(weights + visible, weights + extent, 0.0f);
  std::fill(slopes + visible, slopes + extent, 0.0f);
}

void accumulate_one_by_one(const DifferentiateTile& tile, const Gradients& scores) {
  const Index width = padded(tile.head_dim);
  for (Index i = 0; i < tile.query_count; ++i)
    for (Index j = 0; j < visible_keys(i, tile.diagonal, tile.key_count); ++j) {
      const float p = scores.weights[i * kScoreStride + j];
      const float ds = scores.slopes[i * kScoreStride + j];
      for (Index k = 0; k < width; ++k) {
        if (tile.dk != nullptr) {
          tile.dk[j * tile.dk_step * width + k] += ds * tile.query_rows[i * width + k];
          tile.dv[j * tile.dk_step * width + k] += p * tile.dout_rows[i * width + k];
        }
        if (tile.dq != nullptr) tile.dq[i * tile.dq_step * width + k] += ds * tile.key_rows[j * width + k];
      }
    }
}

void accumulate_dk_dv(const DifferentiateTile& tile, const Gradients& scores) {
  const Index width = padded(tile.head_dim);
  for (Index j = 0; j < tile.key_count; j += kRows) {
    const Index m = std::min(kRows, tile.key_count - j);
    const Index first = std::clamp<Index>(j - tile.diagonal, 0, tile.query_count);  // rows before it see none of these keys
    const Index depth = tile.query_count - first;
    if (depth == 0) continue;
    const Index offset = first * kScoreStride + j;
    multiply_rows<1, kScoreStride>(m, scores.weights + offset, tile.dout_rows + first * width, width, depth,
                                   tile.dv + j * tile.dk_step * width, tile.dk_step * width);
    multiply_rows<1, kScoreStride>(m, scores.slopes + offset, tile.query_rows + first * width, width, depth,
                                   tile.dk + j * tile.dk_step * width, tile.dk_step * width);
  }
}

void differentiate(const DifferentiateTile& tile) {
  const Index width = padded(tile.head_dim);
  const Gradients scores{tile.scratch, tile.scratch + kBackwardQueries * kScoreStride};
  const Index column_count = round_up(tile.key_count, kColumns);
  for (Index j = 0; j < tile.key_count; j += kColumns)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      if (j >= visible_keys(i + m - 1, tile.diagonal, tile.key_count)) continue;
      const Index panel = i / kRows * kPanel * tile.head_dim;
      const Index score = i * kScoreStride + j;
      multiply_columns(m, tile.queries + panel, tile.keys + j * tile.head_dim, tile.head_dim, scores.weights + score);
      multiply_columns(m, tile.dout + panel, tile.values + j * tile.head_dim, tile.head_dim, scores.slopes + score);
    }
  for (Index i = 0; i < tile.query_count; ++i)
    differentiate_row(scores.weights + i * kScoreStride, scores.slopes + i * kScoreStride,
                      visible_keys(i, tile.diagonal, tile.key_count), column_count, tile.lse_log2[i], tile.delta[i]);
  if (!tile.finite && tile.diagonal < tile.key_count - 1) return accumulate_one_by_one(tile, scores);
  if (tile.dk != nullptr) accumulate_dk_dv(tile, scores);
  if (tile.dq != nullptr)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      multiply_rows<kScoreStride, 1>(m, scores.slopes + i * kScoreStride, tile.key_rows, width,
                                     visible_keys(i + m - 1, tile.diagonal, tile.key_count), tile.dq + i * tile.dq_step * width,
                                     tile.dq_step * width);
    }
}

Index panel_floats(Index head_dim) { return kBackwardQueries / kRows * kPanel * head_dim; }
Index column_floats(Index head_dim) { return kBackwardKeys * head_dim; }

// --------------------------------------------------------------------------------------------------------- rows in and out

HWY_INLINE void store(D d, V x, float* p) { hn::StoreU(x, d, p); }
HWY_INLINE void store(D, V x, BFloat16* p) {  // to nearest even; Highway's own conversion truncates
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fff))));
  const auto kept = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(x)), hn::Set(d32, 0x7fc0), rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, kept)), d16, &p->bits);
}
HWY_INLINE void store([[maybe_unused]] D d, V x, Float16* p) {
#if ANNULUS_VECTOR_FP16
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, x), d16, reinterpret_cast<hwy::float16_t*>(p));
#else
  HWY_ALIGN float lanes[static_cast<std::size_t>(kLanes)];
  hn::Store(x, d, lanes);
  for (Index i = 0; i < kLanes; ++i) p[i] = from_float<Float16>(lanes[i]);
#endif
}

void store_rows(const float* source, Index count, const float* factor, TargetRows target) {
  const D d;
  const Index width = padded(target.head_dim);
  const auto store_as = [&](auto* data) {
    for (Index i = 0; i < count; ++i, source += width, data += target.stride) {
      const V f = hn::Set(d, factor[i]);
      Index k = 0;
      for (; k + kLanes <= target.head_dim; k += kLanes) store(d, hn::Mul(f, hn::LoadU(d, source + k)), data + k);
      for (; k < target.head_dim; ++k) data[k] = from_float<std::remove_pointer_t<decltype(data)>>(factor[i] * source[k]);
    }
  };
  switch (target.dtype) {
    case DType::bf16:
      return store_as(static_cast<BFloat16*>(target.data));
    case DType::fp16:
      return store_as(static_cast<Float16*>(target.data));
    case DType::fp32:
      return store_as(static_cast<float*>(target.data));
  }
}

void add_rows(const float* source, Index count, float factor, TargetRows target) {
  const D d;
  const V f = hn::Set(d, factor);
  auto* data = static_cast<float*>(target.data);
  for (Index i = 0; i < count; ++i, source += padded(target.head_dim), data += target.stride) {
    Index k = 0;
    for (; k + kLanes <= target.head_dim; k += kLanes)
      hn::StoreU(hn::MulAdd(f, hn::LoadU(d, source + k), hn::LoadU(d, data + k)), d, data + k);
    for (; k < target.head_dim; ++k) data[k] = std::fma(factor, source[k], data[k]);
  }
}

// Sums over k one after the other, as multiply_block does: where a row sees one key alone, Delta then equals dP to the last bit, and dS is 0
// as it should be.
void dot_rows(const SourceRows& a, const SourceRows& b, float* result) {
  const D d;
  HWY_ALIGN float x[static_cast<std::size_t>(kLanes * kMaxHeadDim)];
  HWY_ALIGN float y[static_cast<std::size_t>(kLanes * kMaxHeadDim)];
  HWY_ALIGN float dots[static_cast<std::size_t>(kLanes)];
  for (Index i = 0; i < a.count; i += kLanes) {
    const Index count = std::min(kLanes, a.count - i);
    pack_transposed<kLanes, kLanes>(a.part(i, count), 1.0f, x);
    pack_transposed<kLanes, kLanes>(b.part(i, count), 1.0f, y);
    V sum = hn::Zero(d);
    for (Index k = 0; k < a.head_dim; ++k) sum = hn::MulAdd(hn::Load(d, x + k * kLanes), hn::Load(d, y + k * kLanes), sum);
    hn::Store(sum, d, dots);
    std::copy_n(dots, count, result + i);
  }
}

// Twelve chains hide the latency of any FMA unit; the factors keep the sums bounded.
double fma_chains(Index rounds) {
  const D d;
  const V a = hn::Set(d, 0.5f), b = hn::Set(d, 1.0f);
  V sum[12];
  for (int i = 0; i < 12; ++i) sum[i] = hn::Set(d, static_cast<float>(i));
  for (Index round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sum[i] = hn::MulAdd(sum[i], a, b);
  V total = sum[0];
  for (int i = 1; i < 12; ++i) total = hn::Add(total, sum[i]);
  volatile float sink = hn::GetLane(total);
  (void)sink;
  return 2.0 * 12.0 * static_cast<double>(kLanes) * static_cast<double>(rounds);
}

Tiles make_tiles(std::string_view name) {
  Tiles tiles;
  tiles.name = name;
  tiles.forward = {.query_tile = kQueryTile,
                   .key_chunk = kKeyChunk,
                   .score_bytes = kQueryTile * kScoreStride * 4,
                   .query_tile_bytes = query_tile_bytes,
                   .key_chunk_bytes = key_chunk_bytes,
                   .pack_queries = pack_queries,
                   .pack_keys = pack_keys,
                   .pack_values = pack_values,
                   .attend = attend};
  tiles.forward_bf16 = tiles.forward;
  tiles.backward = {.query_tile = kBackwardQueries,
                    .key_tile = kBackwardKeys,
                    .score_bytes = 2 * kBackwardQueries * kScoreStride * 4,
                    .panel_floats = panel_floats,
                    .column_floats = column_floats,
                    .pack_panels = pack_panels,
                    .pack_columns = pack_columns,
                    .pack_rows = pack_rows,
                    .differentiate = differentiate};
  tiles.store_rows = store_rows;
  tiles.add_rows = add_rows;
  tiles.dot_rows = dot_rows;
  tiles.fma_chains = fma_chains;
  return tiles;
}

}  // namespace HWY_NAMESPACE
}  // namespace annulus::cpu
HWY_AFTER_NAMESPACE();

#endif  // a target that we compile

#if HWY_ONCE
namespace annulus::cpu {

std::vector<Tiles> simd_tiles() {
  std::vector<Tiles> found;
  [[maybe_unused]] const auto supported = hwy::SupportedTargets();
#if (HWY_TARGETS & HWY_AVX3) && HWY_STATIC_TARGET != HWY_AVX3
  if ((supported & HWY_AVX3) != 0) found.push_back(N_AVX3::make_tiles("avx512"));
#endif
#if (HWY_TARGETS & HWY_AVX2) && HWY_STATIC_TARGET != HWY_AVX2
  if ((supported & HWY_AVX2) != 0) found.push_back(N_AVX2::make_tiles("avx2"));
#endif
  constexpr auto kBaseline = HWY_STATIC_TARGET;
  found.push_back(HWY_NAMESPACE::make_tiles(kBaseline == HWY_AVX3   ? "avx512"
                                            : kBaseline == HWY_AVX2 ? "avx2"
                                            : kBaseline == HWY_NEON ? "neon"
                                                                    : "portable"));
  return found;
}

}  // namespace annulus::cpu
#endif
