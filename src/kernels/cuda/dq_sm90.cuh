// dQ on Hopper without a sum that anybody else adds to: the deterministic way, beside gradient_sm90.cuh for dK and dV.
//
// Tiles of queries, as in attend_sm90.cuh: two consumer warpgroups of 64 queries each walk the keys that they see.
//   S = Q K^T, dP = dO V^T, dS = P (dP - Delta), dQ += dS K
// S and dP of a block are in flight beside dQ of the block before. A block of keys is read by S, and by dQ a turn
// later, so K has a stage more than V. The groups take turns to issue, as in attend_sm90.cuh.
//
//   producer, warp 0       Q and dO of a tile, then K and V of all branches
//   producer, warps 1, 2   store dQ of one consumer each, clear rows that nothing covers; warp 1 finds the next tile
#pragma once

#include "kernels/cuda/counts_sm90.cuh"
#include "kernels/cuda/gradient_tiles_sm90.h"
#include "kernels/cuda/produce_sm90.cuh"
#include "kernels/cuda/wgmma_gradient_sm90.cuh"
#include "kernels/cuda/wgmma_sm90.cuh"

namespace annulus::cuda::sm90 {

struct DqParams {
  GradientLaunch launch;
  StridedRows query[kMaxBranches];  // [sweep]
  StridedRows grad[kMaxBranches];
  StridedRows key[kMaxBranches];  // [branch of the tiling]
  StridedRows value[kMaxBranches];
};

constexpr int kDqStored = 1;  // + 2 * consumer + query slot: dQ lies in shared memory
constexpr int kDqGroup = 5;   // + consumer: its own 128 threads
constexpr int kDqTurn = 7;    // + consumer: its turn to issue

template <Sm90DqConfig C>
struct DqShared {
  std::uint32_t query, grad, key, value, barriers;
  Tile* tiles;  // [tile_records], in turn; query_full and query_empty guard them too

  __device__ explicit DqShared(std::uint8_t* raw) {
    const std::uint32_t start = ptx::shared_address(raw);
    query = (start + 1023) & ~1023u;
    grad = query + C.kQuerySlots * C.query_bytes();
    key = grad + C.kQuerySlots * C.query_bytes();
    value = key + C.kKeyStages * C.block_bytes();
    barriers = value + C.kValueStages * C.block_bytes();
    tiles = reinterpret_cast<Tile*>(raw + (barriers + (C.barrier_bytes() + 15) / 16 * 16 - start));
  }
  __device__ std::uint32_t query_full(int slot) const { return barriers + 8 * slot; }
  __device__ std::uint32_t query_empty(int slot) const { return query_full(C.kQuerySlots) + 8 * slot; }
  __device__ std::uint32_t key_full(int slot) const { return query_empty(C.kQuerySlots) + 8 * slot; }
  __device__ std::uint32_t key_empty(int slot) const { return key_full(C.kKeyStages) + 8 * slot; }
  __device__ std::uint32_t value_full(int slot) const { return key_empty(C.kKeyStages) + 8 * slot; }
  __device__ std::uint32_t value_empty(int slot) const { return value_full(C.kValueStages) + 8 * slot; }
  __device__ std::uint32_t tile_found() const { return value_empty(C.kValueStages); }
  __device__ std::uint32_t slab(std::uint32_t tensor, int slot, int group) const {
    return tensor + slot * C.query_bytes() + group * (64 * 128);
  }
};

// ---- Producers

// Warp 1, one thread: the next tile that has something to do, found while the one before is computed.
template <Sm90DqConfig C>
class DqFinder {
 public:
  __device__ DqFinder(const Launch& launch, const DqShared<C>& sh) : launch_(launch), sh_(sh) {}

  __device__ __forceinline__ void find() {
    Tile& tile = sh_.tiles[record_.slot];
    for (;;) {
      const auto index = static_cast<std::int64_t>(atomicAdd(&launch_.control->next_tile, 1ull));
      if (index >= launch_.tile_count) {
        tile.sweep = kNoMoreTiles;
        break;
      }
      at_ = find_stretch(launch_.stretches, launch_.stretch_count, index, at_);
      const Stretch& stretch = launch_.stretches[at_];
      locate(launch_.tiling, stretch, static_cast<unsigned>(index - stretch.first_tile), tile);
      if (!has_nothing_to_do(tile)) break;
      if (tile.signal_set == kNoSet) continue;
      // Whoever waits for this set trusts it for the sets before.
      if (tile.wait_set != kNoSet)
        ptx::wait_global(launch_.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
      ptx::arrive_global(launch_.sets + tile.signal_set, 2);
    }
    record_.advance<C.kTileRecords>();
    ptx::mbarrier_arrive(sh_.tile_found());
  }

 private:
  const Launch& launch_;
  const DqShared<C>& sh_;
  int at_ = 0;  // stretch
  Ring record_;
};

// Warp 0, one thread.
template <Sm90DqConfig C>
__device__ __forceinline__ void feed_dq(const DqParams& p, const DqShared<C>& sh) {
  const Launch& launch = p.launch.common;
  Ring found, record, query, key, value;
  for (;;) {
    ptx::mbarrier_wait(sh.tile_found(), found.parity);
    const Tile& tile = sh.tiles[record.slot];
    found.advance<1>();
    record.advance<C.kTileRecords>();
    ptx::mbarrier_wait(sh.query_empty(query.slot), query.parity ^ 1);
    const std::uint32_t full = sh.query_full(query.slot);
    if (tile.sweep == kNoMoreTiles) {
      ptx::mbarrier_arrive(full);
      return;
    }
    if (tile.wait_set != kNoSet) ptx::wait_global(launch.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
    const int groups = (tile.rows + 63) / 64;  // that have rows
    const StridedRows& rows = p.query[tile.sweep];
    ptx::mbarrier_arrive_expect(full, groups * (2 * 64 * C.head_dim * 2));
    for (int g = 0; g < groups; ++g) {
      const int row = tile.position / rows.stride + g * 64, residue = tile.position % rows.stride;
      load_rows(sh.slab(sh.query, query.slot, g), C.kQueryRows * 128, C.head_dim, rows, full, row, residue, tile.head,
                tile.batch);
      load_rows(sh.slab(sh.grad, query.slot, g), C.kQueryRows * 128, C.head_dim, p.grad[tile.sweep], full, row, residue,
                tile.head, tile.batch);
    }
    query.advance<C.kQuerySlots>();
    const int kv_head = tile.head / launch.sharers;
    for (int b = 0; b < tile.branch_count; ++b) {
      const TileBranch& part = tile.branches[b];
      const int stride = p.key[part.branch].stride;
      const int first = part.key_begin / stride, residue = part.key_begin % stride;
      for (int n = 0; n < part.blocks; ++n) {
        ptx::mbarrier_wait(sh.key_empty(key.slot), key.parity ^ 1);
        ptx::mbarrier_arrive_expect(sh.key_full(key.slot), C.block_bytes());
        load_rows(sh.key + key.slot * C.block_bytes(), C.key_rows * 128, C.head_dim, p.key[part.branch],
                  sh.key_full(key.slot), first + n * C.key_rows, residue, kv_head, tile.batch);
        key.advance<C.kKeyStages>();
        ptx::mbarrier_wait(sh.value_empty(value.slot), value.parity ^ 1);
        ptx::mbarrier_arrive_expect(sh.value_full(value.slot), C.block_bytes());
        load_rows(sh.value + value.slot * C.block_bytes(), C.key_rows * 128, C.head_dim, p.value[part.branch],
                  sh.value_full(value.slot), first + n * C.key_rows, residue, kv_head, tile.batch);
        value.advance<C.kValueStages>();
      }
    }
  }
}

// Warps 1 and 2: one consumer's rows of dQ to memory.
template <Sm90DqConfig C, class T>
__device__ __forceinline__ void store_dq(const DqParams& p, const DqShared<C>& sh, int group, int lane) {
  constexpr int kChunks = C.head_dim * 2 / 16;
  constexpr int kRowsAtOnce = 32 / kChunks;
  const GradientLaunch& g = p.launch;
  const int chunk = lane % kChunks;
  DqFinder<C> finder(g.common, sh);
  const bool finds = group == 0 && lane == 0;
  if (finds) finder.find();
  Ring query, record;
  for (;;) {
    ptx::mbarrier_wait(sh.query_full(query.slot), query.parity);
    const Tile& tile = sh.tiles[record.slot];
    record.advance<C.kTileRecords>();
    if (tile.sweep == kNoMoreTiles) return;
    if (finds) finder.find();
    __syncwarp();
    T* const out = static_cast<T*>(g.dq) + tile.batch * g.dq_stride.batch + tile.head * g.dq_stride.head + chunk * 8;
    // Rows that no branch covers: [clear_begin, clear_begin + step) + i * stride but for the tile's own.
    for (int e = 0; tile.is_last && e < tile.step; ++e) {
      const int first = tile.clear_begin + tile.stride * group * 64 + e;
      if (e == tile.position - tile.clear_begin || first >= tile.cell_end) continue;
      const int count = min(64, divide_up(tile.cell_end - first, tile.stride));
      for (int row = lane / kChunks; row < count; row += kRowsAtOnce)
        __stcs(
            reinterpret_cast<uint4*>(out + (first + static_cast<std::int64_t>(tile.stride) * row) * g.dq_stride.token),
            uint4{0, 0, 0, 0});
    }
    ptx::named_sync(kDqStored + 2 * group + query.slot, 160);
    if (tile.is_last) {
      const int rows = min(tile.rows - group * 64, 64);
      const std::uint32_t slab = sh.slab(sh.query, query.slot, group) + chunk / 8 * (C.kQueryRows * 128);
      const std::int64_t hop = static_cast<std::int64_t>(tile.stride) * kRowsAtOnce * g.dq_stride.token;
      T* to = out + (tile.position + static_cast<std::int64_t>(tile.stride) * (group * 64 + lane / kChunks)) *
                        g.dq_stride.token;
#pragma unroll 4
      for (int row = lane / kChunks; row < rows; row += kRowsAtOnce, to += hop)
        __stcs(reinterpret_cast<uint4*>(to), ptx::load_shared_16(slab + row * 128 + ((chunk % 8) ^ (row & 7)) * 16));
    }
    ptx::fence_async();  // the copy engine writes here next
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.query_empty(query.slot));
    query.advance<C.kQuerySlots>();
  }
}

// ---- Consumers

template <Sm90DqConfig C, class T, bool kCounts>
__device__ __forceinline__ void consume_dq(const GradientLaunch& g, const DqShared<C>& sh, int group, int thread) {
  constexpr int kScores = C.key_rows / 2, kOut = C.head_dim / 2;
  static_assert(C.key_rows % kCountPeriod == 0);
  const Launch& launch = g.common;
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp * 16 + lane / 4;  // of this group's 64; the thread has row + 8 too
  const float scale = launch.scale_log2;
  float s[kScores], x[kScores], dq[kOut];
  std::uint32_t ds[kScores / 2];
  Ring query, record, key, before, value;  // before: the block of keys that dQ is still to read

  if (group == 1) ptx::named_arrive(kDqTurn, 256);  // consumer 0 has the first turn
  const auto take_turn = [&]() __attribute__((always_inline)) { ptx::named_sync(kDqTurn + group, 256); };
  const auto pass_turn = [&]() __attribute__((always_inline)) { ptx::named_arrive(kDqTurn + (group ^ 1), 256); };
  const auto issue_scores = [&]() __attribute__((always_inline)) {  // S = Q K^T
    const std::uint64_t a = ptx::descriptor(sh.slab(sh.query, query.slot, group), 16, 1024);
    const std::uint64_t b = ptx::descriptor(sh.key + key.slot * C.block_bytes(), 16, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.head_dim / 16; ++i) {
      const std::uint64_t ai = a + (i % 4) * 2 + i / 4 * (C.kQueryRows * 8),
                          bi = b + (i % 4) * 2 + i / 4 * (C.key_rows * 8);
      i == 0 ? ptx::multiply_first<T, 0, 0>(s, ai, bi) : ptx::multiply_next<T, 0, 0>(s, ai, bi);
    }
    ptx::wgmma_commit();
  };
  const auto issue_dp = [&]() __attribute__((always_inline)) {  // dP = dO V^T
    const std::uint64_t a = ptx::descriptor(sh.slab(sh.grad, query.slot, group), 16, 1024);
    const std::uint64_t b = ptx::descriptor(sh.value + value.slot * C.block_bytes(), 16, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.head_dim / 16; ++i) {
      const std::uint64_t ai = a + (i % 4) * 2 + i / 4 * (C.kQueryRows * 8),
                          bi = b + (i % 4) * 2 + i / 4 * (C.key_rows * 8);
      i == 0 ? ptx::multiply_first<T, 0, 0>(x, ai, bi) : ptx::multiply_next<T, 0, 0>(x, ai, bi);
    }
    ptx::wgmma_commit();
  };
  const auto issue_dq = [&]() __attribute__((always_inline)) {  // dQ += dS K
    const std::uint64_t b = ptx::descriptor(sh.key + before.slot * C.block_bytes(), C.key_rows * 128, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.key_rows / 16; ++i) ptx::multiply_add<T>(dq, ds + 4 * i, b + i * 128);
    ptx::wgmma_commit();
  };
  const auto release = [&](std::uint32_t barrier) __attribute__((always_inline)) {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };

  for (;;) {
    ptx::mbarrier_wait(sh.query_full(query.slot), query.parity);
    const Tile& tile = sh.tiles[record.slot];
    record.advance<C.kTileRecords>();
    if (tile.sweep == kNoMoreTiles) break;
    const int total = tile.total_blocks;
    bool inside[2];
    float lse[2], delta[2] = {0.0f, 0.0f};
    std::int64_t number[2], state[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = group * 64 + row + 8 * r;
      inside[r] = own < tile.rows;
      number[r] = (static_cast<std::int64_t>(tile.batch) * launch.heads + tile.head) * launch.tokens + tile.position +
                  static_cast<std::int64_t>(tile.stride) * (inside[r] ? own : 0);
      state[r] = tile.state_row + static_cast<std::int64_t>(tile.stride) * own;
      lse[r] = inside[r] ? __ldg(g.lse + number[r]) * 1.442695040888963407f : INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i) dq[i] = 0.0f;
    if (tile.continues) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!inside[r] || __ldcg(&launch.state_sums[state[r]].y) == 0.0f) continue;
        const float* from = launch.state_values + state[r] * C.head_dim + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < kOut / 4; ++j) {
          const float2 pair = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
          dq[4 * j + 2 * r] = pair.x;
          dq[4 * j + 2 * r + 1] = pair.y;
        }
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (tile.is_last && (lane & 3) == 0 && inside[r]) launch.state_sums[state[r]] = {0.0f, 0.0f};  // free again
    }

    // Blocks at the end of the last part, a branch as a whole, that no row of this group sees are left out.
    int mine = tile.rows > group * 64 ? total : 0;
    if (C.causal && mine > 0) {
      const TileBranch& part = tile.branches[tile.branch_count - 1];
      const int last = min(part.keys - 1, part.first + part.step * (min(tile.rows, group * 64 + 64) - 1));
      mine -= part.blocks - (last / C.key_rows + 1);
    }
    // The key blocks of all branches are one stream.
    int b = -1, n = 0, blocks = 0, clear_blocks = 0, limit[2] = {0, 0};
    Counts<kCounts> counts;
    const auto next_block = [&]() __attribute__((always_inline)) {
      if (++n < blocks) return;
      const TileBranch& part = tile.branches[++b];
      n = 0;
      blocks = part.blocks;
      int lowest = part.keys - 1;
      limit[0] = limit[1] = lowest;
      if (C.causal) {
        const int first = part.first + part.step * group * 64;
        lowest = min(lowest, first);
        limit[0] = min(limit[0], first + part.step * row);
        limit[1] = min(limit[1], first + part.step * (row + 8));
      }
      clear_blocks = (lowest + 1) / C.key_rows;
      counts.take(launch.tiling, tile, part, lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) delta[r] = __ldg(g.delta + g.delta_offset[part.branch] + number[r]);
    };
    const auto exponentials = [&]() __attribute__((always_inline)) {
      ptx::pin(s);
      if (n >= clear_blocks) {
        const int column = n * C.key_rows + (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          if (column + 8 * (i / 4) + (i & 1) > limit[(i >> 1) & 1]) s[i] = -INFINITY;
      }
      const auto offset = counts.minus(lse[0], lse[1]);
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = ptx::exp2_approx(fmaf(s[i], scale, offset.of(i)));
    };
    const auto make_ds = [&]() __attribute__((always_inline)) {
      ptx::pin(x);
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i)
        ds[i] = ptx::pack<T>(s[2 * i] * (x[2 * i] - delta[i & 1]), s[2 * i + 1] * (x[2 * i + 1] - delta[i & 1]));
    };

    if (mine > 0) {
      next_block();
      ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
      issue_scores();
      ptx::mbarrier_wait(sh.value_full(value.slot), value.parity);
      issue_dp();
      ptx::wgmma_wait<1>();
      exponentials();
      ptx::wgmma_wait<0>();
      make_ds();
      ptx::pin(dq);
      release(sh.value_empty(value.slot));
      value.advance<C.kValueStages>();
      before = key;
      key.advance<C.kKeyStages>();
      for (int i = 1; i < mine; ++i) {
        next_block();
        ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
        take_turn();
        issue_scores();
        ptx::mbarrier_wait(sh.value_full(value.slot), value.parity);
        issue_dp();
        issue_dq();
        pass_turn();
        ptx::wgmma_wait<2>();
        exponentials();
        ptx::pin(s);
        if (i + 1 < mine) {  // the wait stands in both arms: ptxas would move a single one above the exponentials
          ptx::wgmma_wait<0>();
          ptx::pin(ds);
        } else {
          ptx::wgmma_wait<0>();
          ptx::pin(dq);
        }
        ptx::pin(ds);
        ptx::pin(dq);
        make_ds();
        release(sh.value_empty(value.slot));
        release(sh.key_empty(before.slot));
        value.advance<C.kValueStages>();
        before = key;
        key.advance<C.kKeyStages>();
      }
      issue_dq();
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      release(sh.key_empty(before.slot));
    }
    for (int i = mine; i < total; ++i) {  // the other group still computes: keep step with it
      ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
      if (i > 0) {
        take_turn();
        pass_turn();
      }
      release(sh.key_empty(key.slot));
      key.advance<C.kKeyStages>();
      ptx::mbarrier_wait(sh.value_full(value.slot), value.parity);
      release(sh.value_empty(value.slot));
      value.advance<C.kValueStages>();
    }

    if (tile.is_last) {
      float odd[2] = {0.0f, 0.0f};  // NaN as soon as anything is not finite
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
        dq[i] *= g.factor;
        odd[(i >> 1) & 1] += dq[i] * 0.0f;
      }
      const bool bad = (inside[0] && !(odd[0] == 0.0f)) || (inside[1] && !(odd[1] == 0.0f));
      if (__any_sync(0xffffffffu, bad) && lane == 0) launch.control->non_finite = 1;
      ptx::named_sync(kDqGroup + group, 128);  // all four warps are through with the queries
      const std::uint32_t slab = sh.slab(sh.query, query.slot, group);
      const int own = warp * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < C.head_dim / 16; ++i)
        ptx::store_matrix_x4(
            slab + i / 4 * (C.kQueryRows * 128) + own * 128 + ((2 * (i % 4) + lane / 16) ^ (own & 7)) * 16,
            ptx::pack<T>(dq[8 * i], dq[8 * i + 1]), ptx::pack<T>(dq[8 * i + 2], dq[8 * i + 3]),
            ptx::pack<T>(dq[8 * i + 4], dq[8 * i + 5]), ptx::pack<T>(dq[8 * i + 6], dq[8 * i + 7]));
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!inside[r]) continue;
        if ((lane & 3) == 0) __stcg(launch.state_sums + state[r], float2{0.0f, 1.0f});
        float* to = launch.state_values + state[r] * C.head_dim + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < kOut / 4; ++j)
          __stcg(reinterpret_cast<float2*>(to + 8 * j), float2{dq[4 * j + 2 * r], dq[4 * j + 2 * r + 1]});
      }
    }
    if (tile.signal_set != kNoSet) {
      __threadfence();
      ptx::named_sync(kDqGroup + group, 128);
      if (thread == 0) ptx::arrive_global(launch.sets + tile.signal_set, 1);
    }
    ptx::named_arrive(kDqStored + 2 * group + query.slot, 160);
    query.advance<C.kQuerySlots>();
  }
}

template <int kConfig, class T, bool kCounts>
__global__ void __launch_bounds__(kGradientThreads, 1) dq_alone(const __grid_constant__ DqParams p) {
  constexpr Sm90DqConfig C = kSm90DqConfigs[kConfig];
  extern __shared__ std::uint8_t raw[];
  const DqShared<C> sh(raw);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C.kQuerySlots; ++i) {
      ptx::mbarrier_init(sh.query_full(i), 1);
      ptx::mbarrier_init(sh.query_empty(i), 2);
    }
    for (int i = 0; i < C.kKeyStages; ++i) {
      ptx::mbarrier_init(sh.key_full(i), 1);
      ptx::mbarrier_init(sh.key_empty(i), 8);
    }
    for (int i = 0; i < C.kValueStages; ++i) {
      ptx::mbarrier_init(sh.value_full(i), 1);
      ptx::mbarrier_init(sh.value_empty(i), 8);
    }
    ptx::mbarrier_init(sh.tile_found(), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (group == 0) {
    ptx::registers_down<C.kProducerRegisters>();
    if (warp == 0) {
      if (threadIdx.x == 0) feed_dq<C>(p, sh);
    } else if (warp < 3) {
      store_dq<C, T>(p, sh, warp - 1, static_cast<int>(threadIdx.x) % 32);
    }
  } else {
    ptx::registers_up<C.kConsumerRegisters>();
    consume_dq<C, T, kCounts>(p.launch, sh, group - 1, static_cast<int>(threadIdx.x) % 128);
  }
}

}  // namespace annulus::cuda::sm90
