// Backward for every GPU with tensor cores from sm_80 on, every type and head sizes up to 256.
//
// One kernel in five parts. With x, y the rows of a tile and u, w those of a block:
//
//   a tile of queries    x = Q, y = dO, blocks u = K, w = V    dQ += dS K          (and Delta of eq. 8)
//   a tile of keys       x = K, y = V, blocks u = Q, w = dO    dK += dS^T Q, dV += P^T dO
//
// so S = x u^T, dP = y w^T, dS = P (dP - Delta) in all of them, and nothing is ever added up by two blocks: the same
// bits run after run. Four warps, 16 rows each; blocks go through two slots of shared memory, one multiplied while the
// next one arrives. Tiles, sweeps and state are those of tiling.h.
#pragma once

#include "kernels/cuda/backward_kernels.h"
#include "kernels/cuda/loads_mma.cuh"
#include "kernels/cuda/products_gradient_mma.cuh"

namespace annulus::cuda::mma::gradients {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kTileRows = kWarps * 16;
inline constexpr float kLog2E = 1.442695040888963407f;

ANNULUS_HOST_DEVICE constexpr int gradient_shared_bytes(int element_bytes, int padded_dim, int rows) {
  return (2 * kTileRows + 4 * rows) * (element_bytes * padded_dim + 16) + 4 * rows * 4;
}
// Rows a block: more do not pay, and wide heads leave no room for them.
ANNULUS_HOST_DEVICE constexpr int block_rows(int element_bytes, int padded_dim) {
  const int row_bytes = element_bytes * padded_dim;
  return row_bytes <= 128 ? 64 : row_bytes <= 512 ? 32 : 16;
}
// dk and dv in one pass, as far as registers hold both.
ANNULUS_HOST_DEVICE constexpr bool holds_both(int element_bytes, int padded_dim) {
  return element_bytes * padded_dim <= 256;
}

ANNULUS_HOST_DEVICE constexpr bool of_keys(Part part) { return part != Part::deltas && part != Part::dq; }

template <class T, int kDim>
struct GradientLayout {
  static constexpr int kRows = block_rows(sizeof(T), kDim);
  static constexpr int kRow = kRowElements<T, kDim>;
  static constexpr int kTileElements = kTileRows * kRow;
  static constexpr int kBlockElements = kRows * kRow;
  static constexpr int kElements = 2 * kTileElements + 4 * kBlockElements;
  static constexpr int kBytes = gradient_shared_bytes(sizeof(T), kDim, kRows);
};

// A place in the stream of blocks of a tile's branches.
struct Place {
  int branch = 0;
  int block = 0;
  __device__ void advance(const Tile& tile) {
    if (++block < tile.branches[branch].blocks) return;
    block = 0;
    ++branch;
  }
};

template <class T, int kDim, Part kPart>
class GradientWalk {
  using Shape = GradientLayout<T, kDim>;
  static constexpr int kRows = Shape::kRows;
  static constexpr bool kKeys = of_keys(kPart);
  static constexpr bool kFirst = kPart == Part::dq || kPart == Part::dk || kPart == Part::dk_dv;  // sums dS u
  static constexpr bool kSecond = kPart == Part::dv || kPart == Part::dk_dv;                      // sums P w
  static constexpr bool kNeedsDp = kPart != Part::dv;
  static constexpr int kSums = (kFirst ? 1 : 0) + (kSecond ? 1 : 0);
  using Product = Products<T, kDim, kRows>;

 public:
  __device__ GradientWalk(const GradientLaunch& launch, const Stretch* stretch, Tile& tile, T* shared, bool aligned)
      : g_(launch),
        launch_(launch.common),
        stretch_(stretch),
        tile_(tile),
        x_(shared),
        y_(x_ + Shape::kTileElements),
        blocks_(y_ + Shape::kTileElements),
        numbers_(reinterpret_cast<float*>(shared + Shape::kElements)),
        aligned_(aligned),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        row_(warp_ * 16 + lane_ / 4) {}

  __device__ void run() {
    const int own_head = tile_.head;  // of the tile's kind: take_head goes through query heads
    start();
    load_tile(own_head);
    if (meets()) {
      walk();
    } else if constexpr (kKeys) {
      for (int head = own_head * launch_.sharers; head < (own_head + 1) * launch_.sharers; ++head) {
        __syncthreads();
        if (threadIdx.x == 0) take_head(launch_.tiling, *stretch_, g_.causal, head, tile_);
        __syncthreads();
        walk();
      }
    } else {
      walk();
    }
    ptx::commit_copies();
    ptx::wait_copies<0>();
    finish(own_head);
  }

 private:
  __device__ T* u(int slot) { return blocks_ + 2 * slot * Shape::kBlockElements; }
  __device__ T* w(int slot) { return u(slot) + Shape::kBlockElements; }
  __device__ float* lse(int slot) { return numbers_ + 2 * slot * kRows; }
  __device__ float* delta(int slot) { return lse(slot) + kRows; }

  // Row `position` of a tensor of queries or keys, for a query head.
  __device__ static const T* place(const void* data, const Strides& stride, std::int64_t batch, std::int64_t head,
                                   std::int64_t position) {
    return static_cast<const T*>(data) + batch * stride.batch + head * stride.head + position * stride.token;
  }
  __device__ std::int64_t number_row(std::int64_t position) const {
    return (static_cast<std::int64_t>(tile_.batch) * launch_.heads + tile_.head) * launch_.tokens + position;
  }

  // Rows of queries or keys from the first one on.
  struct Run {
    const T* from;
    std::int64_t stride;
  };
  __device__ static Run rows_at(const void* data, const RowRun& rows) {
    return {static_cast<const T*>(data) + rows.at, rows.stride};
  }
  __device__ bool meets() const { return launch_.meetings.tiles != nullptr; }
  __device__ const MeetingTile& meeting() const { return launch_.meetings.tiles[tile_.meeting]; }
  __device__ const MeetingPart& met(const TileBranch& part) const { return launch_.meetings.parts[part.branch]; }

  __device__ void load_tile(int own_head) {
    if (tile_.rows == 0) return;
    const void* x = kKeys ? launch_.k : launch_.q;
    const void* y = kKeys ? launch_.v : g_.dout;
    const Strides x_stride = kKeys ? launch_.k_stride : launch_.q_stride;
    const Strides y_stride = kKeys ? launch_.v_stride : g_.dout_stride;
    const auto rows_of = [&](const void* data, const Strides& stride, const RowRun& given) {
      if (meets()) return rows_at(data, given);
      return Run{place(data, stride, tile_.batch, own_head, tile_.position), tile_.stride * stride.token};
    };
    const auto load = [&](T* to, const Run& rows) {
      load_rows<T, Shape::kRow, kThreads>(to, rows.from, rows.stride, tile_.rows, kTileRows, launch_.head_dim,
                                          aligned_);
    };
    load(x_, rows_of(x, x_stride, meets() ? meeting().x : RowRun{}));
    if constexpr (kNeedsDp) load(y_, rows_of(y, y_stride, meets() ? meeting().y : RowRun{}));
  }

  __device__ int first_row(const Place& at) const {
    const TileBranch& part = tile_.branches[at.branch];
    return (at.block + (kKeys ? first_block(part, g_.causal, kRows) : 0)) * kRows;
  }

  __device__ void load_block(const Place& at, int slot) {
    const TileBranch& part = tile_.branches[at.branch];
    const int first = first_row(at);
    const int count = min(kRows, part.keys - first);
    const void* from = kKeys ? launch_.q : launch_.k;
    const void* other = kKeys ? g_.dout : launch_.v;
    Run rows, other_rows;
    if (meets()) {
      rows = rows_at(from, met(part).u);
      other_rows = rows_at(other, met(part).w);
    } else {
      const Strides stride = kKeys ? launch_.q_stride : launch_.k_stride;
      const Strides other_stride = kKeys ? g_.dout_stride : launch_.v_stride;
      const int head = kKeys ? tile_.head : tile_.head / launch_.sharers;
      const std::int64_t dilation = launch_.tiling.branches[part.branch].dilation;
      rows = {place(from, stride, tile_.batch, head, part.key_begin), dilation * stride.token};
      other_rows = {place(other, other_stride, tile_.batch, head, part.key_begin), dilation * other_stride.token};
    }
    const auto load = [&](T* to, const Run& of) {
      load_rows<T, Shape::kRow, kThreads>(to, of.from + first * of.stride, of.stride, count, kRows, launch_.head_dim,
                                          aligned_);
    };
    load(u(slot), rows);
    load(w(slot), other_rows);
    if constexpr (kKeys) {
      const int i = static_cast<int>(threadIdx.x);
      if (i < 2 * kRows) {
        const bool there = i % kRows < count;
        const int row = first + (there ? i % kRows : 0);
        ptx::copy_4(lse(slot) + i, i < kRows ? lse_of(part, row) : delta_of(part, row), there);
      }
    }
  }

  // Of row i of a group of queries.
  __device__ const float* lse_of(const TileBranch& part, int i) const {
    return meets() ? number(g_.lse, met(part).lse, i) : g_.lse + group_number(part, i);
  }
  __device__ const float* delta_of(const TileBranch& part, int i) const {
    return meets() ? number(g_.delta, met(part).delta, i)
                   : g_.delta + g_.delta_offset[part.branch] + group_number(part, i);
  }
  // Of row r of a tile of queries.
  __device__ const float* own_lse(int r) const {
    return meets() ? number(g_.lse, meeting().lse, tile_row(r)) : g_.lse + number_row(position(r));
  }
  __device__ const float* own_delta(const TileBranch& part, int r) const {
    return meets() ? number(g_.delta, meeting().delta, tile_row(r))
                   : g_.delta + g_.delta_offset[part.branch] + number_row(position(r));
  }
  __device__ static const float* number(const float* data, const RowRun& rows, int i) {
    return data + rows.at + i * rows.stride;
  }
  __device__ std::int64_t group_number(const TileBranch& part, int i) const {
    return number_row(part.key_begin + static_cast<std::int64_t>(launch_.tiling.branches[part.branch].dilation) * i);
  }

  __device__ void walk() {
    const int total = tile_.total_blocks;
    if (total == 0) return;
    Place loaded, here;
    load_block(loaded, 0);
    ptx::commit_copies();
    for (int i = 0; i < total; ++i, here.advance(tile_)) {
      loaded.advance(tile_);
      if (i + 1 < total) load_block(loaded, (i + 1) % 2);
      ptx::commit_copies();
      ptx::wait_copies<1>();
      __syncthreads();
      meet(here, i % 2);
      __syncthreads();
    }
  }

  __device__ int tile_row(int r) const { return row_ + 8 * r; }  // a lane has two
  __device__ bool inside(int r) const { return tile_row(r) < tile_.rows; }
  __device__ std::int64_t position(int r) const {
    return tile_.position + static_cast<std::int64_t>(tile_.stride) * tile_row(r);
  }
  __device__ std::int64_t state_row(int r) const {
    return tile_.state_row + static_cast<std::int64_t>(tile_.stride) * tile_row(r);
  }
  __device__ int column(int n) const { return 8 * n + lane_ % 4 * 2; }

  static constexpr int kStateParts = kSums;  // a pass keeps its own sums

  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums_[i][0][n][c] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!kKeys) {  // of this lane's rows
        lse_log2_[r] = inside(r) ? *own_lse(r) * kLog2E : 0.0f;
        weight_[r] = weighted_[r] = 0.0f;
      }
      if (!tile_.continues || meets() || !inside(r) || kSums == 0) continue;
      if (__ldcg(&launch_.state_sums[state_row(r)].y) == 0.0f) continue;
      const float* from = launch_.state_values + state_row(r) * (kStateParts * launch_.head_dim);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (column(n) + c < launch_.head_dim)
              sums_[i][0][n][2 * r + c] = __ldcg(from + i * launch_.head_dim + column(n) + c);
    }
    if (!tile_.continues || meets() || kSums == 0) return;
    __syncwarp();  // all four lanes of a row have looked, before one of them writes the flag, here or when it hands on
    if (!tile_.is_last) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (inside(r) && lane_ % 4 == 0) launch_.state_sums[state_row(r)] = {0.0f, 0.0f};  // the slot is free again
  }

  __device__ void meet(const Place& at, int slot) {
    float s[1][kRows / 8][4] = {}, dp[1][kRows / 8][4] = {};
    Product::scores(s, x_ + warp_ * 16 * Shape::kRow, u(slot), lane_);
    if constexpr (kNeedsDp) Product::scores(dp, y_ + warp_ * 16 * Shape::kRow, w(slot), lane_);
    const TileBranch& part = tile_.branches[at.branch];
    const int first = first_row(at);
    const float* block_lse = lse(slot);
    const float* block_delta = delta(slot);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Row r sees the columns from `low` to `high` of the group.
      int low = 0, high = part.keys - 1;
      const int own = part.first + part.step * tile_row(r);
      if (g_.causal && kKeys) low = own;
      if (g_.causal && !kKeys) high = min(high, own);
      float row_delta = 0.0f;
      if constexpr (kPart == Part::dq) row_delta = branch_delta(at.branch, r);
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[0][n][2 * r + c];
          float& y = dp[0][n][2 * r + c];
          const int i = column(n) + c;
          const bool seen = first + i >= low && first + i <= high;
          const float exponent = x * launch_.scale_log2 - (kKeys ? block_lse[i] * kLog2E : lse_log2_[r]);
          const float p = std::is_same_v<T, float> ? exp2f(exponent) : ptx::exp2_approx(exponent);
          x = seen ? p : 0.0f;
          if constexpr (kPart == Part::deltas) {
            weight_[r] += x;
            weighted_[r] += seen ? p * y : 0.0f;
          }
          if constexpr (kFirst) y = seen ? p * (y - (kKeys ? block_delta[i] : row_delta)) : 0.0f;
        }
    }
    if constexpr (kFirst) Product::add_values(sums_[0], dp, u(slot), lane_);
    if constexpr (kSecond) Product::add_values(sums_[kSums - 1], s, w(slot), lane_);
  }

  // Eq. 8 has another Delta for each branch.
  __device__ float branch_delta(int branch, int r) {
    if (!inside(r)) return 0.0f;
    return __ldg(own_delta(tile_.branches[branch], r));
  }

  __device__ void finish(int own_head) {
    bool bad = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kPart == Part::deltas) {
        bad = !store_delta(r) || bad;
      } else {
        if (!inside(r)) continue;
        if (meets())
          add_to_sums(r);
        else if (tile_.is_last)
          bad = !store(own_head, r) || bad;
        else
          store_state(r);
      }
    }
    if (tile_.is_last) clear_uncovered(own_head);
    if (__any_sync(0xffffffffu, bad) && lane_ == 0) launch_.control->non_finite = 1;
    if (tile_.signal_set == kNoSet) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::arrive_global(launch_.sets + tile_.signal_set, 1);
  }

  __device__ bool store_delta(int r) {
#pragma unroll
    for (int d = 1; d <= 2; d *= 2) {
      weight_[r] += __shfl_xor_sync(0xffffffffu, weight_[r], d);
      weighted_[r] += __shfl_xor_sync(0xffffffffu, weighted_[r], d);
    }
    if (!inside(r) || tile_.branch_count == 0) return true;
    const float sum = weight_[r] + static_cast<float>(tile_.zero_keys) * exp2f(-lse_log2_[r]);
    const float mean = sum == 0.0f ? 0.0f : weighted_[r] / sum;
    if (lane_ % 4 == 0) g_.delta[g_.delta_offset[0] + number_row(position(r))] = mean;
    return mean * 0.0f == 0.0f;
  }

  // Where sum i goes.
  __device__ T* result(int own_head, int i, std::int64_t position) const {
    const bool value = kPart == Part::dv || i == 1;
    void* data = !kKeys ? g_.dq : value ? g_.dv : g_.dk;
    const Strides stride = !kKeys ? g_.dq_stride : value ? g_.dv_stride : g_.dk_stride;
    return const_cast<T*>(place(data, stride, tile_.batch, own_head, position));
  }

  // Whether all of it was finite.
  __device__ bool store(int own_head, int r) {
    float odd = 0.0f;  // NaN as soon as anything is not finite
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      T* to = result(own_head, i, position(r));
      const float factor = kPart == Part::dv || i == 1 ? g_.value_factor : g_.factor;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x = sums_[i][0][n][2 * r + c] * factor;
          odd += x * 0.0f;
          if (column(n) + c < launch_.head_dim) to[column(n) + c] = static_cast<T>(x);
        }
    }
    return odd == 0.0f;
  }

  __device__ void store_state(int r) {
    if (lane_ % 4 == 0) __stcg(launch_.state_sums + state_row(r), float2{0.0f, 1.0f});
    float* to = launch_.state_values + state_row(r) * (kStateParts * launch_.head_dim);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (column(n) + c < launch_.head_dim)
            __stcg(to + i * launch_.head_dim + column(n) + c, sums_[i][0][n][2 * r + c]);
  }

  __device__ void add_to_sums(int r) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int which = kPart == Part::dv ? 1 : i;
      const RowRun& rows = meeting().sums[which];
      float* to = g_.sums_of_meetings[which] + rows.at + tile_row(r) * rows.stride;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (column(n) + c < launch_.head_dim) to[column(n) + c] += sums_[i][0][n][2 * r + c];
    }
  }

  // Rows between the tile's own, if nothing covers them.
  __device__ void clear_uncovered(int own_head) {
    const int own = tile_.position - tile_.clear_begin;
    for (int i = warp_; i < kTileRows * tile_.step; i += kWarps) {
      const std::int64_t position =
          tile_.clear_begin + static_cast<std::int64_t>(tile_.stride) * (i / tile_.step) + i % tile_.step;
      if (i % tile_.step == own || position >= tile_.cell_end) continue;
#pragma unroll
      for (int sum = 0; sum < kSums; ++sum)
        for (int e = lane_; e < launch_.head_dim; e += 32) result(own_head, sum, position)[e] = static_cast<T>(0.0f);
    }
  }

  const GradientLaunch& g_;
  const Launch& launch_;
  const Stretch* stretch_;
  Tile& tile_;
  T *x_, *y_, *blocks_;
  float* numbers_;
  bool aligned_;
  int lane_, warp_, row_;
  float sums_[kSums > 0 ? kSums : 1][1][kDim / 8][4];
  float lse_log2_[2], weight_[2], weighted_[2];
};

template <class T, int kDim, Part kPart>
__global__ void __launch_bounds__(kThreads)
    gradient(const __grid_constant__ GradientLaunch launch, const bool aligned) {
  extern __shared__ __align__(16) std::uint8_t raw[];
  __shared__ Tile tile;
  __shared__ const Stretch* stretch;
  __shared__ bool done;
  T* shared = reinterpret_cast<T*>(raw);
  for (int i = static_cast<int>(threadIdx.x); i < GradientLayout<T, kDim>::kElements; i += kThreads)
    shared[i] = static_cast<T>(0.0f);  // columns beyond head_dim stay so
  const Launch& common = launch.common;
  int at = 0;  // stretch; thread 0's
  for (;;) {
    if (threadIdx.x == 0) {
      const auto index = static_cast<std::int64_t>(atomicAdd(&common.control->next_tile, 1ull));
      done = index >= common.tile_count;
      if (!done && common.meetings.tiles != nullptr) {
        meet(common.meetings, static_cast<int>(index), GradientLayout<T, kDim>::kRows, tile);
      } else if (!done) {
        at = find_stretch(common.stretches, common.stretch_count, index, at);
        stretch = common.stretches + at;
        locate(common.tiling, *stretch, static_cast<unsigned>(index - stretch->first_tile), tile);
        if (tile.wait_set != kNoSet)
          ptx::wait_global(common.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
      }
    }
    __syncthreads();
    if (done) return;
    GradientWalk<T, kDim, kPart>(launch, stretch, tile, shared, aligned).run();
    __syncthreads();
  }
}

}  // namespace annulus::cuda::mma::gradients
