// On Highway: one source, compiled once per instruction set and chosen at run time. Rows are taken several at a time,
// so that what they share stays in registers.
#include "reference/row_sums.h"

// Vectors whose length is not known to the compiler cannot stand in arrays; the oldest sets gain little here.
#if defined(__aarch64__)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reference/row_sums.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::reference {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class Real>
HWY_INLINE const Real* row_of(const ListedRows<Real>& list, std::size_t i) {
  return list.matrix + static_cast<std::size_t>(list.rows[i]) * list.columns;
}

template <class Real>
constexpr std::size_t kSumLanes = 64 / sizeof(Real);
template <class Real>
using SumTag = hn::CappedTag<Real, kSumLanes<Real>>;
template <class Real>
constexpr std::size_t kSumVectors = kSumLanes<Real> / hn::MaxLanes(SumTag<Real>());

// The sums of kRows dot products over whole lanes, beginning with row i; returns the number of columns done.
template <std::size_t kRows, class Real>
HWY_INLINE std::size_t sum_lanes(const Real* x, const ListedRows<Real>& list, std::size_t i,
                                 hn::Vec<SumTag<Real>> (&sum)[kRows][kSumVectors<Real>]) {
  const SumTag<Real> d;
  constexpr std::size_t kLanes = hn::MaxLanes(SumTag<Real>());
  const Real* row[kRows];
  for (std::size_t r = 0; r < kRows; ++r) {
    row[r] = row_of(list, i + r);
    for (auto& vector : sum[r]) vector = hn::Zero(d);
  }
  std::size_t column = 0;
  for (; column + kSumLanes<Real> <= list.columns; column += kSumLanes<Real>)
    for (std::size_t v = 0; v < kSumVectors<Real>; ++v) {
      const auto left = hn::LoadU(d, x + column + v * kLanes);
      for (std::size_t r = 0; r < kRows; ++r)
        sum[r][v] = hn::Add(sum[r][v], hn::Mul(left, hn::LoadU(d, row[r] + column + v * kLanes)));
    }
  return column;
}

template <class Real>
HWY_INLINE Real dot_rest(const Real* x, const ListedRows<Real>& list, std::size_t i, std::size_t column) {
  const Real* row = row_of(list, i);
  Real sum = 0;
  for (; column < list.columns; ++column) sum += x[column] * row[column];
  return sum;
}

template <class Real>
HWY_INLINE void dot_one(const Real* x, const ListedRows<Real>& list, std::size_t i, Real* out) {
  const SumTag<Real> d;
  hn::Vec<SumTag<Real>> sum[1][kSumVectors<Real>];
  HWY_ALIGN Real lanes[kSumLanes<Real>];
  const std::size_t column = sum_lanes(x, list, i, sum);
  for (std::size_t v = 0; v < kSumVectors<Real>; ++v) hn::Store(sum[0][v], d, lanes + v * hn::Lanes(d));
  Real total = dot_rest(x, list, i, column);
  for (const Real lane : lanes) total += lane;
  out[i] = total;
}

#if HWY_TARGET == HWY_SCALAR
template <class Real>
constexpr std::size_t kDotRows = 1;
template <class Real>
HWY_INLINE void dot_block(const Real* x, const ListedRows<Real>& list, std::size_t i, Real* out) {
  dot_one(x, list, i, out);
}
#else
template <class Real>
constexpr std::size_t kDotRows = 4;

// Within every 16 bytes: row r, lane l becomes row l, lane r.
template <class D>
HWY_INLINE void transpose(D d, hn::Vec<D>& a, hn::Vec<D>& b) {
  const auto lower = hn::InterleaveLower(d, a, b);
  b = hn::InterleaveUpper(d, a, b);
  a = lower;
}
HWY_INLINE void transpose_rows(SumTag<double> d, hn::Vec<SumTag<double>>* rows) { transpose(d, rows[0], rows[1]); }
HWY_INLINE void transpose_rows(SumTag<float> d, hn::Vec<SumTag<float>>* rows) {
  const hn::RepartitionToWide<SumTag<float>> pairs;
  transpose(d, rows[0], rows[1]);
  transpose(d, rows[2], rows[3]);
  auto a = hn::BitCast(pairs, rows[0]), b = hn::BitCast(pairs, rows[1]);
  auto c = hn::BitCast(pairs, rows[2]), e = hn::BitCast(pairs, rows[3]);
  transpose(pairs, a, c);
  transpose(pairs, b, e);
  rows[0] = hn::BitCast(d, a), rows[1] = hn::BitCast(d, c), rows[2] = hn::BitCast(d, b), rows[3] = hn::BitCast(d, e);
}

// The lanes of several rows come together side by side.
template <class Real>
HWY_INLINE void dot_block(const Real* x, const ListedRows<Real>& list, std::size_t i, Real* out) {
  constexpr std::size_t kRows = kDotRows<Real>;
  constexpr std::size_t kTogether = 16 / sizeof(Real);
  const SumTag<Real> d;
  const hn::CappedTag<Real, kTogether> of_rows;
  hn::Vec<SumTag<Real>> sum[kRows][kSumVectors<Real>];
  const std::size_t column = sum_lanes(x, list, i, sum);
  const bool rest = column < list.columns;
  Real rests[kRows];
  for (std::size_t r = 0; rest && r < kRows; ++r) rests[r] = dot_rest(x, list, i + r, column);
  for (std::size_t first = 0; first < kRows; first += kTogether) {
    HWY_ALIGN Real lanes[kTogether][kSumLanes<Real>];  // [l % kTogether][l / kTogether] of kTogether rows
    for (std::size_t v = 0; v < kSumVectors<Real>; ++v) {
      hn::Vec<SumTag<Real>> rows[kTogether];
      for (std::size_t r = 0; r < kTogether; ++r) rows[r] = sum[first + r][v];
      transpose_rows(d, rows);
      for (std::size_t r = 0; r < kTogether; ++r) hn::Store(rows[r], d, lanes[r] + v * hn::MaxLanes(d));
    }
    auto totals = rest ? hn::LoadU(of_rows, rests + first) : hn::Zero(of_rows);
    for (std::size_t l = 0; l < kSumLanes<Real>; ++l)
      totals = hn::Add(totals, hn::Load(of_rows, lanes[l % kTogether] + l / kTogether * kTogether));
    hn::StoreU(totals, of_rows, out + i + first);
  }
}
#endif

template <class Real>
HWY_INLINE void dot_all(const Real* x, const ListedRows<Real>& list, Real* out) {
  std::size_t i = 0;
  if (list.columns < kSumLanes<Real>)  // no whole lanes, and a sum that begins with 0 does not notice zeros
    for (; i < list.count; ++i) out[i] = dot_rest(x, list, i, 0);
  for (; i + kDotRows<Real> <= list.count; i += kDotRows<Real>) dot_block(x, list, i, out);
  for (; i < list.count; ++i) dot_one(x, list, i, out);
}

// kVectors vectors of y, which stay in registers while all rows pass.
template <std::size_t kVectors, class D, class Real>
HWY_INLINE void add_block(D d, const Real* a, const ListedRows<Real>& list, std::size_t column, Real* y) {
  using V = hn::Vec<D>;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  V sum[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) sum[v] = hn::LoadU(d, y + column + v * kLanes);
  for (std::size_t i = 0; i < list.count; ++i) {
    const V factor = hn::Set(d, a[i]);
    const Real* row = row_of(list, i) + column;
    for (std::size_t v = 0; v < kVectors; ++v)
      sum[v] = hn::Add(sum[v], hn::Mul(factor, hn::LoadU(d, row + v * kLanes)));
  }
  for (std::size_t v = 0; v < kVectors; ++v) hn::StoreU(sum[v], d, y + column + v * kLanes);
}

// As many columns from `column` on as blocks of kVectors vectors can take; returns where they end.
template <std::size_t kVectors, class D, class Real>
HWY_INLINE std::size_t add_blocks(D d, const Real* a, const ListedRows<Real>& list, std::size_t column, Real* y) {
  constexpr std::size_t kWidth = kVectors * hn::MaxLanes(D());
  for (; column + kWidth <= list.columns; column += kWidth) add_block<kVectors>(d, a, list, column, y);
  return column;
}

template <class Real>
HWY_INLINE void add_all(const Real* a, const ListedRows<Real>& list, Real* y) {
  const hn::ScalableTag<Real> d;
  std::size_t column = add_blocks<8>(d, a, list, 0, y);
  column = add_blocks<4>(d, a, list, column, y);
  column = add_blocks<1>(d, a, list, column, y);
  column = add_blocks<1>(hn::CappedTag<Real, 8>(), a, list, column, y);
  column = add_blocks<1>(hn::CappedTag<Real, 4>(), a, list, column, y);
  add_blocks<1>(hn::CappedTag<Real, 1>(), a, list, column, y);
}

void dot_f64(const double* x, const ListedRows<double>& list, double* out) { dot_all(x, list, out); }
void dot_f32(const float* x, const ListedRows<float>& list, float* out) { dot_all(x, list, out); }
void add_f64(const double* a, const ListedRows<double>& list, double* y) { add_all(a, list, y); }
void add_f32(const float* a, const ListedRows<float>& list, float* y) { add_all(a, list, y); }

}  // namespace HWY_NAMESPACE
}  // namespace annulus::reference
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus::reference {

HWY_EXPORT(dot_f64);
HWY_EXPORT(dot_f32);
HWY_EXPORT(add_f64);
HWY_EXPORT(add_f32);

void dot_rows(const double* x, const ListedRows<double>& list, double* out) {
  HWY_DYNAMIC_DISPATCH(dot_f64)(x, list, out);
}
void dot_rows(const float* x, const ListedRows<float>& list, float* out) {
  HWY_DYNAMIC_DISPATCH(dot_f32)(x, list, out);
}
void add_rows(const double* a, const ListedRows<double>& list, double* y) { HWY_DYNAMIC_DISPATCH(add_f64)(a, list, y); }
void add_rows(const float* a, const ListedRows<float>& list, float* y) { HWY_DYNAMIC_DISPATCH(add_f32)(a, list, y); }

}  // namespace annulus::reference
#endif
