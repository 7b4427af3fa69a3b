// The Hopper forward kernel: persistent blocks, each a producer warpgroup and two or three consumer warpgroups.
//
//   producer, warp 0     has the copy engine bring Q, then K and V blocks of all branches, tile by tile
//   producer, warps 1..  one for each consumer: store its rows of O from shared memory; clear rows that nothing covers.
//                        Warp 1 also takes tiles in order and finds out what they are, one ahead
//   consumers            64 query rows each. S = Q K^T, softmax in registers, O += P V with P from registers
//
// A consumer's loop has S of the next block in flight beside P V of this one, and consumers take turns to issue, so
// that the exponentials of one hide behind the matrix work of the others. Who waits for whom:
//   tile_found                 the record of the next tile is there
//   query_full / query_empty   per query slot: a tile's record and its Q; empty again when O has left it
//   key_full / key_empty, value_full / value_empty   per stage
// Query slots double as the way out: a consumer puts O where its queries were.
//
// Rows behind the end of a group are read (they belong to other groups) and masked; a row's own result never depends on
// them unless they hold NaN or infinity, since 0 * NaN is NaN. Rows whose result is not finite are computed again, row
// by row (attend_rows.cu).
#pragma once

#include "kernels/cuda/counts_sm90.cuh"
#include "kernels/cuda/produce_sm90.cuh"
#include "kernels/cuda/wgmma_sm90.cuh"

namespace annulus::cuda::sm90 {

// With kCounts keys may be those of several branches.
template <Sm90Config C, class T, bool kCounts>
__device__ __forceinline__ void attend(const Params& p, const Shared<C>& sh, int group, int thread) {
  constexpr int kScores = C.key_rows / 2;
  constexpr int kOut = C.head_dim / 2;
  static_assert(C.key_rows % kCountPeriod == 0);
  const Launch& launch = p.common;
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp * 16 + lane / 4;  // of this group's 64; the thread has row + 8 too
  const float scale = launch.scale_log2;
  float s[kScores], o[kOut], fix[2];
  float m[2] = {}, l[2] = {};  // l: of this thread's columns
  Counts<kCounts> counts;
  std::uint32_t prob[C.key_rows / 4];
  bool rescale = false;
  Ring query, record, key, value;

  if (group == C.groups - 1) ptx::named_arrive(kTurn, 256);  // consumer 0 has the first turn
  const auto take_turn = [&]() __attribute__((always_inline)) { ptx::named_sync(kTurn + group, 256); };
  const auto pass_turn = [&]() __attribute__((always_inline)) {
    ptx::named_arrive(kTurn + (group + 1) % C.groups, 256);
  };
  const auto release_key = [&]() __attribute__((always_inline)) {
    if (lane == 0) ptx::mbarrier_arrive(sh.key_empty(key.slot));
    key.advance<C.stages>();
  };
  const auto release_value = [&]() __attribute__((always_inline)) {
    if (lane == 0) ptx::mbarrier_arrive(sh.value_empty(value.slot));
    value.advance<C.stages>();
  };
  const auto issue_scores = [&]() __attribute__((always_inline)) {  // S = Q K^T
    const std::uint64_t a = ptx::descriptor(sh.query_slab(query.slot, group), 16, 1024);
    const std::uint64_t b = ptx::descriptor(sh.key + key.slot * C.block_bytes(), 16, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.head_dim / 16; ++i) {  // 16 elements are 32 bytes further in the row of 128 bytes
      const int within = (i % 4) * 2;
      ptx::multiply_shared<T>(s, a + within + i / 4 * (C.query_rows() * 128 / 16),
                              b + within + i / 4 * (C.key_rows * 128 / 16), i > 0);
    }
    ptx::wgmma_commit();
  };
  const auto issue_out = [&]() __attribute__((always_inline)) {  // O += P V
    const std::uint64_t b = ptx::descriptor(sh.value + value.slot * C.block_bytes(), C.key_rows * 128, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.key_rows / 16; ++i) ptx::multiply_add<T>(o, prob + 4 * i, b + i * 128);
    ptx::wgmma_commit();
  };
  const auto row_max = [&](float(&top)[2]) __attribute__((always_inline)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float a[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) a[c] = s[4 * (c / 2) + 2 * r + (c & 1)];
#pragma unroll
      for (int j = 2; j < kScores / 4; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) a[2 * (j & 1) + c] = fmaxf(a[2 * (j & 1) + c], s[4 * j + 2 * r + c]);
      top[r] = fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3]));
    }
#pragma unroll
    for (int d = 1; d <= 2; d *= 2)
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], d));
  };
  // S becomes P, m and l move on; `rescale` says whether O must follow by `fix`. While no row of the warp grows by more
  // than 2^8, nothing does.
  const auto softmax = [&]() __attribute__((always_inline)) {
    float top[2];
    row_max(top);
    rescale = __any_sync(0xffffffffu, (top[0] - m[0]) * scale > 8.0f || (top[1] - m[1]) * scale > 8.0f);
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float now = fmaxf(m[r], top[r]);
        fix[r] = ptx::exp2_approx((m[r] - now) * scale);
        m[r] = now;
        l[r] *= fix[r];
      }
    }
    float part[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    const auto offset = counts.minus(m[0] * scale, m[1] * scale);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = ptx::exp2_approx(fmaf(s[i], scale, offset.of(i)));
      part[(i >> 1) & 1][i & 1] += s[i];
    }
    l[0] += part[0][0] + part[0][1];
    l[1] += part[1][0] + part[1][1];
  };
  const auto rescale_out = [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] *= fix[(i >> 1) & 1];
  };
  const auto convert = [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < C.key_rows / 4; ++i) prob[i] = ptx::pack<T>(s[2 * i], s[2 * i + 1]);
  };

  for (;;) {
    ptx::mbarrier_wait(sh.query_full(query.slot), query.parity);
    const Tile& tile = sh.tiles[record.slot];
    record.advance<C.tile_records()>();
    if (tile.sweep == kNoMoreTiles) break;
    const int total = tile.total_blocks;
    const bool inside[2] = {group * 64 + row < tile.rows, group * 64 + row + 8 < tile.rows};

    // Blocks at the end of the last part, a branch as a whole, that no row of this group sees are left out.
    int mine = tile.rows > group * 64 ? total : 0;
    if (C.causal && mine > 0) {
      const TileBranch& part = tile.branches[tile.branch_count - 1];
      const int last = min(part.keys - 1, part.first + part.step * (min(tile.rows, group * 64 + 64) - 1));
      mine -= part.blocks - (last / C.key_rows + 1);
    }

    const auto start = [&]() __attribute__((always_inline)) {  // with nothing in flight: this writes O
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        m[r] = -INFINITY;
        l[r] = 0.0f;
      }
      if (!tile.continues) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::int64_t at = tile.state_row + static_cast<std::int64_t>(tile.stride) * (group * 64 + row + 8 * r);
        float2 sums = {0.0f, 0.0f};
        if (inside[r] && (lane & 3) == 0) sums = __ldcg(launch.state_sums + at);
        const float before = __shfl_sync(0xffffffffu, sums.y, lane & ~3);
        const float maximum = __shfl_sync(0xffffffffu, sums.x, lane & ~3);
        if (before == 0.0f) continue;
        m[r] = maximum;
        l[r] = sums.y;
        const float* from = launch.state_values + at * C.head_dim + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < kOut / 4; ++j) {
          const float2 pair = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
          o[4 * j + 2 * r] = pair.x;
          o[4 * j + 2 * r + 1] = pair.y;
        }
        if (tile.is_last && (lane & 3) == 0) launch.state_sums[at] = {0.0f, 0.0f};  // the slot is free again
      }
    };

    // The key blocks of all branches are one stream.
    int b = -1, n = 0, blocks = 0, clear_blocks = 0, limit[2] = {0, 0};
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
    };
    const auto mask = [&]() __attribute__((always_inline)) {
      if (n < clear_blocks) return;
      const int column = n * C.key_rows + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (column + 8 * (i / 4) + (i & 1) > limit[(i >> 1) & 1]) s[i] = -INFINITY;
    };

    if (mine > 0) {
      next_block();
      ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
      issue_scores();
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      ptx::pin(o);
      release_key();
      start();
      mask();
      softmax();
      if (rescale) rescale_out();
      convert();
      for (int i = 1; i < mine; ++i) {
        next_block();
        ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
        take_turn();
        issue_scores();
        ptx::mbarrier_wait(sh.value_full(value.slot), value.parity);
        issue_out();
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release_key();
        mask();
        softmax();
        ptx::pin(s);
        if (rescale) {  // the wait stands in both arms: ptxas would move a single one above the exponentials
          ptx::wgmma_wait<0>();
          ptx::pin(o);
          rescale_out();
        } else {
          ptx::wgmma_wait<0>();
          ptx::pin(o);
        }
        ptx::pin(prob);
        release_value();
        convert();
      }
      ptx::mbarrier_wait(sh.value_full(value.slot), value.parity);
      issue_out();
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release_value();
    } else {
      start();
    }
    for (int i = mine; i < total; ++i) {  // others still compute: keep step with them
      ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
      if (i > 0) {
        take_turn();
        pass_turn();
      }
      release_key();
      ptx::mbarrier_wait(sh.value_full(value.slot), value.parity);
      release_value();
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
      l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
    }
    if (tile.zero_keys > 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float now = fmaxf(m[r], 0.0f);
        fix[r] = ptx::exp2_approx((m[r] - now) * scale);
        m[r] = now;
        l[r] = l[r] * fix[r] + static_cast<float>(tile.zero_keys) * ptx::exp2_approx(-now * scale);
      }
      rescale_out();
    }
    if (tile.is_last) {
      float inverse[2], odd[2] = {0.0f, 0.0f};  // odd: NaN as soon as anything is not finite
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        inverse[r] = l[r] == 0.0f ? 0.0f : launch.output_scale / l[r];
        if (launch.lse != nullptr && inside[r] && (lane & 3) == 0)
          launch.lse[(static_cast<std::int64_t>(tile.batch) * launch.heads + tile.head) * launch.tokens +
                     tile.position + static_cast<std::int64_t>(tile.stride) * (group * 64 + row + 8 * r)] =
              l[r] == 0.0f ? -INFINITY : 0.6931471805599453f * (m[r] * scale + log2f(l[r]));
      }
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
        o[i] *= inverse[(i >> 1) & 1];
        odd[(i >> 1) & 1] += o[i] * 0.0f;
      }
      const bool bad = (inside[0] && !(odd[0] == 0.0f)) || (inside[1] && !(odd[1] == 0.0f));
      if (__any_sync(0xffffffffu, bad) && lane == 0) launch.control->non_finite = 1;
      ptx::named_sync(kGroup + group, 128);  // all four warps are through with the queries
      const std::uint32_t slab = sh.query_slab(query.slot, group);
      const int store_row = warp * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < C.head_dim / 16; ++i) {
        const int chunk = (2 * i) % 8 + lane / 16;
        ptx::store_matrix_x4(slab + i / 4 * (C.query_rows() * 128) + store_row * 128 + (chunk ^ (store_row & 7)) * 16,
                             ptx::pack<T>(o[8 * i], o[8 * i + 1]), ptx::pack<T>(o[8 * i + 2], o[8 * i + 3]),
                             ptx::pack<T>(o[8 * i + 4], o[8 * i + 5]), ptx::pack<T>(o[8 * i + 6], o[8 * i + 7]));
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!inside[r]) continue;
        const std::int64_t at = tile.state_row + static_cast<std::int64_t>(tile.stride) * (group * 64 + row + 8 * r);
        if ((lane & 3) == 0) __stcg(launch.state_sums + at, float2{m[r], l[r]});
        float* to = launch.state_values + at * C.head_dim + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < kOut / 4; ++j)
          __stcg(reinterpret_cast<float2*>(to + 8 * j), float2{o[4 * j + 2 * r], o[4 * j + 2 * r + 1]});
      }
    }
    if (tile.signal_set != kNoSet) {
      __threadfence();
      ptx::named_sync(kGroup + group, 128);
      if (thread == 0) ptx::arrive_global(launch.sets + tile.signal_set, 1);
    }
    ptx::named_arrive(kStored + 2 * group + query.slot, 160);
    query.advance<C.query_slots>();
  }
}

// By number: nvcc 13.0 writes stubs that do not compile for kernels with an argument of class type in a namespace.
template <int kConfig, class T, bool kCounts>
__global__ void __launch_bounds__(kSm90Configs[kConfig].threads(), 1) forward(const __grid_constant__ Params p) {
  constexpr Sm90Config C = kSm90Configs[kConfig];
  extern __shared__ std::uint8_t raw[];
  const Shared<C> sh(raw);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C.query_slots; ++i) {
      ptx::mbarrier_init(sh.query_full(i), 1);
      ptx::mbarrier_init(sh.query_empty(i), C.groups);
    }
    for (int i = 0; i < C.stages; ++i) {
      ptx::mbarrier_init(sh.key_full(i), 1);
      ptx::mbarrier_init(sh.key_empty(i), C.groups * 4);
      ptx::mbarrier_init(sh.value_full(i), 1);
      ptx::mbarrier_init(sh.value_empty(i), C.groups * 4);
    }
    ptx::mbarrier_init(sh.tile_found(), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (group == 0) {
    ptx::registers_down<C.producer_registers>();
    if (warp == 0) {
      if (threadIdx.x == 0) feed<C>(p, sh);
    } else if (warp <= C.groups) {
      store<C, T>(p, sh, warp - 1, static_cast<int>(threadIdx.x) % 32);
    }
  } else {
    ptx::registers_up<C.consumer_registers>();
    attend<C, T, kCounts>(p, sh, group - 1, static_cast<int>(threadIdx.x) % 128);
  }
}

}  // namespace annulus::cuda::sm90
