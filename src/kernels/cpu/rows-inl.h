// Rows between memory and scratch, compiled once per instruction set: converting, packing, storing, adding.
//
// NaN payloads are made canonical while packing, since exp2 adds integers to the bits of its argument.
#if defined(ANNULUS_KERNELS_CPU_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)  // once per target
#ifdef ANNULUS_KERNELS_CPU_ROWS_INL_H
#undef ANNULUS_KERNELS_CPU_ROWS_INL_H
#else
#define ANNULUS_KERNELS_CPU_ROWS_INL_H
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/cpu/products-inl.h"
#include "kernels/cpu/tiles.h"
#include "numeric/half.h"

#if ANNULUS_TARGET != ANNULUS_SKIPPED

HWY_BEFORE_NAMESPACE();
namespace annulus::cpu {
namespace HWY_NAMESPACE {

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

// Rows of one head lie far apart, where no hardware prefetcher looks: asked for a few rows ahead they arrive in time.
constexpr Index kAhead = 8;
template <class T>
HWY_INLINE void prefetch_row(const T* row, Index head_dim) {
  for (Index k = 0; k < head_dim; k += 64 / static_cast<Index>(sizeof(T))) hwy::Prefetch(row + k);
}

// Rows i of the source, kBlock of them side by side (kWidth floats) for every k; lanes beyond the rows are 0.
template <Index kBlock, Index kWidth, class T>
void transpose_rows(const T* source, Index stride, Index count, Index head_dim,
                    std::pair<float, float*> scaled_target) {
  auto [scale, target] = scaled_target;
  for (Index block = 0; block < count; block += kBlock, target += kWidth * head_dim) {
    const Index rows = std::min(kBlock, count - block);
    for (Index i = 0; i < kWidth; i += kStep) {
      const T* row[kStep];
      for (Index u = 0; u < kStep; ++u) {
        row[u] = i + u < rows ? source + (block + i + u) * stride : nullptr;
        if (block + i + u + kAhead < count) prefetch_row(source + (block + i + u + kAhead) * stride, head_dim);
      }
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
    if (i + kAhead < count) prefetch_row(source + kAhead * stride, head_dim);
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

void pack_panels(const SourceRows& rows, float scale, float* packed) {
  pack_transposed<kRows, kPanel>(rows, scale, packed);
}
void pack_columns(const SourceRows& rows, float* packed) { pack_transposed<kColumns, kColumns>(rows, 1.0f, packed); }

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
      for (; k < target.head_dim; ++k)
        data[k] = from_float<std::remove_pointer_t<decltype(data)>>(factor[i] * source[k]);
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

// Sums over k one after the other, as multiply_block does: where a row sees one key alone, Delta then equals dP to the
// last bit, and dS is 0 as it should be.
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
    for (Index k = 0; k < a.head_dim; ++k)
      sum = hn::MulAdd(hn::Load(d, x + k * kLanes), hn::Load(d, y + k * kLanes), sum);
    hn::Store(sum, d, dots);
    std::copy_n(dots, count, result + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace annulus::cpu
HWY_AFTER_NAMESPACE();

#endif  // a target that we compile
#endif  // once per target
