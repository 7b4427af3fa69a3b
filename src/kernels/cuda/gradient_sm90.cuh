// The Hopper backward kernel: persistent blocks, each a producer warpgroup and two consumer warpgroups of 64 keys each.
//
//   producer, warp 0       has the copy engine bring K of a tile, then Q and dO of all queries that see it, branch by
//                          branch, head by head, and V behind the first of them
//   producer, warp 1       clears rows of dK and dV that nothing covers, says when a tile has ended and when one may
//                          add to dQ
//   producer, warp 2       finds the next tile when the present one is nearly fed
//   producer, warp 3       fetches LSE and Delta
//   consumers              S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q in registers; dQ = dS K
//
// Products are transposed, keys along rows, so that P^T and dS^T are operands as they stand in registers. dQ alone sums
// over keys: each consumer leaves its dS^T in shared memory, and both make one half of dQ from all 128 keys, a block
// later than the rest, so that they need not keep step. dQ leaves by additions in fp32, straight from registers. dK and
// dV are stored from there when the tile ends, while its last dQ is made.
//
// Where dQ shall have the same bits run after run, tiles add to a block of queries one after the other (DqSums). A tile
// waits for tiles alone that were taken before it, so waiting cannot deadlock. Warp 1 asks whether the tile before has
// added, and tells the next one.
//
// When tiles run out, consumers round dq from its sums, wherever all tiles have ended. Where regions share slots
// (Regions in gradient_launch.h), warps 1 and 2 do it all the time, and warp 1 says when the slot of a tile's region is
// free. No tile waits for one that is taken later, and who waits for a slot rounds meanwhile.
//
// The next tile's K is loaded beside this one's, so its first S is made in this one's last turn.
//
// Who waits for whom:
//   key_full / key_empty         per slot: a tile's K and its note
//   value_full / value_empty     V
//   query_full / query_empty     per slot: Q
//   number_full / number_empty   per slot: LSE and Delta, and the block's record, which warp 1 reads too to take turns
//   grad_full / grad_empty       per slot: dO
//   item_full / item_empty, item_due   the next tile and head, from warp 2 to warps 0 and 3; warp 0 asks
//   ds_full                      per slot: dS of both consumers; nobody says that it is read, see kDsSlots
//   sum_due / sum_added          per slot: dQ of a block may be added in order, and has been
//   tile_may_add                 per slot of keys, where regions share slots for their sums: the tile's region has its
//   own
//
// Queries behind the end of a group have a huge LSE, so their weights are 0; keys behind the end of a tile become 0. As
// in attend_sm90.cuh, NaN and infinity there raise a flag, and gradient_rows.cu mends the rows.
#pragma once

#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/feed_gradient_sm90.cuh"
#include "kernels/cuda/wgmma_gradient_sm90.cuh"
#include "kernels/cuda/wgmma_sm90.cuh"

namespace annulus::cuda::sm90 {

// Four lanes side by side have four words each; lane i gets word i of all of them.
__device__ __forceinline__ uint4 transpose_quad(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d,
                                                int quad) {
  const bool odd = (quad & 1) != 0, upper = (quad & 2) != 0;
  const std::uint32_t ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1),
                      cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
  const std::uint32_t a1 = odd ? ab : a, b1 = odd ? b : ab, c1 = odd ? cd : c, d1 = odd ? d : cd;
  const std::uint32_t ac = __shfl_xor_sync(0xffffffffu, upper ? a1 : c1, 2),
                      bd = __shfl_xor_sync(0xffffffffu, upper ? b1 : d1, 2);
  return upper ? uint4{ac, bd, c1, d1} : uint4{a1, b1, ac, bd};
}

template <Sm90GradientConfig C, class T>
__device__ __forceinline__ void consume(const GradientLaunch& g, const GradientShared<C>& sh, int group, int thread) {
  constexpr int kScores = C.query_rows / 2, kSums = C.head_dim / 2;
  constexpr bool kDq = C.sums != DqSums::none;
  constexpr bool kByRows = C.query_rows == 128;  // the consumers' halves of dQ: 64 queries each, or 64 columns each
  static_assert(!kDq || C.ds_slots >= kDsSlots);
  static_assert((C.head_dim == 128 && !kByRows) || (C.head_dim == 64 && kByRows));
  const Launch& launch = g.common;
  const int lane = thread % 32, warp = thread / 32;
  const int row = warp * 16 + lane / 4;  // of this group's 64 keys; the thread has row + 8 too
  const float scale = launch.scale_log2;
  float s[kScores], x[kScores], dq[32], dk[kSums], dv[kSums];
  std::uint32_t prob[kScores / 2], ds[kScores / 2];
  Ring key, value;  // of the tile
  Ring q, grad, d;  // Q and dO; dS of this block
  // dS of the block before, be it another tile's; at first a phase that has passed, of a slot that nobody writes yet.
  Ring d_before{kDsSlots - 1, 1};
  Ring number;  // LSE and Delta: of this block until dS is made, then of the next one
  Ring sum;     // dQ of a block that is added in order
  int block = 0;
  std::uint32_t own_key = sh.key, next_key = sh.key;  // slots: of the tile, and of the next S
  bool goes_on = false;                               // the next tile's first P is made in this one's last turn
  // The next tile begins while this one ends, unless it may wait for this one. (Turns do not count: what is made early
  // is not yet added.)
  const bool flows = launch.sets == nullptr;

  // Ones, 16 along a row as wgmma has them in registers: at the places of LSE, and at those of Delta.
  constexpr std::uint32_t kFirst = 0x3f80u, kSecond = 0x3f800000u;
  const int quad = lane & 3;
  const std::uint32_t of_lse = quad == 0 ? kFirst | kSecond : quad == 1 ? kFirst : 0u;
  const std::uint32_t of_delta = quad == 1 ? kSecond : quad == 2 ? kFirst | kSecond : 0u;
  const std::uint32_t at_lse[4] = {of_lse, of_lse, 0u, 0u}, at_delta[4] = {of_delta, of_delta, 0u, 0u};

  const auto issue_scores = [&](int slot, int numbers) __attribute__((always_inline)) {  // S^T = K Q^T - LSE / scale
    const std::uint64_t a = ptx::descriptor(next_key + group * 8192, 16, 1024);
    const std::uint64_t b = ptx::descriptor(sh.query_slab(slot), 16, 1024);
    ptx::wgmma_fence();
    ptx::multiply_numbers(s, at_lse, ptx::plain_descriptor(sh.number_slab(numbers)));
#pragma unroll
    for (int i = 0; i < C.head_dim / 16; ++i) {  // 16 elements are 32 bytes further in the row of 128 bytes
      const std::uint64_t ai = a + (i % 4) * 2 + i / 4 * 1024, bi = b + (i % 4) * 2 + i / 4 * (C.query_rows * 8);
      ptx::multiply_next<T, 0, 0>(s, ai, bi);
    }
    ptx::wgmma_commit();
  };
  const auto issue_dp = [&](int slot, int numbers) __attribute__((always_inline)) {  // dP^T = V dO^T - Delta
    const std::uint64_t a = ptx::descriptor(sh.value + group * 8192, 16, 1024);
    const std::uint64_t b = ptx::descriptor(sh.grad_slab(slot), 16, 1024);
    ptx::wgmma_fence();
    ptx::multiply_numbers(x, at_delta, ptx::plain_descriptor(sh.number_slab(numbers)));
#pragma unroll
    for (int i = 0; i < C.head_dim / 16; ++i) {
      const std::uint64_t ai = a + (i % 4) * 2 + i / 4 * 1024, bi = b + (i % 4) * 2 + i / 4 * (C.query_rows * 8);
      ptx::multiply_next<T, 0, 0>(x, ai, bi);
    }
    ptx::wgmma_commit();
  };
  const auto issue_sum = [&](float(&sum)[kSums], const std::uint32_t(&a)[kScores / 2], std::uint32_t slab)
      __attribute__((always_inline)) {  // dV += P^T dO, dK += dS^T Q
    const std::uint64_t b = ptx::descriptor(slab, C.query_rows * 128, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.query_rows / 16; ++i) ptx::multiply_add<T>(sum, a + 4 * i, b + i * 128);
    ptx::wgmma_commit();
  };
  const auto issue_dq = [&](int slot) __attribute__((always_inline)) {  // dQ = dS K: 64 x 64 for each group
    const std::uint64_t a = ptx::descriptor(sh.ds + slot * C.ds_bytes() + (kByRows ? group * 16384 : 0), 8192, 1024);
    const std::uint64_t b = ptx::descriptor(own_key + (kByRows ? 0 : group * 16384), 8192, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C.kKeyRows / 16; ++i)
      i == 0 ? ptx::multiply_first<T, 1, 1>(dq, a, b) : ptx::multiply_next<T, 1, 1>(dq, a + i * 128, b + i * 128);
    ptx::wgmma_commit();
  };
  // Whether no query of the block sees this group's keys.
  const auto sees_nothing = [&](int record) __attribute__((always_inline)) {
    const GradientBlock& now = sh.blocks[record];
    return C.causal && now.low + now.low_step * (group * 64) >= C.query_rows && !now.last;
  };
  // In a tile's last turn: whether S of the next tile's first block can be made now. Then its keys and queries are
  // there.
  const auto next_tile_is_there = [&](int record) __attribute__((always_inline)) {
    Ring next = key;
    next.advance<C.kKeySlots>();
    ptx::mbarrier_wait(sh.key_full(next.slot), next.parity);
    const GradientNote& note = sh.notes[next.slot];
    if (note.done || note.empty || note.rows < C.kKeyRows) return false;
    ptx::mbarrier_wait(sh.query_full(q.slot), q.parity);
    ptx::mbarrier_wait(sh.number_full(number.slot), number.parity);
    if (sees_nothing(record)) return false;
    next_key = sh.key_slab(next.slot);
    return true;
  };
  // S becomes P, in the type of the inputs.
  const auto exponentials = [&](int record) __attribute__((always_inline)) {
    ptx::pin(s);
    if constexpr (C.causal) {
      const GradientBlock& now = sh.blocks[record];
      const int low = now.low + now.low_step * (group * 64);  // of the group's first key; later keys have more
      if (low + now.low_step * 63 > 0) {
        const int least[2] = {low + now.low_step * row - (lane & 3) * 2,
                              low + now.low_step * (row + 8) - (lane & 3) * 2};
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          if (i / 4 * 8 + (i & 1) < least[(i >> 1) & 1]) s[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int j = 0; j < kScores / 2; ++j)
      prob[j] = ptx::pack<T>(ptx::exp2_approx(s[2 * j] * scale), ptx::exp2_approx(s[2 * j + 1] * scale));
  };
  // dS = P (dP - Delta), to registers and to shared memory.
  const auto make_ds = [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int j = 0; j < kScores / 2; ++j)
      ds[j] = ptx::multiply_packed<T>(prob[j], ptx::pack<T>(x[2 * j], x[2 * j + 1]));
  };
  const auto share_ds = [&]() __attribute__((always_inline)) {
    const int own = group * 64 + warp * 16 + lane % 16;
    const std::uint32_t to = sh.ds + d.slot * C.ds_bytes() + own * 128 + ((lane / 16) ^ (own & 7)) * 16;
    // The swizzle by one register instead of four: rows begin at multiples of 128.
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i)
      ptx::store_matrix_x4((to ^ (i % 4 * 32)) + i / 4 * 16384, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.ds_full(d.slot));
  };
  const auto put_dq = [&](int record) __attribute__((always_inline)) {
    const GradientBlock& now = sh.blocks[record];
    const int own = (kByRows ? group * 64 : 0) + row;
    float* to = g.dq_sums + now.sums + (lane & 3) * 4 +
                g.sums.place(now.first + now.step * own, C.head_dim, kByRows ? 0 : group * 64);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (own + 8 * r < now.rows)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          ptx::add_4(to + 128 * j, dq[8 * j + 2 * r], dq[8 * j + 2 * r + 1], dq[8 * j + 4 + 2 * r],
                     dq[8 * j + 5 + 2 * r]);
      to += static_cast<std::int64_t>(now.step) * (8 * C.head_dim);  // 8 rows are a whole number of groups further
    }
  };
  const auto add_dq = [&](int record) __attribute__((always_inline)) {
    if constexpr (C.sums == DqSums::in_order)
      ptx::mbarrier_wait(sh.sum_due(sum.slot), sum.parity);
    else if (g.regions.rounded != nullptr)
      ptx::mbarrier_wait(sh.tile_may_add(key.slot), key.parity);
    put_dq(record);
    if constexpr (C.sums == DqSums::in_order) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(sh.sum_added(sum.slot));
      sum.advance<C.kSumSlots>();
    }
  };

  // Whether a thread's first or second row is one of the tile's.
  const auto is_inside = [&](const GradientNote& note, int r) __attribute__((always_inline)) {
    return group * 64 + row + 8 * r < note.rows;
  };
  // dK and dV of a tile to the tensors.
  const auto put_sums = [&](const GradientNote& note) __attribute__((always_inline)) {
    const bool inside[2] = {is_inside(note, 0), is_inside(note, 1)};
    float odd[2] = {0.0f, 0.0f};  // NaN as soon as anything is not finite
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      dk[i] *= g.factor;
      dv[i] *= g.value_factor;
      odd[(i >> 1) & 1] += dk[i] * 0.0f + dv[i] * 0.0f;
    }
    const bool bad = (inside[0] && !(odd[0] == 0.0f)) || (inside[1] && !(odd[1] == 0.0f));
    if (__any_sync(0xffffffffu, bad) && lane == 0) launch.control->non_finite = 1;
    const auto put = [&](float(&sum)[kSums], void* data, const Strides& stride) __attribute__((always_inline)) {
      const std::int64_t first = note.position + static_cast<std::int64_t>(note.stride) * (group * 64 + row);
      T* to = static_cast<T*>(data) + note.batch * stride.batch + note.kv_head * stride.head + first * stride.token +
              quad * 8;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < C.head_dim / 32; ++i) {
          const float* from = sum + 16 * i + 2 * r;
          const uint4 part = transpose_quad(ptx::pack<T>(from[0], from[1]), ptx::pack<T>(from[4], from[5]),
                                            ptx::pack<T>(from[8], from[9]), ptx::pack<T>(from[12], from[13]), quad);
          if (inside[r]) __stcs(reinterpret_cast<uint4*>(to + 32 * i), part);
        }
        to += 8 * static_cast<std::int64_t>(note.stride) * stride.token;
      }
    };
    put(dk, g.dk, g.dk_stride);
    put(dv, g.dv, g.dv_stride);
  };
  // The same to the state, for the tile's next sweep.
  const auto hand_on_sums = [&](const GradientNote& note) __attribute__((always_inline)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!is_inside(note, r)) continue;
      const std::int64_t at = note.state_row + static_cast<std::int64_t>(note.stride) * (group * 64 + row + 8 * r);
      if (quad == 0) __stcg(launch.state_sums + at, float2{0.0f, 1.0f});
      float* to = launch.state_values + at * (2 * C.head_dim) + quad * 2;
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        __stcg(reinterpret_cast<float2*>(to + 8 * j), float2{dk[4 * j + 2 * r], dk[4 * j + 2 * r + 1]});
        __stcg(reinterpret_cast<float2*>(to + C.head_dim + 8 * j), float2{dv[4 * j + 2 * r], dv[4 * j + 2 * r + 1]});
      }
    }
  };

  for (;;) {
    ptx::mbarrier_wait(sh.key_full(key.slot), key.parity);
    const GradientNote& note = sh.notes[key.slot];
    if (note.done) break;
    own_key = next_key = sh.key_slab(key.slot);
#pragma unroll
    for (int i = 0; i < kSums; ++i) dk[i] = dv[i] = 0.0f;
    if (note.continues) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_inside(note, r)) continue;
        const std::int64_t at = note.state_row + static_cast<std::int64_t>(note.stride) * (group * 64 + row + 8 * r);
        if (__ldcg(&launch.state_sums[at].y) == 0.0f) continue;
        const float* from = launch.state_values + at * (2 * C.head_dim) + (lane & 3) * 2;
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
          const float2 k = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
          const float2 v = __ldcg(reinterpret_cast<const float2*>(from + C.head_dim + 8 * j));
          dk[4 * j + 2 * r] = k.x;
          dk[4 * j + 2 * r + 1] = k.y;
          dv[4 * j + 2 * r] = v.x;
          dv[4 * j + 2 * r + 1] = v.y;
        }
      }
      __syncwarp();
      if (note.is_last && (lane & 3) == 0)  // the slot is free again
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (is_inside(note, r))
            launch.state_sums[note.state_row + static_cast<std::int64_t>(note.stride) * (group * 64 + row + 8 * r)] = {
                0.0f, 0.0f};
    }

    if (!note.empty) {
      if (note.rows < C.kKeyRows) {  // what lies behind the tile's end must not reach dQ
        ptx::mbarrier_wait(sh.value_full(), value.parity);
        const int first = max(note.rows, group * 64);
        for (int i = thread; i < (group * 64 + 64 - first) * 8; i += 128)
#pragma unroll
          for (int half = 0; half < C.head_dim / 64; ++half) {
            ptx::store_shared_16(own_key + half * 16384 + first * 128 + i * 16, 0, 0, 0, 0);
            ptx::store_shared_16(sh.value + half * 16384 + first * 128 + i * 16, 0, 0, 0, 0);
          }
        ptx::fence_async();
        ptx::named_sync(kGradientBoth, 256);
      }
      bool first = true, last = false;
      if (!goes_on) {
        ptx::mbarrier_wait(sh.query_full(q.slot), q.parity);
        ptx::mbarrier_wait(sh.number_full(number.slot), number.parity);
        if (sees_nothing(block)) {
          ptx::mbarrier_wait(sh.grad_full(grad.slot), grad.parity);
          if constexpr (kDq) {
            ptx::mbarrier_wait(sh.ds_full(d_before.slot), d_before.parity);
#pragma unroll
            for (int i = 0; i < kScores / 2; ++i) ds[i] = 0;
            share_ds();
            d_before = d;
            d.advance<C.ds_slots>();
          }
          __syncwarp();  // all lanes have seen what is let go
          if (lane == 0) {
            ptx::mbarrier_arrive(sh.query_empty(q.slot));
            ptx::mbarrier_arrive(sh.grad_empty(grad.slot));
            ptx::mbarrier_arrive(sh.number_empty(number.slot));
          }
          q.advance<C.query_slots>();
          grad.advance<C.grad_slots>();
          number.advance<C.kNumberSlots>();
          block = (block + 1) % C.kBlocks;
          first = false;
          ptx::mbarrier_wait(sh.query_full(q.slot), q.parity);
          ptx::mbarrier_wait(sh.number_full(number.slot), number.parity);
        }
        issue_scores(q.slot, number.slot);
        ptx::wgmma_wait<0>();
        exponentials(block);
      }
      ptx::mbarrier_wait(sh.value_full(), value.parity);
      do {
        // P of this block is known.
        last = sh.blocks[block].last;
        ptx::mbarrier_wait(sh.grad_full(grad.slot), grad.parity);
        issue_dp(grad.slot, number.slot);
        issue_sum(dv, prob, sh.grad_slab(grad.slot));
        ptx::wgmma_wait<1>();
        ptx::pin(x);
        make_ds();
        if (lane == 0) ptx::mbarrier_arrive(sh.number_empty(number.slot));
        const int numbers = number.slot;
        number.advance<C.kNumberSlots>();
        if constexpr (kDq) {
          // When the other consumer has shared dS of the block before, it is through with the slot that is written now.
          ptx::mbarrier_wait(sh.ds_full(d_before.slot), d_before.parity);
          share_ds();
        }
        const int now = q.slot, before = (block + C.kBlocks - 1) % C.kBlocks, after = (block + 1) % C.kBlocks;
        q.advance<C.query_slots>();
        goes_on = !last || (flows && next_tile_is_there(after));
        if (!last) {
          ptx::mbarrier_wait(sh.query_full(q.slot), q.parity);
          ptx::mbarrier_wait(sh.number_full(number.slot), number.parity);
        }
        ptx::wgmma_wait<0>();
        // S where there is no next block, and a tile's first dQ, are of nothing and thrown away: cheaper than a second
        // copy of the loop.
        if constexpr (kDq && C.dq_leaves_first) issue_dq(d_before.slot);
        issue_scores(goes_on ? q.slot : now, goes_on ? number.slot : numbers);
        if constexpr (kDq && !C.dq_leaves_first) issue_dq(d_before.slot);
        issue_sum(dk, ds, sh.query_slab(now));
        if (lane == 0) {
          ptx::mbarrier_arrive(sh.grad_empty(grad.slot));
          if (last) ptx::mbarrier_arrive(sh.value_empty());
        }
        grad.advance<C.grad_slots>();
        if constexpr (kDq) {
          d_before = d;
          d.advance<C.ds_slots>();
        }
        // Waits behind exponentials stand in both arms of a branch: ptxas would move a single one above them.
        if constexpr (kDq && C.dq_leaves_first) {
          ptx::wgmma_wait<2>();
          ptx::pin(dq);
          if (!first) add_dq(before);
          ptx::wgmma_wait<1>();
          exponentials(goes_on ? after : block);
        } else if constexpr (kDq) {
          ptx::wgmma_wait<2>();
          exponentials(goes_on ? after : block);
          if (first) {
            ptx::wgmma_wait<1>();
            ptx::pin(dq);
          } else {
            ptx::wgmma_wait<1>();
            ptx::pin(dq);
            add_dq(before);
          }
        } else {
          ptx::wgmma_wait<1>();
          exponentials(goes_on ? after : block);
        }
        if (last) {
          ptx::wgmma_wait<0>();
          ptx::pin(dv);
        } else {
          ptx::wgmma_wait<0>();
          ptx::pin(dk);
        }
        if (lane == 0) ptx::mbarrier_arrive(sh.query_empty(now));
        block = after;
        first = false;
      } while (!last);
      if constexpr (kDq) {
        ptx::mbarrier_wait(sh.ds_full(d_before.slot), d_before.parity);
        issue_dq(d_before.slot);
      }
      ptx::pin(dk);
      ptx::pin(dv);
      value.advance<1>();
    }

    if (note.is_last) {  // a wait in both arms, as above
      put_sums(note);
      __syncwarp();
      ptx::wgmma_wait<0>();
    } else {
      hand_on_sums(note);
      __syncwarp();
      ptx::wgmma_wait<0>();
    }
    if constexpr (kDq) {
      ptx::pin(dq);
      if (!note.empty) add_dq((block + C.kBlocks - 1) % C.kBlocks);
    }
    if (note.signal_set != kNoSet) {
      __threadfence();
      ptx::named_sync(kGradientBoth + 1 + group, 128);
      if (thread == 0) ptx::arrive_global(launch.sets + note.signal_set, 1);
    }
    __syncwarp();  // all lanes have read the note
    if (lane == 0) ptx::mbarrier_arrive(sh.key_empty(key.slot));
    key.advance<C.kKeySlots>();
  }
}

// Called where a block has no tile left. One that has not started may need this one's multiprocessor; if it has a tile
// already, all regions might wait for that: then the rest is left to others. The last to start finds that all have.
template <Sm90GradientConfig C, class T>
__device__ __forceinline__ void round_ended(const GradientLaunch& g, int lane) {
  if (begins_by_number<C>(g) &&
      !__all_sync(delta::kAllLanes, ptx::load_acquire(&g.common.control->started) >= gridDim.x))
    return;
  delta::round_all<T, C.head_dim>(g, lane);
}

// By number: nvcc 13.0 writes stubs that do not compile for kernels with an argument of class type in a namespace.
template <int kConfig, class T, DqSums kSums, int kBranches>
__global__ void __launch_bounds__(kGradientThreads, 1) gradient(const __grid_constant__ GradientParams<kBranches> p) {
  constexpr Sm90GradientConfig C = kGradientConfig<kConfig, kSums>;
  using Params = GradientParams<kBranches>;
  extern __shared__ __align__(1024) std::uint8_t raw[];  // slots begin at multiples of 1024
  const GradientShared<C> sh(raw);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C.kKeySlots; ++i) {
      ptx::mbarrier_init(sh.key_full(i), 1);
      ptx::mbarrier_init(sh.key_empty(i), 9);  // consumer warps, and warp 1
    }
    ptx::mbarrier_init(sh.value_full(), 1);
    ptx::mbarrier_init(sh.value_empty(), 8);
    for (int i = 0; i < C.ds_slots; ++i) ptx::mbarrier_init(sh.ds_full(i), 8);
    for (int i = 0; i < C.query_slots; ++i) {
      ptx::mbarrier_init(sh.query_full(i), 1);
      ptx::mbarrier_init(sh.query_empty(i), 8);
    }
    for (int i = 0; i < C.grad_slots; ++i) {
      ptx::mbarrier_init(sh.grad_full(i), 1);
      ptx::mbarrier_init(sh.grad_empty(i), 8);
    }
    for (int i = 0; i < C.kNumberSlots; ++i) {
      ptx::mbarrier_init(sh.number_full(i), 1);
      ptx::mbarrier_init(sh.number_empty(i), C.sums == DqSums::in_order ? 9 : 8);  // warp 1 reads the record
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(sh.item_full(i), 1);
      ptx::mbarrier_init(sh.item_empty(i), 2);
    }
    ptx::mbarrier_init(sh.item_due(), 1);
    for (int i = 0; C.sums == DqSums::in_order && i < C.kSumSlots; ++i) {
      ptx::mbarrier_init(sh.sum_due(i), 1);
      ptx::mbarrier_init(sh.sum_added(i), 8);
    }
    for (int i = 0; C.sums == DqSums::unordered && i < C.kKeySlots; ++i) ptx::mbarrier_init(sh.tile_may_add(i), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::let_next_start();
  if (group == 0) {
    ptx::registers_down<C.producer_registers()>();
    if (warp == 0) {
      if (lane == 0) Feeder<C, Params>(p, sh).run();
    } else if (warp == 1) {
      Closer<C, T>(p.launch, sh, lane).run();
    } else if (warp == 2) {
      ItemFinder<C, T>(p.launch, sh, lane).run();
    } else {
      Clerk<C>(p.launch, sh, lane).run();
    }
  } else {
    ptx::registers_up<C.consumer_registers>();
    consume<C, T>(p.launch, sh, group - 1, static_cast<int>(threadIdx.x) % 128);
    if constexpr (kSums != DqSums::none)
      if (p.launch.regions.ended != nullptr) round_ended<C, T>(p.launch, lane);
  }
}

}  // namespace annulus::cuda::sm90
