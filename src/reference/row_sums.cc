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

// kRows dot products, beginning with row i.
template <std::size_t kRows, class Real>
HWY_INLINE void dot_block(const Real* x, const ListedRows<Real>& list, std::size_t i, Real* out) {
  constexpr std::size_t kSumLanes = 64 / sizeof(Real);
  const hn::CappedTag<Real, kSumLanes> d;
  using V = hn::Vec<decltype(d)>;
  constexpr std::size_t kLanes = hn::MaxLanes(hn::CappedTag<Real, kSumLanes>());
  constexpr std::size_t kVectors = kSumLanes / kLanes;

  const Real* row[kRows];
  V sum[kRows][kVectors];
  for (std::size_t r = 0; r < kRows; ++r) {
    row[r] = row_of(list, i + r);
    for (std::size_t v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  std::size_t column = 0;
  for (; column + kSumLanes <= list.columns; column += kSumLanes)
    for (std::size_t v = 0; v < kVectors; ++v) {
      const V left = hn::LoadU(d, x + column + v * kLanes);
      for (std::size_t r = 0; r < kRows; ++r)
        sum[r][v] = hn::Add(sum[r][v], hn::Mul(left, hn::LoadU(d, row[r] + column + v * kLanes)));
    }

  HWY_ALIGN Real lanes[kRows][kSumLanes];
  for (std::size_t r = 0; r < kRows; ++r)
    for (std::size_t v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, lanes[r] + v * kLanes);
  Real total[kRows] = {};
  for (; column < list.columns; ++column)
    for (std::size_t r = 0; r < kRows; ++r) total[r] += x[column] * row[r][column];
  if (list.columns >= kSumLanes)  // a sum that begins with 0 does not notice zeros
    for (std::size_t l = 0; l < kSumLanes; ++l)
      for (std::size_t r = 0; r < kRows; ++r) total[r] += lanes[r][l];
  for (std::size_t r = 0; r < kRows; ++r) out[i + r] = total[r];
}

template <class Real>
HWY_INLINE void dot_all(const Real* x, const ListedRows<Real>& list, Real* out) {
  constexpr std::size_t kRows = 4;
  std::size_t i = 0;
  for (; i + kRows <= list.count; i += kRows) dot_block<kRows>(x, list, i, out);
  for (; i < list.count; ++i) dot_block<1>(x, list, i, out);
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
