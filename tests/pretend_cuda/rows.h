// What kernels of a pretend GPU share: rows of tensors as floats, and work that is queued on a stream.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <functional>
#include <vector>

#include "annulus/tensor.h"
#include "kernels/cuda/gradient_launch.h"
#include "numeric/half.h"
#include "pretend_cuda/memory.h"
#include "support/pretend_gpu.h"

namespace annulus::cuda {

inline void queue_on(cudaStream_t stream, std::function<void()> work) {
  support::PretendStream::at(stream).queue(std::move(work));
}

// A row begins `at` elements behind `base`, be it in another tensor.
inline void load_row(float* to, const void* base, std::int64_t at, std::int64_t count, DType dtype) {
  if (count == 0) return;
  pretend::require_aligned(base, size_of(dtype));
  const std::int64_t size = size_of(dtype);
  const auto* const row = pretend::reached(static_cast<const std::byte*>(base) + at * size, count * size);
  for (std::int64_t e = 0; e < count; ++e)
    to[e] = dtype == DType::fp32   ? reinterpret_cast<const float*>(row)[e]
            : dtype == DType::bf16 ? to_float(reinterpret_cast<const BFloat16*>(row)[e])
                                   : to_float(reinterpret_cast<const Float16*>(row)[e]);
}
inline void store_row(void* base, std::int64_t at, const float* from, float factor, std::int64_t count, DType dtype) {
  if (count == 0) return;
  pretend::require_aligned(base, size_of(dtype));
  const std::int64_t size = size_of(dtype);
  auto* const row = pretend::reached(static_cast<std::byte*>(base) + at * size, count * size);
  for (std::int64_t e = 0; e < count; ++e) {
    const float x = from[e] * factor;
    if (dtype == DType::fp32)
      reinterpret_cast<float*>(row)[e] = x;
    else if (dtype == DType::bf16)
      reinterpret_cast<BFloat16*>(row)[e] = from_float<BFloat16>(x);
    else
      reinterpret_cast<Float16*>(row)[e] = from_float<Float16>(x);
  }
}

inline std::int64_t offset(const Strides& stride, std::int64_t batch, std::int64_t head, std::int64_t position) {
  return batch * stride.batch + head * stride.head + position * stride.token;
}

// Rows that lie at + i * stride; each begins at a multiple of `alignment` bytes.
class Rows2d {
 public:
  Rows2d(const void* base, std::int64_t at, std::int64_t stride, std::int64_t count, std::int64_t width, DType dtype,
         std::int64_t alignment = 1)
      : width_(width), values_(static_cast<std::size_t>(count * width)) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = at + i * stride;
      pretend::require_aligned(static_cast<const std::byte*>(base) + row * size_of(dtype), alignment);
      load_row(values_.data() + i * width, base, row, width, dtype);
    }
  }
  const float* operator[](std::int64_t i) const { return values_.data() + i * width_; }

 private:
  std::int64_t width_;
  std::vector<float> values_;
};

// The rows that a part of a tile meets: keys, or of a tile of keys queries.
inline Rows2d rows_of_part(const void* data, const Strides& stride, const Tiling& tiling, const Tile& tile,
                           const TileBranch& part, std::int64_t head, std::int64_t width, DType dtype) {
  return {data,
          offset(stride, tile.batch, head, part.key_begin),
          tiling.branches[part.branch].dilation * stride.token,
          part.keys,
          width,
          dtype};
}

inline float dot(const float* a, const float* b, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;  // for the compiler to vectorise
  float sums[kLanes] = {}, sum = 0;
  std::int64_t e = 0;
  for (; e + kLanes <= count; e += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[e + lane] * b[e + lane];
  for (; e < count; ++e) sum += a[e] * b[e];
  for (const float lane : sums) sum += lane;
  return sum;
}
inline void add(float* to, float weight, const float* from, std::int64_t count) {
  for (std::int64_t e = 0; e < count; ++e) to[e] += weight * from[e];
}

// Where column `e` of a row lies among the sums of dq: as the threads of a warp add it (SumLayout, AddSums).
inline std::int64_t sum_place(const SumLayout& layout, int row, std::int64_t width, std::int64_t e) {
  const std::int64_t column = e % 16, owner = column % 8 / 2;
  return layout.place(row, static_cast<int>(width), static_cast<int>(e / 16 * 16)) + owner * 4 + column / 8 * 2 +
         column % 2;
}

// Calls f(tile, stretch) for each tile, and sees to it that none waits for one that comes later. `arrivals`: of a tile.
template <class F>
void for_each_tile(const Launch& launch, int arrivals, F f) {
  Tiling tiling = launch.tiling;
  tiling.classes = pretend::reached(tiling.classes);
  tiling.anchors = pretend::reached(tiling.anchors);
  const Stretch* const stretches = pretend::reached(launch.stretches);
  int at = 0;
  for (std::int64_t index = 0; index < launch.tile_count; ++index) {
    at = find_stretch(stretches, launch.stretch_count, index, at);
    const Stretch& stretch = stretches[at];
    Tile tile;
    place(tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
    if (tile.wait_set != kNoSet &&
        pretend::reached(launch.sets)[tile.wait_set] < static_cast<unsigned>(tile.wait_count)) {
      std::fprintf(stderr, "pretend GPU: a tile waits for ones that come later\n");
      std::abort();
    }
    f(tiling, stretch, tile);
    if (tile.signal_set != kNoSet) pretend::reached(launch.sets)[tile.signal_set] += static_cast<unsigned>(arrivals);
  }
}

// Rows of a tile's run that no branch covers: f(position).
template <class F>
void for_uncovered(const Tiling& tiling, const Tile& tile, F f) {
  for (int i = 0; tile.is_last && i < tiling.shape.query_rows; ++i)
    for (int e = 0; e < tile.step; ++e) {
      const std::int64_t position = tile.clear_begin + static_cast<std::int64_t>(i) * tile.stride + e;
      if (position < tile.cell_end && e != tile.position - tile.clear_begin) f(position);
    }
}

// Row by row, without tiles: the group of a position in a branch.
struct RowGroup {
  std::int64_t first = 0, step = 1, count = 0, own = 0, zero_keys = 0;

  RowGroup(const RowLaunch& p, int branch, int head, std::int64_t position) {
    const std::int64_t taken = pretend::reached(p.classes)[std::int64_t{branch} * p.common.heads + head];
    if (taken == kNoClass) return;
    const std::int64_t* const documents = pretend::reached(p.documents);
    int document = 0;
    while (document + 1 < p.document_count && documents[document + 1] <= position) ++document;
    const std::int64_t begin = documents[document], length = documents[document + 1] - begin;
    const std::int64_t dilation = pretend::reached(p.dilations)[branch], whole = pretend::reached(p.segments)[branch];
    const std::int64_t segment_begin = (position - begin) / whole * whole;
    const std::int64_t segment = std::min(whole, length - segment_begin);
    const std::int64_t at = position - begin - segment_begin, own_class = at % dilation;
    if (taken != kEveryClass && taken != own_class) return;
    count = 1 + (segment - 1 - own_class) / dilation;
    first = begin + segment_begin + own_class;
    step = count > 1 ? dilation : 0;
    own = at / dilation;
    if (p.padded && segment < whole)
      zero_keys = std::max<std::int64_t>(1 + (std::min(whole, length) - 1) / dilation - count, 0);
  }
};

}  // namespace annulus::cuda
