// The producer warpgroup of the Hopper backward kernel (gradient_sm90.cuh) and what it shares with the consumers.
#pragma once

#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/gradient_tiles_sm90.h"
#include "kernels/cuda/produce_sm90.cuh"

namespace annulus::cuda::sm90 {

// For problems of up to so many branches. Most have one or two, and 17 KB of arguments take a while to reach the GPU.
template <int kBranches>
struct GradientParams {
  GradientLaunch launch;
  StridedRows key[kBranches];  // [sweep]
  StridedRows value[kBranches];
  StridedRows query[kBranches];  // [branch of the tiling]
  StridedRows grad[kBranches];
};
inline constexpr int kFewBranches = 2;
static_assert(sizeof(GradientParams<kMaxGradientBranches>) <= 32764);  // of a kernel's arguments

// Named barriers. 0 is __syncthreads.
constexpr int kGradientBoth = 1;  // both consumers; behind it each one's own

// The next item is looked for when so many blocks of the present one are still to be fed: longer than finding it takes.
constexpr int kItemLead = 8;

template <Sm90GradientConfig C>
struct GradientShared {
  std::uint32_t key, value, query, grad, numbers, ds, barriers;
  GradientBlock* blocks;  // [kBlocks], in turn
  GradientNote* notes;    // [kKeySlots], in turn; key_full and key_empty guard them
  GradientItem* items;    // [2], in turn

  __device__ explicit GradientShared(std::uint8_t* raw) {
    key = ptx::shared_address(raw);
    value = key + C.kKeySlots * C.key_bytes();
    numbers = value + C.key_bytes();  // in front of others: compute-sanitizer takes their rows for twice as long
    query = numbers + C.kNumberSlots * C.number_bytes();
    grad = query + C.query_slots * C.query_bytes();
    ds = grad + C.grad_slots * C.query_bytes();
    barriers = ds + C.ds_slots * C.ds_bytes();
    std::uint8_t* rest = raw + (barriers + (C.barrier_bytes() + 15) / 16 * 16 - key);
    blocks = reinterpret_cast<GradientBlock*>(rest);
    notes = reinterpret_cast<GradientNote*>(blocks + C.kBlocks);
    items = reinterpret_cast<GradientItem*>(notes + C.kKeySlots);
  }
  __device__ std::uint32_t key_slab(int slot) const { return key + slot * C.key_bytes(); }
  __device__ std::uint32_t query_slab(int slot) const { return query + slot * C.query_bytes(); }
  __device__ std::uint32_t grad_slab(int slot) const { return grad + slot * C.query_bytes(); }
  __device__ std::uint32_t key_full(int slot) const { return barriers + 8 * slot; }
  __device__ std::uint32_t key_empty(int slot) const { return key_full(C.kKeySlots) + 8 * slot; }
  __device__ std::uint32_t value_full() const { return key_empty(C.kKeySlots); }
  __device__ std::uint32_t value_empty() const { return value_full() + 8; }
  __device__ std::uint32_t ds_full(int slot) const { return value_full() + 16 + 8 * slot; }
  __device__ std::uint32_t query_full(int slot) const { return ds_full(C.ds_slots) + 8 * slot; }
  __device__ std::uint32_t query_empty(int slot) const { return query_full(C.query_slots) + 8 * slot; }
  __device__ std::uint32_t grad_full(int slot) const { return query_empty(C.query_slots) + 8 * slot; }
  __device__ std::uint32_t grad_empty(int slot) const { return grad_full(C.grad_slots) + 8 * slot; }
  __device__ std::uint32_t number_slab(int slot) const { return numbers + slot * C.number_bytes(); }
  __device__ std::uint32_t number_full(int slot) const { return grad_empty(C.grad_slots) + 8 * slot; }
  __device__ std::uint32_t number_empty(int slot) const { return number_full(C.kNumberSlots) + 8 * slot; }
  __device__ std::uint32_t item_full(int slot) const { return number_empty(C.kNumberSlots) + 8 * slot; }
  __device__ std::uint32_t item_empty(int slot) const { return item_full(2) + 8 * slot; }
  __device__ std::uint32_t item_due() const { return item_empty(2); }
  // Where sums of dq are added in order.
  __device__ std::uint32_t sum_due(int slot) const { return item_due() + 8 + 8 * slot; }
  __device__ std::uint32_t sum_added(int slot) const { return sum_due(C.kSumSlots) + 8 * slot; }
  // Where they are added in any order: by the slot of a tile's keys.
  __device__ std::uint32_t tile_may_add(int slot) const { return item_due() + 8 + 8 * slot; }
};

// The window and the region of a tile, or of the note of one.
template <class Named>
__device__ __forceinline__ int window_of(const Regions& regions, const Named& tile) {
  return (tile.cell_end - 1) / static_cast<int>(regions.length);
}
template <class Named>
__device__ __forceinline__ int region_of(const Regions& regions, const Named& tile, int kv_head, int window) {
  return (tile.batch * regions.windows + window) * regions.kv_heads + kv_head;
}

// Two producer warps have little else to do than to wait. Where regions share slots, they round meanwhile.
template <Sm90GradientConfig C, class T>
class PatientWarp {
 public:
  __device__ PatientWarp(const GradientLaunch& g, int lane)
      : shares_slots(C.sums == DqSums::unordered && g.regions.rounded != nullptr), rounder_(g, lane) {}

  __device__ __forceinline__ void wait(std::uint32_t barrier, std::uint32_t parity) {
    if constexpr (C.sums == DqSums::unordered)
      if (shares_slots) {
        while (!__all_sync(delta::kAllLanes, ptx::mbarrier_test(barrier, parity)))
          if (!rounder_.round_some()) ptx::mbarrier_try_wait_asleep(barrier, parity);
        return;
      }
    ptx::mbarrier_wait_asleep(barrier, parity);
  }
  // Until a region has been rounded. If all wait for that, all do it.
  __device__ __forceinline__ void wait_for(const Regions& regions, int region) {
    while (!__all_sync(delta::kAllLanes, ptx::load_acquire(regions.rounded + region) >= regions.runs))
      if (!rounder_.round_some()) __nanosleep(200);
  }
  __device__ __forceinline__ void finish() {
    if (shares_slots) rounder_.finish();
  }

  const bool shares_slots;

 private:
  delta::Rounder<T, C.head_dim, 4, C.rounded_at_once> rounder_;
};

// Whether a block knows its first tile without the counter. Tiles that wait for others go by the counter from the first
// one on: those before them must belong to blocks that run. Where none waits, a block is fed its first one while the
// kernel before, which clears the counter, still runs.
template <Sm90GradientConfig C>
__device__ __forceinline__ bool begins_by_number(const GradientLaunch& g) {
  return C.sums != DqSums::in_order && g.common.sets == nullptr && g.regions.rounded == nullptr;
}

// The query of a part that a tile meets first, the first one of a block; and how far it is from block to block.
template <Sm90GradientConfig C>
__device__ __forceinline__ int first_met(const GradientItem& item, const TileBranch& part) {
  return (first_block(part, C.causal, C.query_rows) + (C.walks_back(item.order) ? part.blocks - 1 : 0)) * C.query_rows;
}
template <Sm90GradientConfig C>
__device__ __forceinline__ int query_step(const GradientItem& item) {
  return C.walks_back(item.order) ? -C.query_rows : C.query_rows;
}

// ---- Producer, warp 2, its first thread: which keys and which head are next

template <Sm90GradientConfig C, class T>
class ItemFinder {
 public:
  __device__ ItemFinder(const GradientLaunch& g, const GradientShared<C>& sh, int lane)
      : g_(g), sh_(sh), lane_(lane), warp_(g, lane) {}

  __device__ __forceinline__ void run() {
    Ring item, due;
    if (warp_.shares_slots) ptx::wait_for_previous();  // which clears what this warp asks while it waits
    for (;;) {
      warp_.wait(sh_.item_empty(item.slot), item.parity ^ 1);
      bool more = false;
      if (lane_ == 0) {
        more = find(sh_.items[item.slot]);
        if (!more) say_started();  // before consumers learn that there is nothing left: see round_ended
        ptx::mbarrier_arrive(sh_.item_full(item.slot));
        if (more) say_started();
      }
      if (!__shfl_sync(delta::kAllLanes, more, 0)) return warp_.finish();
      item.advance<2>();
      // A tile that is taken early is one that no idle multiprocessor can take: the long ones would end last.
      warp_.wait(sh_.item_due(), due.parity);
      due.advance<1>();
    }
  }

 private:
  // The next head of the present tile, or the first one of the next tile that has something to do.
  __device__ __forceinline__ bool find(GradientItem& item) {
    const Launch& launch = g_.common;
    Tile& tile = item.tile;
    for (;;) {
      item.starts = head_ == end_;
      if (item.starts) {
        take_tile(launch);
        if (index_ >= launch.tile_count) {
          item.done = true;
          return false;
        }
        at_ = find_stretch(launch.stretches, launch.stretch_count, index_, at_);
      }
      const Stretch& stretch = launch.stretches[at_];
      place(launch.tiling, stretch, static_cast<unsigned>(index_ - stretch.first_tile), tile);
      item.kv_head = tile.head;
      item.order = stretch.order;
      item.done = false;
      if (item.starts) {
        end_ = (item.kv_head + 1) * launch.sharers;
        head_ = next_head(stretch, tile, item.kv_head * launch.sharers);
      }
      take_head(launch.tiling, stretch, g_.causal, min(head_, end_ - 1), tile);
      head_ = next_head(stretch, tile, min(head_, end_ - 1) + 1);
      item.ends = head_ == end_;
      if (tile.total_blocks > 0 || (tile.is_last && (tile.rows > 0 || tile.step > 1))) return true;
      if (item.starts && g_.regions.ended != nullptr) {
        // Nobody waits for the region's slot here. Some other tile of the region has rows and does, so the region does
        // not end before that.
        ptx::wait_for_previous();  // which clears the counters
        ptx::arrive_global(g_.regions.ended + region_of(g_.regions, tile, item.kv_head, window_of(g_.regions, tile)),
                           1);
      }
      if (tile.signal_set == kNoSet) continue;
      // Whoever waits for this set trusts it for the sets before.
      if (tile.wait_set != kNoSet)
        ptx::wait_global(launch.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
      ptx::arrive_global(launch.sets + tile.signal_set, 2);
    }
  }

  __device__ __forceinline__ void take_tile(const Launch& launch) {
    const bool by_number = begins_by_number<C>(g_);
    if (by_number && index_ < 0) {
      index_ = blockIdx.x;
      return;
    }
    ptx::wait_for_previous();
    index_ = static_cast<std::int64_t>(atomicAdd(&launch.control->next_tile, 1ull)) + (by_number ? gridDim.x : 0);
  }

  // The first head from `head` on that has a query for these keys.
  __device__ __forceinline__ int next_head(const Stretch& stretch, const Tile& tile, int head) const {
    const Tiling& tiling = g_.common.tiling;
    const Sweep& sweep = tiling.sweeps[tile.sweep];
    const int at = tile.position - stretch.document_begin;
    for (; head < end_ && tile.rows > 0; ++head)
      for (int b = sweep.first_branch; b < sweep.first_branch + sweep.branch_count; ++b) {
        const int taken = tiling.classes[static_cast<std::int64_t>(b) * tiling.heads + head];
        const BranchShape& shape = tiling.branches[b];
        if (taken == kEveryClass || (taken != kNoClass && taken == at % shape.segment % shape.dilation)) return head;
      }
    return end_;
  }

  __device__ __forceinline__ void say_started() {
    if (has_said_ || g_.regions.ended == nullptr || !begins_by_number<C>(g_)) return;
    has_said_ = true;
    ptx::wait_for_previous();  // which clears the counters
    ptx::arrive_global(&g_.common.control->started, 1);
  }

  const GradientLaunch& g_;
  const GradientShared<C>& sh_;
  int lane_;
  PatientWarp<C, T> warp_;
  bool has_said_ = false;
  std::int64_t index_ = -1;  // of the tile
  int at_ = 0;               // stretch
  int head_ = 0, end_ = 0;   // query heads of the present tile that are still to come
};

// ---- Producer, warp 0, one thread: what the copy engine brings

template <Sm90GradientConfig C, class Params>
class Feeder {
 public:
  __device__ Feeder(const Params& p, const GradientShared<C>& sh) : p_(p), sh_(sh) {}

  __device__ __forceinline__ void run() {
    Ring item;
    for (;;) {
      ptx::mbarrier_wait_asleep(sh_.item_full(item.slot), item.parity);
      const GradientItem& here = sh_.items[item.slot];
      if (here.done) {
        ptx::mbarrier_wait_asleep(sh_.key_empty(keys_.slot), keys_.parity ^ 1);
        sh_.notes[keys_.slot].done = true;
        ptx::mbarrier_arrive(sh_.key_full(keys_.slot));
        return;
      }
      left_ = here.tile.total_blocks;
      if (left_ <= kItemLead) ptx::mbarrier_arrive(sh_.item_due());
      if (here.starts) feed_keys(here);
      bool values_due = here.starts;
      for (int b = 0; b < here.tile.branch_count; ++b) {
        feed_queries(here, here.tile.branches[b], values_due);
        values_due = false;
      }
      ptx::mbarrier_arrive(sh_.item_empty(item.slot));
      item.advance<2>();
    }
  }

 private:
  __device__ __forceinline__ void feed_queries(const GradientItem& item, const TileBranch& part, bool values_due) {
    const StridedRows& queries = p_.query[part.branch];
    const int residue = part.key_begin % queries.stride;
    int row = part.key_begin / queries.stride + first_met<C>(item, part);
    const int head = item.tile.head, batch = item.tile.batch, row_step = query_step<C>(item);
    for (int n = part.blocks; n > 0; --n, row += row_step) {
      const std::uint32_t query_full = sh_.query_full(query_.slot), grad_full = sh_.grad_full(grad_.slot);
      ptx::mbarrier_wait_asleep(sh_.query_empty(query_.slot), query_.parity ^ 1);
      ptx::mbarrier_arrive_expect(query_full, C.query_bytes());
      load_rows(sh_.query_slab(query_.slot), C.query_rows * 128, C.head_dim, queries, query_full, row, residue, head,
                batch);
      query_.template advance<C.query_slots>();
      ptx::mbarrier_wait_asleep(sh_.grad_empty(grad_.slot), grad_.parity ^ 1);
      ptx::mbarrier_arrive_expect(grad_full, C.query_bytes());
      load_rows(sh_.grad_slab(grad_.slot), C.query_rows * 128, C.head_dim, p_.grad[part.branch], grad_full, row,
                residue, head, batch);
      grad_.template advance<C.grad_slots>();
      if (--left_ == kItemLead) ptx::mbarrier_arrive(sh_.item_due());
      if (values_due) feed_values(item);  // the last tile still has its own when the first queries are fed
      values_due = false;
    }
  }

  __device__ __forceinline__ void feed_keys(const GradientItem& item) {
    const Tile& tile = item.tile;
    const Launch& launch = p_.launch.common;
    ptx::mbarrier_wait_asleep(sh_.key_empty(keys_.slot), keys_.parity ^ 1);
    if (tile.wait_set != kNoSet) ptx::wait_global(launch.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
    write_note(item);
    const std::uint32_t full = sh_.key_full(keys_.slot);
    if (tile.total_blocks == 0) {
      ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_arrive_expect(full, C.key_bytes());
      load_tile(sh_.key_slab(keys_.slot), p_.key[tile.sweep], full, item);
    }
    keys_.template advance<C.kKeySlots>();
  }

  __device__ __forceinline__ void feed_values(const GradientItem& item) {
    ptx::mbarrier_wait_asleep(sh_.value_empty(), value_.parity ^ 1);
    ptx::mbarrier_arrive_expect(sh_.value_full(), C.key_bytes());
    load_tile(sh_.value, p_.value[item.tile.sweep], sh_.value_full(), item);
    value_.template advance<1>();
  }

  __device__ __forceinline__ void load_tile(std::uint32_t to, const StridedRows& rows, std::uint32_t full,
                                            const GradientItem& item) {
    const Tile& tile = item.tile;
    load_rows(to, C.kKeyRows * 128, C.head_dim, rows, full, tile.position / rows.stride, tile.position % rows.stride,
              item.kv_head, tile.batch);
  }

  __device__ __forceinline__ void write_note(const GradientItem& item) {
    const Tile& tile = item.tile;
    GradientNote& note = sh_.notes[keys_.slot];
    note.state_row = tile.state_row;
    note.rows = tile.rows;
    note.stride = tile.stride;
    note.step = tile.step;
    note.batch = tile.batch;
    note.kv_head = item.kv_head;
    note.position = tile.position;
    note.clear_begin = tile.clear_begin;
    note.cell_end = tile.cell_end;
    note.signal_set = tile.signal_set;
    note.continues = tile.continues;
    note.is_last = tile.is_last;
    note.empty = tile.total_blocks == 0;
    note.done = false;
  }

  const Params& p_;
  const GradientShared<C>& sh_;
  Ring query_, grad_, keys_, value_;
  int left_ = 0;  // blocks of the item
};

// ---- Producer, warp 3: LSE and Delta of a block's queries, and what else there is to say of the block

__device__ __forceinline__ std::uint32_t upper(float x) { return __float_as_uint(x) & 0xffff0000u; }

// Of one query, to be added to its column of S and dP by a product with ones: each number as three of 8 bits, which
// together are all of it. Eight of them are a row; the last two are 0.
__device__ __forceinline__ void store_numbers(std::uint32_t to, float a, float b) {
  const std::uint32_t a0 = upper(a), b0 = upper(b);
  const float a_rest = a - __uint_as_float(a0), b_rest = b - __uint_as_float(b0);
  const std::uint32_t a1 = upper(a_rest), b1 = upper(b_rest);
  const std::uint32_t a2 = upper(a_rest - __uint_as_float(a1)), b2 = upper(b_rest - __uint_as_float(b1));
  ptx::store_shared_16(to, a0 >> 16 | a1, a2 >> 16 | b0, b1 >> 16 | b2, 0);
}

template <Sm90GradientConfig C>
class Clerk {
  // LSE of a query that is none, before the scale: finite, since it is multiplied by 0 where Delta is added.
  static constexpr float kNoWeight = 0x1.fep127f;  // the largest bf16

 public:
  __device__ Clerk(const GradientLaunch& g, const GradientShared<C>& sh, int lane)
      : g_(g), sh_(sh), lane_(lane), unscale_(1.442695040888963407f / g.common.scale_log2) {}

  // Consumers have no block without its numbers: none of them adds to dq before the kernel before has cleared the sums.
  __device__ __forceinline__ void run() {
    Ring item;
    ptx::wait_for_previous();
    for (;;) {
      ptx::mbarrier_wait_asleep(sh_.item_full(item.slot), item.parity);
      const GradientItem& here = sh_.items[item.slot];
      if (here.done) return;
      const int branches = here.tile.branch_count;
      for (int b = 0; b < branches; ++b) fetch(here, here.tile.branches[b], here.ends && b + 1 == branches);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(sh_.item_empty(item.slot));
      item.advance<2>();
    }
  }

 private:
  __device__ __forceinline__ void fetch(const GradientItem& item, const TileBranch& part, bool is_last) {
    constexpr int kNumbers = C.query_rows / 32;
    const Tile& tile = item.tile;
    const int dilation = g_.common.tiling.branches[part.branch].dilation;
    int first = first_met<C>(item, part);
    const int query_step = sm90::query_step<C>(item);
    const int step = dilation / g_.sums.stride, position = part.key_begin + dilation * first;
    const std::int64_t at = (static_cast<std::int64_t>(tile.batch) * g_.common.heads + tile.head) * g_.number_rows +
                            g_.numbers.row(position) + static_cast<std::int64_t>(step) * lane_;
    const int window = g_.regions.table == nullptr ? 0 : window_of(g_.regions, tile);
    const SumPlace sums = place_sums(g_, tile.batch, tile.head, region_of(g_.regions, tile, item.kv_head, window),
                                     window * g_.regions.length);
    int row = g_.sums.row(position - static_cast<int>(sums.begin));
    const float* lse_of = g_.ordered_lse + at;
    const float* delta_of = g_.ordered_delta + g_.delta_offset[part.branch] + at;
    static_assert(C.query_rows % kCountPeriod == 0 && 32 % kCountPeriod == 0);  // so a lane's queries count alike
    const float count = static_cast<float>(key_count(g_.common.tiling, tile, part, first + lane_));
    const float less = log2f(count) / g_.common.scale_log2;  // of LSE: the weight is as many times as large
    for (int n = part.blocks; n > 0; --n) {
      const int rows = part.keys - first;
      float lse[kNumbers], delta[kNumbers];
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {  // a row of some other group has weight 0
        const bool there = lane_ + 32 * i < rows;
        // Not read-only: the kernel before may write them while this one runs.
        lse[i] = there ? __ldcg(lse_of + 32 * i * static_cast<std::int64_t>(step)) * unscale_ - less : kNoWeight;
        delta[i] = there ? __ldcg(delta_of + 32 * i * static_cast<std::int64_t>(step)) : 0.0f;
      }
      ptx::mbarrier_wait_asleep(sh_.number_empty(slot_.slot), slot_.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i)
        store_numbers(sh_.number_slab(slot_.slot) + (lane_ + 32 * i) * 16, -lse[i], -delta[i]);
      if (lane_ == 0) {
        GradientBlock& block = sh_.blocks[block_];
        block.sums = sums.first;
        block.first = row;
        block.step = step;
        block.rows = static_cast<std::int16_t>(min(rows, C.query_rows));
        block.low = part.first - first;
        block.low_step = part.step;
        block.last = is_last && n == 1;
        if constexpr (C.sums == DqSums::in_order) block.turn = turn_of(item.order, part, first, C.kKeyRows);
      }
      ptx::fence_async();  // the tensor cores read them
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(sh_.number_full(slot_.slot));
      slot_.template advance<C.kNumberSlots>();
      block_ = (block_ + 1) % C.kBlocks;
      first += query_step;
      row += step * query_step;
      lse_of += static_cast<std::int64_t>(step) * query_step;
      delta_of += static_cast<std::int64_t>(step) * query_step;
    }
  }

  const GradientLaunch& g_;
  const GradientShared<C>& sh_;
  int lane_;
  float unscale_;  // LSE as S has it, before the scale
  Ring slot_;
  int block_ = 0;
};

// ---- Producer, warp 1: zeros in rows of dK and dV that no branch covers; which tiles have added to a block, and
// ended; when a tile may add, where regions share slots

template <Sm90GradientConfig C, class T>
class Closer {
  static constexpr int kChunks = C.head_dim * 2 / 16;  // of a row
  static constexpr int kRowsAtOnce = 32 / kChunks;

 public:
  __device__ Closer(const GradientLaunch& g, const GradientShared<C>& sh, int lane)
      : g_(g), sh_(sh), lane_(lane), chunk_(lane % kChunks), warp_(g, lane) {}

  __device__ __forceinline__ void run() {
    Ring key;
    ptx::wait_for_previous();  // which clears the counters
    for (;; key.advance<C.kKeySlots>()) {
      warp_.wait(sh_.key_full(key.slot), key.parity);
      const GradientNote& note = sh_.notes[key.slot];
      if (note.done) return warp_.finish();
      const int region =
          g_.regions.ended == nullptr ? 0 : region_of(g_.regions, note, note.kv_head, window_of(g_.regions, note));
      if constexpr (C.sums == DqSums::unordered)
        if (warp_.shares_slots) {
          const int before = g_.regions.table[region].before;
          if (before != Region::kNone) warp_.wait_for(g_.regions, before);
          __syncwarp();
          if (lane_ == 0) ptx::mbarrier_arrive(sh_.tile_may_add(key.slot));
        }
      if (note.is_last && note.step > 1) clear(note);
      if constexpr (C.sums == DqSums::in_order)
        if (!note.empty) take_turns();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(sh_.key_empty(key.slot));
      if (g_.regions.ended == nullptr) continue;
      warp_.wait(sh_.key_empty(key.slot), key.parity);  // by now of the consumers too
      if (lane_ == 0) ptx::arrive_global(g_.regions.ended + region, 1);
    }
  }

 private:
  // A block of queries whose dQ is added in order.
  struct Turn {
    unsigned* tiles_added;
    unsigned number;
    bool is_last;
  };

  __device__ __forceinline__ Turn read_turn() {
    ptx::mbarrier_wait_asleep(sh_.number_full(number_.slot), number_.parity);
    const GradientBlock& block = sh_.blocks[block_];
    const Turn turn{g_.tiles_added + (block.sums / C.head_dim + block.first), static_cast<unsigned>(block.turn),
                    block.last};
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(sh_.number_empty(number_.slot));
    number_.template advance<C.kNumberSlots>();
    block_ = (block_ + 1) % C.kBlocks;
    return turn;
  }

  // Consumers add to the blocks of a tile when the tiles before have; when both have, a block is the next tile's. They
  // may be two blocks ahead: the next one is asked for while what they added to this one becomes visible to all.
  __device__ __forceinline__ void take_turns() {
    Turn next = read_turn();
    bool has_next = true;
    unsigned tiles = 0;                            // that are known to have added to the next block
    unsigned *due = nullptr, *due_next = nullptr;  // what counts them, of the blocks that consumers may add to
    int due_count = 0;
    for (;;) {
      while (has_next && due_count < C.kSumSlots) {
        if (tiles < next.number) tiles = __shfl_sync(0xffffffffu, ptx::load_acquire(next.tiles_added), 0);
        if (tiles < next.number && due_count > 0) break;
        if (tiles < next.number) continue;
        if (lane_ == 0) ptx::mbarrier_arrive(sh_.sum_due(asked_.slot));
        asked_.template advance<C.kSumSlots>();
        static_assert(C.kSumSlots == 2);
        if (due_count == 0)
          due = next.tiles_added;
        else
          due_next = next.tiles_added;
        ++due_count;
        has_next = !next.is_last;
        if (has_next) next = read_turn();
        tiles = 0;
      }
      if (due_count == 0) return;
      ptx::mbarrier_wait_asleep(sh_.sum_added(added_.slot), added_.parity);
      added_.template advance<C.kSumSlots>();
      if (has_next) tiles = ptx::load_relaxed(next.tiles_added);
      ptx::fence_gpu();
      __syncwarp();
      if (lane_ == 0) ptx::add_relaxed(due, 1);
      tiles = __shfl_sync(0xffffffffu, tiles, 0);
      due = due_next;
      --due_count;
    }
  }

  // Rows [clear_begin, clear_begin + step) + i * stride but for the tile's own.
  __device__ __forceinline__ void clear(const GradientNote& note) const {
    for (int e = 0; e < note.step; ++e) {
      const int first = note.clear_begin + e;
      if (e == note.position - note.clear_begin || first >= note.cell_end) continue;
      const int count = min(C.kKeyRows, divide_up(note.cell_end - first, note.stride));
      for (int row = lane_ / kChunks; row < count; row += kRowsAtOnce) {
        const std::int64_t position = first + static_cast<std::int64_t>(note.stride) * row;
        clear_chunk(note, g_.dk, g_.dk_stride, position);
        clear_chunk(note, g_.dv, g_.dv_stride, position);
      }
    }
  }

  __device__ __forceinline__ void clear_chunk(const GradientNote& note, void* data, const Strides& stride,
                                              std::int64_t position) const {
    T* to = static_cast<T*>(data) + note.batch * stride.batch + note.kv_head * stride.head + position * stride.token;
    __stcs(reinterpret_cast<uint4*>(to + chunk_ * 8), uint4{0, 0, 0, 0});
  }

  const GradientLaunch& g_;
  const GradientShared<C>& sh_;
  int lane_, chunk_;
  PatientWarp<C, T> warp_;
  Ring number_, asked_, added_;  // sums in order: records read, blocks that are due, and that were added to
  int block_ = 0;
};

}  // namespace annulus::cuda::sm90
