// The forward kernel for every GPU with tensor cores from sm_80 on, every type and head sizes up to 256.
//
// Four warps, 32 query rows each (16 where accumulators are wide). Blocks of keys and values go through two slots of
// shared memory: one is multiplied while the next one arrives. Head sizes are filled up with zeros in shared memory.
// Tiles, sweeps and state are those of tiling.h; blocks take tiles in order, as the sets demand.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/products_mma.cuh"

namespace annulus::cuda::mma {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;

// Two tiles of 16 rows a warp share what it reads of keys and values; beyond 128 elements registers allow only one.
ANNULUS_HOST_DEVICE constexpr int row_tiles(int padded_dim) { return padded_dim <= 128 ? 2 : 1; }
ANNULUS_HOST_DEVICE constexpr int query_rows(int padded_dim) { return kWarps * 16 * row_tiles(padded_dim); }

// Queries, and two slots of keys and values; a row ends in a gap of 16 bytes.
ANNULUS_HOST_DEVICE constexpr int shared_bytes(int element_bytes, int padded_dim, int keys) {
  return (query_rows(padded_dim) + 4 * keys) * (element_bytes * padded_dim + 16);
}
// Keys a block: as many as let two blocks share a multiprocessor of sm_90 (227 KiB), and as registers hold.
ANNULUS_HOST_DEVICE constexpr int key_rows(int element_bytes, int padded_dim) {
  int keys = element_bytes == 4 && padded_dim > 64 ? 32 : 64;
  while (keys > 16 && shared_bytes(element_bytes, padded_dim, keys) > 113 * 1024) keys /= 2;
  return keys;
}

template <class T, int kDim>
struct Layout {
  static constexpr int kTiles = row_tiles(kDim);
  static constexpr int kQueryRows = query_rows(kDim);
  static constexpr int kKeys = key_rows(sizeof(T), kDim);
  static constexpr int kRow = kRowElements<T, kDim>;
  static constexpr int kQueryElements = kQueryRows * kRow;
  static constexpr int kBlockElements = kKeys * kRow;
  static constexpr int kElements = kQueryElements + 4 * kBlockElements;
  static constexpr int kBytes = kElements * static_cast<int>(sizeof(T));
  static_assert(kBytes == shared_bytes(sizeof(T), kDim, kKeys));
};

// Calls f(row, i) for every i in [0, width) of every row in [0, rows), dealt to the threads of a block in order.
template <class F>
__device__ __forceinline__ void for_each_dealt(int rows, int width, F f) {
  const int rows_on = kThreads / width, on = kThreads % width;  // from one of a thread's turns to the next
  int row = static_cast<int>(threadIdx.x) / width, i = static_cast<int>(threadIdx.x) % width;
  while (row < rows) {
    f(row, i);
    row += rows_on;
    i += on;
    if (i >= width) {
      i -= width;
      ++row;
    }
  }
}

// `count` rows from `from` on to shared memory; of the `most` rows there the others become zero.
template <class T, int kRow>
__device__ __forceinline__ void load_rows(T* to, const T* from, std::int64_t stride, int count, int most, int head_dim,
                                          bool aligned) {
  constexpr int kUnit = 16 / static_cast<int>(sizeof(T));
  if (aligned) {
    for_each_dealt(most, head_dim / kUnit, [&](int row, int chunk) {
      const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to + row * kRow + chunk * kUnit));
      const T* source = row < count ? from + row * stride + chunk * kUnit : from;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
                   "r"(row < count ? 16 : 0)
                   : "memory");
    });
  } else {
    for_each_dealt(most, head_dim, [&](int row, int element) {
      to[row * kRow + element] = row < count ? from[row * stride + element] : static_cast<T>(0.0f);
    });
  }
}
__device__ __forceinline__ void commit_loads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_loads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A place in the stream of key blocks of a tile's branches.
struct Place {
  int branch = 0;
  int block = 0;
  __device__ void advance(const Tile& tile) {
    if (++block < tile.branches[branch].blocks) return;
    block = 0;
    ++branch;
  }
};

template <class T, int kDim>
class Attend {
  using Shape = Layout<T, kDim>;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kTiles = Shape::kTiles;
  using Product = Products<T, kDim, kKeys, kTiles>;

 public:
  __device__ Attend(const Launch& launch, const Tile& tile, T* shared, bool aligned)
      : launch_(launch),
        tile_(tile),
        queries_(shared),
        blocks_(shared + Shape::kQueryElements),
        aligned_(aligned),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        row_(warp_ * 16 * kTiles + lane_ / 4) {}

  __device__ void run() {
    const T* q = static_cast<const T*>(launch_.q) + tile_.batch * launch_.q_stride.batch +
                 tile_.head * launch_.q_stride.head + tile_.position * launch_.q_stride.token;
    start();
    Place loaded, here;
    if (tile_.total_blocks > 0) {
      load_rows<T, Shape::kRow>(queries_, q, tile_.stride * launch_.q_stride.token, tile_.rows, Shape::kQueryRows,
                                launch_.head_dim, aligned_);
      load_block(loaded, 0);
    }
    commit_loads();
    for (int i = 0; i < tile_.total_blocks; ++i, here.advance(tile_)) {
      loaded.advance(tile_);
      if (i + 1 < tile_.total_blocks) load_block(loaded, (i + 1) % 2);
      commit_loads();
      wait_loads<1>();
      __syncthreads();
      attend_block(here, i % 2);
      __syncthreads();
    }
    finish();
  }

 private:
  __device__ T* keys(int slot) { return blocks_ + 2 * slot * Shape::kBlockElements; }
  __device__ T* values(int slot) { return keys(slot) + Shape::kBlockElements; }

  __device__ void load_block(const Place& place, int slot) {
    const TileBranch& part = tile_.branches[place.branch];
    const std::int64_t dilation = launch_.tiling.branches[part.branch].dilation;
    const std::int64_t kv_head = tile_.head / launch_.sharers;
    const std::int64_t position = part.key_begin + dilation * place.block * kKeys;
    const int count = min(kKeys, part.keys - place.block * kKeys);
    const T* k = static_cast<const T*>(launch_.k) + tile_.batch * launch_.k_stride.batch +
                 kv_head * launch_.k_stride.head + position * launch_.k_stride.token;
    const T* v = static_cast<const T*>(launch_.v) + tile_.batch * launch_.v_stride.batch +
                 kv_head * launch_.v_stride.head + position * launch_.v_stride.token;
    load_rows<T, Shape::kRow>(keys(slot), k, dilation * launch_.k_stride.token, count, kKeys, launch_.head_dim,
                              aligned_);
    load_rows<T, Shape::kRow>(values(slot), v, dilation * launch_.v_stride.token, count, kKeys, launch_.head_dim,
                              aligned_);
  }

  // A lane has two rows of every tile of 16; row r is 8 (r % 2) behind the first one of tile r / 2.
  static constexpr int kRows = 2 * kTiles;
  __device__ int tile_row(int r) const { return row_ + 16 * (r / 2) + 8 * (r % 2); }
  __device__ bool inside(int r) const { return tile_row(r) < tile_.rows; }
  __device__ std::int64_t state_row(int r) const {
    return tile_.state_row + static_cast<std::int64_t>(tile_.stride) * tile_row(r);
  }
  __device__ int column(int n) const { return 8 * n + lane_ % 4 * 2; }
  __device__ float& value(int r, int n, int c) { return o_[r / 2][n][r % 2 * 2 + c]; }
  __device__ void rescale(int r, float factor) {
    l_[r] *= factor;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      value(r, n, 0) *= factor;
      value(r, n, 1) *= factor;
    }
  }

  __device__ void start() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) value(r, n, 0) = value(r, n, 1) = 0.0f;
      m_[r] = -INFINITY;
      l_[r] = 0.0f;
      if (!tile_.continues) continue;
      float2 sums = {0.0f, 0.0f};
      if (inside(r) && lane_ % 4 == 0) sums = __ldcg(launch_.state_sums + state_row(r));
      const float before = __shfl_sync(0xffffffffu, sums.y, lane_ & ~3);
      const float maximum = __shfl_sync(0xffffffffu, sums.x, lane_ & ~3);
      if (before == 0.0f) continue;
      m_[r] = maximum;
      l_[r] = sums.y;
      const float* from = launch_.state_values + state_row(r) * launch_.head_dim;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (column(n) + c < launch_.head_dim) value(r, n, c) = __ldcg(from + column(n) + c);
      if (tile_.is_last && lane_ % 4 == 0) launch_.state_sums[state_row(r)] = {0.0f, 0.0f};  // free again
    }
  }

  __device__ void attend_block(const Place& place, int slot) {
    float s[kTiles][kKeys / 8][4] = {};
    Product::scores(s, queries_ + warp_ * 16 * kTiles * Shape::kRow, keys(slot), lane_);
    const TileBranch& part = tile_.branches[place.branch];
    const int first_key = place.block * kKeys;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float(&own)[kKeys / 8][4] = s[r / 2];
      int limit = part.keys - 1;
      if (launch_.tiling.causal) limit = min(limit, part.first + part.step * tile_row(r));
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = own[n][r % 2 * 2 + c];
          x = first_key + column(n) + c > limit ? -INFINITY : x * launch_.scale_log2;
          top = fmaxf(top, x);
        }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      // Finite but for odd inputs: every row sees the first key of its group, so the first block has one for it.
      const float now = fmaxf(m_[r], top);
      if (__any_sync(0xffffffffu, now > m_[r])) rescale(r, m_[r] == now ? 1.0f : exp2f(m_[r] - now));
      m_[r] = now;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = own[n][r % 2 * 2 + c];
          x = std::is_same_v<T, float> ? exp2f(x - now) : ptx::exp2_approx(x - now);
          l_[r] += x;
        }
    }
    Product::add_values(o_, s, values(slot), lane_);
  }

  __device__ void finish() {
    bool bad = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      l_[r] += __shfl_xor_sync(0xffffffffu, l_[r], 1);
      l_[r] += __shfl_xor_sync(0xffffffffu, l_[r], 2);
      if (tile_.zero_keys > 0) {
        const float now = fmaxf(m_[r], 0.0f);
        rescale(r, exp2f(m_[r] - now));
        m_[r] = now;
        l_[r] += static_cast<float>(tile_.zero_keys) * exp2f(-now);
      }
      if (!inside(r)) continue;
      if (tile_.is_last)
        bad = !store_row(r) || bad;
      else
        store_state(r);
    }
    if (tile_.is_last) clear_uncovered();
    if (__any_sync(0xffffffffu, bad) && lane_ == 0) launch_.control->non_finite = 1;
    if (tile_.signal_set == kNoSet) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::arrive_global(launch_.sets + tile_.signal_set, 1);
  }

  __device__ T* out_row(std::int64_t position) const {
    return static_cast<T*>(launch_.out) + tile_.batch * launch_.out_stride.batch +
           tile_.head * launch_.out_stride.head + position * launch_.out_stride.token;
  }
  __device__ float* lse_row(std::int64_t position) const {
    return launch_.lse + (static_cast<std::int64_t>(tile_.batch) * launch_.heads + tile_.head) * launch_.tokens +
           position;
  }

  // Whether all of it was finite.
  __device__ bool store_row(int r) {
    const std::int64_t position = tile_.position + static_cast<std::int64_t>(tile_.stride) * tile_row(r);
    const float factor = l_[r] == 0.0f ? 0.0f : launch_.output_scale / l_[r];
    float odd = 0.0f;  // NaN as soon as anything is not finite
    T* to = out_row(position);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = value(r, n, c) * factor;
        odd += x * 0.0f;
        if (column(n) + c < launch_.head_dim) to[column(n) + c] = static_cast<T>(x);
      }
    if (launch_.lse != nullptr && lane_ % 4 == 0)
      *lse_row(position) = l_[r] == 0.0f
                               ? -INFINITY
                               : static_cast<float>(0.693147180559945309 * (static_cast<double>(m_[r]) + log2f(l_[r])));
    return odd == 0.0f;
  }

  __device__ void store_state(int r) {
    if (lane_ % 4 == 0) __stcg(launch_.state_sums + state_row(r), float2{m_[r], l_[r]});
    float* to = launch_.state_values + state_row(r) * launch_.head_dim;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (column(n) + c < launch_.head_dim) __stcg(to + column(n) + c, value(r, n, c));
  }

  // Rows between the tile's own, if nothing covers them.
  __device__ void clear_uncovered() {
    const int own = tile_.position - tile_.clear_begin;
    for (int i = warp_; i < Shape::kQueryRows * tile_.step; i += kWarps) {
      const std::int64_t position =
          tile_.clear_begin + static_cast<std::int64_t>(tile_.stride) * (i / tile_.step) + i % tile_.step;
      if (i % tile_.step == own || position >= tile_.cell_end) continue;
      for (int e = lane_; e < launch_.head_dim; e += 32) out_row(position)[e] = static_cast<T>(0.0f);
      if (launch_.lse != nullptr && lane_ == 0) *lse_row(position) = -INFINITY;
    }
  }

  const Launch& launch_;
  const Tile& tile_;
  T* queries_;
  T* blocks_;
  bool aligned_;
  int lane_, warp_, row_;
  float o_[kTiles][kDim / 8][4];
  float m_[kRows], l_[kRows];  // m in log2 units; l of this lane's columns
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ Launch launch, const bool aligned) {
  extern __shared__ __align__(16) std::uint8_t raw[];
  __shared__ Tile tile;
  __shared__ bool done;
  T* shared = reinterpret_cast<T*>(raw);
  for (int i = static_cast<int>(threadIdx.x); i < Layout<T, kDim>::kElements; i += kThreads)
    shared[i] = static_cast<T>(0.0f);  // columns beyond head_dim stay so
  int at = 0;                          // stretch; thread 0's
  for (;;) {
    if (threadIdx.x == 0) {
      const auto index = static_cast<std::int64_t>(atomicAdd(&launch.control->next_tile, 1ull));
      done = index >= launch.tile_count;
      if (!done) {
        at = find_stretch(launch.stretches, launch.stretch_count, index, at);
        const Stretch& stretch = launch.stretches[at];
        locate(launch.tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
        if (tile.wait_set != kNoSet)
          ptx::wait_global(launch.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
      }
    }
    __syncthreads();
    if (done) return;
    Attend<T, kDim>(launch, tile, shared, aligned).run();
    __syncthreads();
  }
}

}  // namespace annulus::cuda::mma
