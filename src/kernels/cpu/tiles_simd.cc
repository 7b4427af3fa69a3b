// Tiles on Highway: one source, compiled once per instruction set, no -march. Forward and backward of one tile in terms
// of the products of products-inl.h and the packed rows of rows-inl.h.

#include <algorithm>
#include <cmath>
#include <cstdint>

// Vectors whose length is not known to the compiler cannot stand in arrays.
#if defined(__aarch64__)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

#include "kernels/cpu/tile_sources.h"
#include "kernels/softmax_state.h"
#include "numeric/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/tiles_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// Included for targets that are skipped too: what guards them counts targets.
#include "kernels/cpu/products-inl.h"
#include "kernels/cpu/rows-inl.h"

#if ANNULUS_TARGET != ANNULUS_SKIPPED

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu {
namespace HWY_NAMESPACE {

// Turns a row of logits (log2 units) into weights 2^(x - m) and takes them into the state. `extent` is a multiple of
// kColumns.
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

// 0 * NaN is NaN: where a value that is not finite stands behind the diagonal, weights of 0 must not meet it. The same
// sums in the same order as multiply_rows has them, so that nobody can tell which of the two was at work.
HWY_INLINE void add_row(float factor, const float* row, Index width, float* sum) {
  const D d;
  const V left = hn::Set(d, factor);
  for (Index k = 0; k < width; k += kLanes)
    hn::StoreU(hn::MulAdd(left, hn::LoadU(d, row + k), hn::LoadU(d, sum + k)), d, sum + k);
}

void add_values_one_by_one(const AttendTile& tile, const float* scores) {
  const Index width = padded(tile.head_dim);
  const auto* values = static_cast<const float*>(tile.values);
  for (Index i = 0; i < tile.query_count; ++i)
    for (Index j = 0; j < tile.diagonal.visible_keys(i, tile.key_count); ++j)
      add_row(scores[i * kScoreStride + j], values + j * width, width, tile.state.values + i * tile.state.step * width);
}

void attend(const AttendTile& tile) {
  const auto* queries = static_cast<const float*>(tile.queries);
  const auto* keys = static_cast<const float*>(tile.keys);
  auto* scores = static_cast<float*>(tile.scores);
  const Index width = padded(tile.head_dim);
  const bool one_by_one = !tile.values_finite && !tile.diagonal.hides_none(tile.key_count);
  // Columns outside, rows inside: kColumns packed keys stay in the level-1 cache for all rows of the tile.
  for (Index j = 0; j < tile.diagonal.visible_keys(tile.query_count - 1, tile.key_count); j += kColumns)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      if (j < tile.diagonal.visible_keys(i + m - 1, tile.key_count))
        multiply_columns(m, queries + i / kRows * kPanel * tile.head_dim, keys + j * tile.head_dim, tile.head_dim,
                         scores + i * kScoreStride + j, kScoreStride);
    }
  for (Index i = 0; i < tile.query_count; i += kRows) {
    const Index m = std::min(kRows, tile.query_count - i);
    const Index block_keys = tile.diagonal.visible_keys(i + m - 1, tile.key_count);
    if (block_keys == 0) continue;
    const Index extent = round_up(block_keys, kColumns);
    for (Index row = i; row < i + m; ++row) {
      float* row_scores = scores + row * kScoreStride;
      const Index visible = tile.diagonal.visible_keys(row, tile.key_count);
      std::fill(row_scores + visible, row_scores + extent, visible > 0 ? kNothing : 0.0f);
      const StateRows state = tile.state.from(row, tile.head_dim);
      if (visible > 0) soften_row(row_scores, extent, width, *state.maximum, *state.sum, state.values);
    }
    if (!one_by_one)
      multiply_rows<kScoreStride, 1>(m, scores + i * kScoreStride, static_cast<const float*>(tile.values), width,
                                     block_keys, tile.state.from(i, tile.head_dim).values, tile.state.step * width);
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

// ------------------------------------------------------------------------------------------------------------------
// backward

struct Gradients {
  float* weights;  // P, [query][kSlopeStride]
  float* slopes;   // dP, then dS / scale
};

// Eq. 6 for one row: P = 2^(s - G), dS = P (dP - Delta); behind the visible keys both are 0. A
// probability is at most 1, even where logits are so large that s and G have lost their fraction.
HWY_INLINE void differentiate_row(float* weights, float* slopes, Index visible, Index extent, float lse_log2,
                                  float delta) {
  const D d;
  const V g = hn::Set(d, lse_log2), shift = hn::Set(d, delta);
  for (Index j = 0; j < visible; j += kLanes) {
    const V p = exp2(d, at_most(d, 0.0f, hn::Sub(hn::LoadU(d, weights + j), g)));
    hn::StoreU(p, d, weights + j);
    hn::StoreU(hn::Mul(p, hn::Sub(hn::LoadU(d, slopes + j), shift)), d, slopes + j);
  }
  std::fill(weights + visible, weights + extent, 0.0f);
  std::fill(slopes + visible, slopes + extent, 0.0f);
}

void accumulate_one_by_one(const DifferentiateTile& tile, const Gradients& scores) {
  const Index width = padded(tile.head_dim);
  for (Index i = 0; i < tile.query_count; ++i)
    for (Index j = 0; j < tile.diagonal.visible_keys(i, tile.key_count); ++j) {
      const float p = scores.weights[i * kSlopeStride + j];
      const float ds = scores.slopes[i * kSlopeStride + j];
      if (tile.dk != nullptr) {
        add_row(ds, tile.query_rows + i * width, width, tile.dk + j * tile.dk_step * width);
        add_row(p, tile.dout_rows + i * width, width, tile.dv + j * tile.dk_step * width);
      }
      if (tile.dq != nullptr) add_row(ds, tile.key_rows + j * width, width, tile.dq + i * tile.dq_step * width);
    }
}

void accumulate_dk_dv(const DifferentiateTile& tile, const Gradients& scores) {
  const Index width = padded(tile.head_dim);
  for (Index j = 0; j < tile.key_count; j += kRows) {
    const Index m = std::min(kRows, tile.key_count - j);
    const Index first = tile.diagonal.first_query(j, tile.query_count);  // rows before it see none of these keys
    const Index depth = tile.query_count - first;
    if (depth == 0) continue;
    const Index offset = first * kSlopeStride + j;
    multiply_rows<1, kSlopeStride>(m, scores.weights + offset, tile.dout_rows + first * width, width, depth,
                                   tile.dv + j * tile.dk_step * width, tile.dk_step * width);
    multiply_rows<1, kSlopeStride>(m, scores.slopes + offset, tile.query_rows + first * width, width, depth,
                                   tile.dk + j * tile.dk_step * width, tile.dk_step * width);
  }
}

void differentiate(const DifferentiateTile& tile) {
  const Index width = padded(tile.head_dim);
  const Gradients scores{tile.scratch, tile.scratch + kBackwardQueries * kSlopeStride};
  const Index column_count = round_up(tile.key_count, kColumns);
  for (Index j = 0; j < tile.key_count; j += kColumns)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      if (j >= tile.diagonal.visible_keys(i + m - 1, tile.key_count)) continue;
      const Index panel = i / kRows * kPanel * tile.head_dim;
      const Index score = i * kSlopeStride + j;
      multiply_columns(m, tile.queries + panel, tile.keys + j * tile.head_dim, tile.head_dim, scores.weights + score,
                       kSlopeStride);
      multiply_columns(m, tile.dout + panel, tile.values + j * tile.head_dim, tile.head_dim, scores.slopes + score,
                       kSlopeStride);
    }
  for (Index i = 0; i < tile.query_count; ++i)
    differentiate_row(scores.weights + i * kSlopeStride, scores.slopes + i * kSlopeStride,
                      tile.diagonal.visible_keys(i, tile.key_count), column_count, tile.lse_log2[i], tile.delta[i]);
  if (!tile.finite && !tile.diagonal.hides_none(tile.key_count)) return accumulate_one_by_one(tile, scores);
  if (tile.dk != nullptr) accumulate_dk_dv(tile, scores);
  if (tile.dq != nullptr)
    for (Index i = 0; i < tile.query_count; i += kRows) {
      const Index m = std::min(kRows, tile.query_count - i);
      multiply_rows<kSlopeStride, 1>(m, scores.slopes + i * kSlopeStride, tile.key_rows, width,
                                     tile.diagonal.visible_keys(i + m - 1, tile.key_count),
                                     tile.dq + i * tile.dq_step * width, tile.dq_step * width);
    }
}

Index panel_floats(Index head_dim) { return kBackwardQueries / kRows * kPanel * head_dim; }
Index column_floats(Index head_dim) { return kBackwardKeys * head_dim; }

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

Tiles make_tiles() {
  Tiles tiles;
  tiles.name = ANNULUS_TARGET == ANNULUS_AVX512 ? "avx512"
               : ANNULUS_TARGET == ANNULUS_AVX2 ? "avx2"
               : ANNULUS_TARGET == ANNULUS_NEON ? "neon"
                                                : "portable";
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
                    .score_bytes = 2 * kBackwardQueries * kSlopeStride * 4,
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
  if ((supported & HWY_AVX3) != 0) found.push_back(N_AVX3::make_tiles());
#endif
#if (HWY_TARGETS & HWY_AVX2) && HWY_STATIC_TARGET != HWY_AVX2
  if ((supported & HWY_AVX2) != 0) found.push_back(N_AVX2::make_tiles());
#endif
  found.push_back(HWY_NAMESPACE::make_tiles());  // the baseline
  return found;
}

}  // namespace annulus::cpu
#endif
