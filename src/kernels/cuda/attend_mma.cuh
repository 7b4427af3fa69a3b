// The forward kernel for every GPU with tensor cores from sm_80 on, every type and head sizes up to 256.
//
// Four or eight warps, 32 query rows each (16 where accumulators are wide). One block of keys and values is multiplied
// while the next one arrives in shared memory. Head sizes are filled up with zeros in shared memory. Tiles, sweeps and
// state are those of tiling.h; blocks take tiles in order, as the sets demand.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/loads_mma.cuh"
#include "kernels/cuda/products_mma.cuh"
#include "kernels/cuda/tiles_mma.h"
#include "kernels/softmax_state.h"

namespace annulus::cuda::mma {

template <class T, int kDim, bool kWide>
struct Layout {
  static constexpr bool kSplit = std::is_same_v<T, float>;
  static constexpr MmaConfig kConfig = make_config(kSplit, kDim, kWide);
  static constexpr int kThreads = kConfig.threads();
  using Operand = std::conditional_t<kSplit, __half, T>;  // of the products
  static constexpr int kPlanes = kSplit ? 2 : 1;
  static constexpr int kTiles = kConfig.row_tiles();
  static constexpr int kQueryRows = kConfig.query_rows();
  static constexpr int kKeys = kConfig.key_rows();
  static constexpr int kRow = kRowElements<kDim>;
  static constexpr int kQueryPlane = kQueryRows * kRow;
  static constexpr int kBlock = kPlanes * kKeys * kRow;  // keys, or values
  static constexpr int kOperands = kPlanes * kQueryPlane + (kSplit ? 2 : 4) * kBlock;
  static constexpr int kRawRow = kDim + 4;  // of fp32 as it comes
  static constexpr int kBytes = kConfig.shared_bytes(kKeys);
  static_assert(kBytes == 2 * kOperands + (kSplit ? 4 * (2 * kKeys * kRawRow + kQueryRows + 2 * kKeys) : 0));
};

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

template <class T, int kDim, bool kWide>
class Attend {
  using Shape = Layout<T, kDim, kWide>;
  using Operand = Shape::Operand;
  static constexpr bool kSplit = Shape::kSplit;
  static constexpr int kKeys = Shape::kKeys;
  static constexpr int kTiles = Shape::kTiles;

 public:
  __device__ Attend(const Launch& launch, const Tile& tile, std::uint8_t* shared, bool aligned)
      : launch_(launch),
        tile_(tile),
        queries_(reinterpret_cast<Operand*>(shared)),
        blocks_(queries_ + Shape::kPlanes * Shape::kQueryPlane),
        raw_(reinterpret_cast<T*>(queries_ + Shape::kOperands)),
        query_down_(reinterpret_cast<float*>(raw_ + 2 * kKeys * Shape::kRawRow)),
        aligned_(aligned),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        row_(warp_ * 16 * kTiles + lane_ / 4) {}

  __device__ void run() {
    start();
    Place loaded, here;
    if (tile_.total_blocks > 0) {
      load_queries();
      load_block(loaded, 0);
    }
    ptx::commit_copies();
    for (int i = 0; i < tile_.total_blocks; ++i, here.advance(tile_)) {
      loaded.advance(tile_);
      const bool more = i + 1 < tile_.total_blocks;
      if constexpr (kSplit) {  // one block is multiplied while the next one arrives as it is
        ptx::wait_copies<0>();
        __syncthreads();
        split_block();
        __syncthreads();
        if (more) load_block(loaded, 0);
        ptx::commit_copies();
        attend_block(here, 0);
      } else {
        if (more) load_block(loaded, (i + 1) % 2);
        ptx::commit_copies();
        ptx::wait_copies<1>();
        __syncthreads();
        attend_block(here, i % 2);
        __syncthreads();
      }
    }
    finish();
  }

 private:
  __device__ Operand* keys(int slot) { return blocks_ + 2 * slot * Shape::kBlock; }
  __device__ Operand* values(int slot) { return keys(slot) + Shape::kBlock; }
  // fp32: what undoes the scales of rows.
  __device__ float* key_down() { return query_down_ + Shape::kQueryRows; }
  __device__ float* value_down() { return key_down() + kKeys; }

  // Rows of queries or keys from the first one on.
  struct Run {
    const T* from;
    std::int64_t stride;
  };
  __device__ static Run rows_at(const void* data, const RowRun& rows) {
    return {static_cast<const T*>(data) + rows.at, rows.stride};
  }
  __device__ Run rows_at(const void* data, const Strides& stride, std::int64_t head, std::int64_t position,
                         std::int64_t step) const {
    return {static_cast<const T*>(data) + tile_.batch * stride.batch + head * stride.head + position * stride.token,
            step * stride.token};
  }

  __device__ void load_queries() {
    const auto [q, stride] = launch_.meetings.tiles != nullptr
                                 ? rows_at(launch_.q, launch_.meetings.tiles[tile_.meeting].x)
                                 : rows_at(launch_.q, launch_.q_stride, tile_.head, tile_.position, tile_.stride);
    if constexpr (kSplit)
      split_rows<kDim, Shape::kRow, Shape::kThreads>(queries_, query_down_, q, stride, tile_.rows, Shape::kQueryRows,
                                                     launch_.head_dim, aligned_);
    else
      load_rows<T, Shape::kRow, Shape::kThreads>(queries_, q, stride, tile_.rows, Shape::kQueryRows, launch_.head_dim,
                                                 aligned_);
  }

  __device__ void load_block(const Place& place, int slot) {
    const TileBranch& part = tile_.branches[place.branch];
    Run k, v;
    if (launch_.meetings.tiles != nullptr) {
      const MeetingPart& met = launch_.meetings.parts[part.branch];
      k = rows_at(launch_.k, met.u);
      v = rows_at(launch_.v, met.w);
    } else {
      const int kv_head = tile_.head / launch_.sharers, dilation = launch_.tiling.branches[part.branch].dilation;
      k = rows_at(launch_.k, launch_.k_stride, kv_head, part.key_begin, dilation);
      v = rows_at(launch_.v, launch_.v_stride, kv_head, part.key_begin, dilation);
    }
    const int first = place.block * kKeys, count = min(kKeys, part.keys - first);
    const auto load = [&](T* to, auto row, const Run& rows) {
      load_rows<T, row.value, Shape::kThreads>(to, rows.from + first * rows.stride, rows.stride, count, kKeys,
                                               launch_.head_dim, aligned_);
    };
    if constexpr (kSplit) {
      const std::integral_constant<int, Shape::kRawRow> row;
      load(raw_, row, k);
      load(raw_ + kKeys * Shape::kRawRow, row, v);
    } else {
      const std::integral_constant<int, Shape::kRow> row;
      load(keys(slot), row, k);
      load(values(slot), row, v);
    }
  }

  __device__ void split_block() {
    split_rows<kDim, Shape::kRow, Shape::kThreads>(keys(0), key_down(), raw_, Shape::kRawRow, kKeys, kKeys, kDim, true);
    split_rows<kDim, Shape::kRow, Shape::kThreads>(values(0), value_down(), raw_ + kKeys * Shape::kRawRow,
                                                   Shape::kRawRow, kKeys, kKeys, kDim, true);
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
      if (before == 0.0f && maximum != kLowest) continue;
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
    const Operand* queries = queries_ + warp_ * 16 * kTiles * Shape::kRow;
    if constexpr (kSplit)
      SplitProducts<kDim, kKeys, kTiles>::scores(s, queries, Shape::kQueryPlane, keys(slot), lane_);
    else
      Products<T, kDim, kKeys, kTiles>::scores(s, queries, keys(slot), lane_);
    const TileBranch& part = tile_.branches[place.branch];
    const int first_key = place.block * kKeys;
    float down[kRows];  // fp32: of the weights
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float(&own)[kKeys / 8][4] = s[r / 2];
      int limit = part.keys - 1;
      if (launch_.tiling.causal) limit = min(limit, part.first + part.step * tile_row(r));
      const float scale = kSplit ? launch_.scale_log2 * query_down_[tile_row(r)] : launch_.scale_log2;
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = own[n][r % 2 * 2 + c];
          const float factor = kSplit ? scale * key_down()[column(n) + c] : scale;
          x = first_key + column(n) + c > limit ? -INFINITY : x * factor;
          top = fmaxf(top, x);
        }
      top = largest_of_row(top);
      // Finite but for odd inputs: every row sees the first key of its group, so the first block has one for it. Only
      // where ranks meet may a row see nothing of a block.
      const float now = fmaxf(m_[r], top), base = now == -INFINITY ? 0.0f : now;
      if (__any_sync(0xffffffffu, now > m_[r])) rescale(r, m_[r] == now ? 1.0f : exp2f(m_[r] - now));
      m_[r] = now;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = own[n][r % 2 * 2 + c];
          x = kSplit ? exp2f(x - base) : ptx::exp2_approx(x - base);
          l_[r] += x;
        }
      if constexpr (kSplit) down[r] = scale_weights(own, r);
    }
    if constexpr (kSplit)
      SplitProducts<kDim, kKeys, kTiles>::add_values(o_, s, down, values(slot), lane_);
    else
      Products<T, kDim, kKeys, kTiles>::add_values(o_, s, values(slot), lane_);
  }

  __device__ static float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }

  // fp32: the scales of values go into the weights, and those are brought into range. A key that the row does not see
  // has weight 0, so that its scale does no harm.
  __device__ float scale_weights(float (&own)[kKeys / 8][4], int r) {
    float top = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = own[n][r % 2 * 2 + c];
        x *= value_down()[column(n) + c];
        top = fmaxf(top, x);
      }
    const RowScale scale(largest_of_row(top));
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) own[n][r % 2 * 2 + c] *= scale.up;
    return scale.down;
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
      // Every row sees a key of each branch of its tile (of meetings that is not known): all logits were -inf.
      if (m_[r] == -INFINITY && tile_.branch_count > 0 && launch_.meetings.tiles == nullptr) m_[r] = kLowest;
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
    const float factor = l_[r] != 0.0f ? launch_.output_scale / l_[r] : m_[r] == kLowest ? NAN : 0.0f;
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
    for (int i = warp_; i < Shape::kQueryRows * tile_.step; i += Shape::kConfig.warps) {
      const std::int64_t position =
          tile_.clear_begin + static_cast<std::int64_t>(tile_.stride) * (i / tile_.step) + i % tile_.step;
      if (i % tile_.step == own || position >= tile_.cell_end) continue;
      for (int e = lane_; e < launch_.head_dim; e += 32) out_row(position)[e] = static_cast<T>(0.0f);
      if (launch_.lse != nullptr && lane_ == 0) *lse_row(position) = -INFINITY;
    }
  }

  const Launch& launch_;
  const Tile& tile_;
  Operand* queries_;   // [plane][row][kRow]
  Operand* blocks_;    // [slot][keys, values][plane][row][kRow]
  T* raw_;             // fp32: [keys, values][row][kRawRow]
  float* query_down_;  // fp32: [row]; those of keys and values follow
  bool aligned_;
  int lane_, warp_, row_;
  float o_[kTiles][kDim / 8][4];
  float m_[kRows], l_[kRows];  // m in log2 units; l of this lane's columns
};

template <class T, int kDim, bool kWide>
__global__ void __launch_bounds__(Layout<T, kDim, kWide>::kThreads)
    forward(const __grid_constant__ Launch launch, const bool aligned) {
  extern __shared__ __align__(16) std::uint8_t raw[];
  __shared__ Tile tile;
  __shared__ bool done;
  for (int i = static_cast<int>(threadIdx.x); i < Layout<T, kDim, kWide>::kBytes / 4;
       i += Layout<T, kDim, kWide>::kThreads)
    reinterpret_cast<std::uint32_t*>(raw)[i] = 0;  // columns beyond head_dim stay so
  int at = 0;                                      // stretch; thread 0's
  for (;;) {
    if (threadIdx.x == 0) {
      const auto index = static_cast<std::int64_t>(atomicAdd(&launch.control->next_tile, 1ull));
      done = index >= launch.tile_count;
      if (!done && launch.meetings.tiles != nullptr) {
        meet(launch.meetings, static_cast<int>(index), Layout<T, kDim, kWide>::kKeys, tile);
      } else if (!done) {
        at = find_stretch(launch.stretches, launch.stretch_count, index, at);
        const Stretch& stretch = launch.stretches[at];
        locate(launch.tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
        if (tile.wait_set != kNoSet)
          ptx::wait_global(launch.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
      }
    }
    __syncthreads();
    if (done) return;
    Attend<T, kDim, kWide>(launch, tile, raw, aligned).run();
    __syncthreads();
  }
}

}  // namespace annulus::cuda::mma
