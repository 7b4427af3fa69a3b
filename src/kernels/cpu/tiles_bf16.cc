// The forward pass on bf16 dot products (AVX-512 BF16): twice the products a cycle. The only file with x86 intrinsics.
//
// The same blocks as tiles_simd.cc, but a lane holds a pair of bf16 numbers and one instruction adds both of their
// products to an fp32 sum:
//   queries  [rows / kRows][pairs of head_dim][kPanel]
//   keys     [keys / kColumns][pairs of head_dim][kColumns]
//   values   [pairs of keys][padded(head_dim)]
// Weights are rounded to bf16 before they meet the values; the sum of the softmax takes them unrounded.
#include "kernels/cpu/tile_sources.h"

#if defined(__x86_64__)

#include <hwy/base.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/softmax_state.h"
#include "numeric/half.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own AVX-512 intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace annulus::cpu {
namespace {

using Index = std::int64_t;

constexpr Index kLanes = 16, kRows = 14, kPanel = 16, kColumns = 2 * kLanes;
constexpr Index kQueryTile = 84, kKeyChunk = 256;
constexpr Index kScoreStride = kKeyChunk + 16;     // floats
constexpr Index kWeightStride = kScoreStride / 2;  // pairs

Index pairs(Index head_dim) { return (head_dim + 1) / 2; }

HWY_PUSH_ATTRIBUTES("sse4.2,avx,avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

// 2^x, relative error 8e-8: see products-inl.h. NaN stays NaN, and 2^-200 is 0.
inline __m512 exp2_lanes(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.327647217e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.675541331e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550713273e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402211972e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931469671e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

// C[M x vectors] (+)= A B, `depth` in pairs: A(i, k) = a[i * kRowStep + k * kDepthStep].
template <int M, int kVectors, bool kAccumulate, Index kRowStep, Index kDepthStep>
inline void multiply_block(const std::int32_t* a, const std::int32_t* b, Index b_stride, Index depth, float* c,
                           Index c_stride) {
  __m512 sum[static_cast<std::size_t>(M)][static_cast<std::size_t>(kVectors)];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      sum[i][v] = kAccumulate ? _mm512_loadu_ps(c + i * c_stride + v * kLanes) : _mm512_setzero_ps();
  for (Index k = 0; k < depth; ++k, a += kDepthStep, b += b_stride) {
    __m512bh right[static_cast<std::size_t>(kVectors)];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + v * kLanes));
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(a[i * kRowStep]));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], left, right[v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + i * c_stride + v * kLanes, sum[i][v]);
}

template <int kVectors, bool kAccumulate, Index kRowStep, Index kDepthStep, int M = kRows>
HWY_NOINLINE void multiply(Index m, const std::int32_t* a, const std::int32_t* b, Index b_stride, Index depth, float* c,
                           Index c_stride) {
  if (m == M) return multiply_block<M, kVectors, kAccumulate, kRowStep, kDepthStep>(a, b, b_stride, depth, c, c_stride);
  if constexpr (M > 1)
    multiply<kVectors, kAccumulate, kRowStep, kDepthStep, M - 1>(m, a, b, b_stride, depth, c, c_stride);
}

const std::uint16_t* row_of(const SourceRows& rows, Index i) {
  return static_cast<const std::uint16_t*>(rows.data) + i * rows.stride;
}

// kBlock rows side by side (kWidth lanes) for every pair of elements; what is not there is 0. `flip` is the sign bit or
// 0.
template <Index kBlock, Index kWidth>
void transpose_pairs(const SourceRows& rows, std::uint32_t flip, std::int32_t* target) {
  const Index depth = pairs(rows.head_dim);
  const __m128i sign = _mm_set1_epi16(static_cast<short>(flip));
  for (Index block = 0; block < rows.count; block += kBlock, target += kWidth * depth) {
    const Index count = std::min(kBlock, rows.count - block);
    for (Index i = 0; i < kWidth; i += 4) {
      const std::uint16_t* row[4];
      for (Index u = 0; u < 4; ++u) row[u] = i + u < count ? row_of(rows, block + i + u) : nullptr;
      Index k = 0;
      for (; 2 * k + 8 <= rows.head_dim; k += 4) {
        __m128i x[4];
        for (Index u = 0; u < 4; ++u)
          x[u] = row[u] != nullptr
                     ? _mm_xor_si128(sign, _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[u] + 2 * k)))
                     : _mm_setzero_si128();
        const __m128i a = _mm_unpacklo_epi32(x[0], x[1]), b = _mm_unpacklo_epi32(x[2], x[3]);
        const __m128i e = _mm_unpackhi_epi32(x[0], x[1]), f = _mm_unpackhi_epi32(x[2], x[3]);
        std::int32_t* out = target + k * kWidth + i;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(a, b));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kWidth), _mm_unpackhi_epi64(a, b));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * kWidth), _mm_unpacklo_epi64(e, f));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * kWidth), _mm_unpackhi_epi64(e, f));
      }
      for (; k < depth; ++k)
        for (Index u = 0; u < 4; ++u) {
          std::uint32_t pair = 0;
          if (row[u] != nullptr) {
            pair = row[u][2 * k] ^ flip;
            if (2 * k + 1 < rows.head_dim) pair |= (row[u][2 * k + 1] ^ flip) << 16;
          }
          target[k * kWidth + i + u] = static_cast<std::int32_t>(pair);
        }
    }
  }
}

void pack_queries(const SourceRows& rows, float scale_log2, void* packed) {
  transpose_pairs<kRows, kPanel>(rows, scale_log2 < 0 ? 0x8000u : 0u, static_cast<std::int32_t*>(packed));
}

void pack_keys(const SourceRows& rows, void* packed) {
  transpose_pairs<kColumns, kColumns>(rows, 0, static_cast<std::int32_t*>(packed));
}

// Two rows of values interleaved, the first in the lower halves. NaN and infinities have all exponent bits set.
bool pack_values(const SourceRows& rows, void* packed) {
  auto* target = static_cast<std::int32_t*>(packed);
  const Index width = padded(rows.head_dim);
  const __m512i exponents = _mm512_set1_epi32(0x7f80), high_exponents = _mm512_set1_epi32(0x7f800000);
  __mmask16 seen = 0;
  for (Index j = 0; j < rows.count; j += 2, target += width) {
    const std::uint16_t* low = row_of(rows, j);
    const std::uint16_t* high = j + 1 < rows.count ? row_of(rows, j + 1) : nullptr;
    for (Index k = 0; k < width; k += kLanes) {
      const auto lanes = static_cast<__mmask16>(
          k + kLanes <= rows.head_dim ? 0xffff : (1 << std::max<Index>(0, rows.head_dim - k)) - 1);
      const __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, low + k));
      const __m512i y =
          high != nullptr ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, high + k)) : _mm512_setzero_si512();
      const __m512i pair = _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
      seen = static_cast<__mmask16>(seen | _mm512_cmpeq_epi32_mask(_mm512_and_si512(pair, exponents), exponents) |
                                    _mm512_cmpeq_epi32_mask(_mm512_and_si512(pair, high_exponents), high_exponents));
      _mm512_storeu_si512(target + k, pair);
    }
  }
  return seen == 0;
}

// Raw products in `scores` become bf16 weights; see soften_row in tiles_simd.cc.
inline void soften_row(const float* scores, std::int32_t* weights, Index extent, float scale, const StateRows& state,
                       Index width) {
  __m512 top0 = _mm512_set1_ps(kNothing), top1 = top0;
  for (Index j = 0; j < extent; j += kColumns) {
    top0 = _mm512_max_ps(top0, _mm512_loadu_ps(scores + j));
    top1 = _mm512_max_ps(top1, _mm512_loadu_ps(scores + j + kLanes));
  }
  const float top = std::max(kLowest, scale * _mm512_reduce_max_ps(_mm512_max_ps(top0, top1)));
  if (!(top <= *state.maximum + kLazyLog2)) {
    const float shrink = std::exp2(*state.maximum - top);
    *state.sum *= shrink;
    *state.maximum = top;
    const __m512 factor = _mm512_set1_ps(shrink);
    for (Index k = 0; k < width; k += kLanes)
      _mm512_storeu_ps(state.values + k, _mm512_mul_ps(factor, _mm512_loadu_ps(state.values + k)));
  }
  // Not fused: the largest logit must round just as `top` did, however large it is.
  const __m512 m = _mm512_set1_ps(*state.maximum), factor = _mm512_set1_ps(scale);
  __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
  for (Index j = 0; j < extent; j += kColumns) {
    const __m512 p0 = exp2_lanes(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + j), factor), m));
    const __m512 p1 = exp2_lanes(_mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + j + kLanes), factor), m));
    sum0 = _mm512_add_ps(sum0, p0);
    sum1 = _mm512_add_ps(sum1, p1);
    _mm512_storeu_si512(weights + j / 2, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p1, p0)));
  }
  *state.sum += _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
}

// 0 * NaN is NaN: see tiles_simd.cc. The last pair of a row may have one visible key: the other is taken out.
void add_values_one_by_one(const AttendTile& tile, const std::int32_t* weights) {
  const Index width = padded(tile.head_dim);
  const auto* values = static_cast<const std::int32_t*>(tile.values);
  for (Index i = 0; i < tile.query_count; ++i) {
    const Index visible = tile.diagonal.visible_keys(i, tile.key_count);
    float* sum = tile.state.values + i * tile.state.step * width;
    for (Index pair = 0; pair < pairs(visible); ++pair) {
      const __m512i both = _mm512_set1_epi32(2 * pair + 1 < visible ? -1 : 0xffff);
      const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(weights[i * kWeightStride + pair]));
      for (Index k = 0; k < width; k += kLanes) {
        const __m512i right = _mm512_and_si512(both, _mm512_loadu_si512(values + pair * width + k));
        _mm512_storeu_ps(sum + k, _mm512_dpbf16_ps(_mm512_loadu_ps(sum + k), left, reinterpret_cast<__m512bh>(right)));
      }
    }
  }
}

void add_values(const AttendTile& tile, const std::int32_t* weights, Index i, Index m, Index key_count) {
  const Index width = padded(tile.head_dim);
  const auto* values = static_cast<const std::int32_t*>(tile.values);
  const std::int32_t* a = weights + i * kWeightStride;
  float* c = tile.state.from(i, tile.head_dim).values;
  const Index c_stride = tile.state.step * width;
  Index column = 0;
  for (; column + kColumns <= width; column += kColumns)
    multiply<2, true, kWeightStride, 1>(m, a, values + column, width, pairs(key_count), c + column, c_stride);
  if (column < width)
    multiply<1, true, kWeightStride, 1>(m, a, values + column, width, pairs(key_count), c + column, c_stride);
}

void attend(const AttendTile& tile) {
  const auto* queries = static_cast<const std::int32_t*>(tile.queries);
  const auto* keys = static_cast<const std::int32_t*>(tile.keys);
  auto* scores = static_cast<float*>(tile.scores);
  auto* weights = reinterpret_cast<std::int32_t*>(scores + kQueryTile * kScoreStride);
  const Index width = padded(tile.head_dim), depth = pairs(tile.head_dim);
  const float scale = std::abs(tile.scale_log2);  // its sign is in the queries
  const bool one_by_one = !tile.values_finite && !tile.diagonal.hides_none(tile.key_count);
  for (Index j = 0; j < tile.diagonal.visible_keys(tile.query_count - 1, tile.key_count); j += kColumns)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      if (j < tile.diagonal.visible_keys(i + m - 1, tile.key_count))
        multiply<2, false, 1, kPanel>(m, queries + i / kRows * kPanel * depth, keys + j * depth, kColumns, depth,
                                      scores + i * kScoreStride + j, kScoreStride);
    }
  for (Index i = 0; i < tile.query_count; i += kRows) {
    const Index m = std::min(kRows, tile.query_count - i);
    const Index block_keys = tile.diagonal.visible_keys(i + m - 1, tile.key_count);
    if (block_keys == 0) continue;
    const Index extent = round_up(block_keys, kColumns);
    for (Index row = i; row < i + m; ++row) {
      float* row_scores = scores + row * kScoreStride;
      std::int32_t* row_weights = weights + row * kWeightStride;
      const Index visible = tile.diagonal.visible_keys(row, tile.key_count);
      if (visible == 0) {
        std::fill_n(row_weights, extent / 2, 0);
        continue;
      }
      std::fill(row_scores + visible, row_scores + extent, kNothing);
      soften_row(row_scores, row_weights, extent, scale, tile.state.from(row, tile.head_dim), width);
    }
    if (!one_by_one) add_values(tile, weights, i, m, block_keys);
  }
  if (one_by_one) add_values_one_by_one(tile, weights);
}

double bf16_chains(Index rounds) {
  const auto half = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f003f00));
  __m512 sum[12];
  for (int i = 0; i < 12; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (Index round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], half, half);
  __m512 total = sum[0];
  for (int i = 1; i < 12; ++i) total = _mm512_add_ps(total, sum[i]);
  volatile float sink = _mm512_reduce_add_ps(total);
  (void)sink;
  return 4.0 * 12.0 * static_cast<double>(kLanes) * static_cast<double>(rounds);
}

HWY_POP_ATTRIBUTES

Index query_tile_bytes(Index head_dim) { return kQueryTile / kRows * kPanel * pairs(head_dim) * 4; }
Index key_chunk_bytes(Index head_dim) { return kKeyChunk / 2 * padded(head_dim) * 4; }

bool has_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace

std::optional<Tiles> bf16_tiles(const Tiles& base) {
  if (base.name != "avx512" || !has_bf16()) return std::nullopt;
  Tiles tiles = base;
  tiles.name = "avx512_bf16";
  tiles.forward_bf16 = {.query_tile = kQueryTile,
                        .key_chunk = kKeyChunk,
                        .score_bytes = kQueryTile * kScoreStride * 6,  // fp32 scores and bf16 weights
                        .query_tile_bytes = query_tile_bytes,
                        .key_chunk_bytes = key_chunk_bytes,
                        .pack_queries = pack_queries,
                        .pack_keys = pack_keys,
                        .pack_values = pack_values,
                        .attend = attend};
  tiles.bf16_chains = bf16_chains;
  return tiles;
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {

std::optional<Tiles> bf16_tiles(const Tiles&) { return std::nullopt; }

}  // namespace annulus::cpu

#endif
