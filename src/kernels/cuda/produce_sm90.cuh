// The producer warpgroup of the Hopper kernel (attend_sm90.cuh) and what it shares with the consumers: tensor maps,
// slots, barriers.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/tiles_sm90.h"

namespace annulus::cuda::sm90 {

// Rows of one tensor at stride r, as (element, row, residue, head, batch): position = row * r + residue. Residues below
// tokens % r have one row more than the others; each kind has its own map, so that no map reaches beyond the tensor.
struct StridedRows {
  CUtensorMap longer;   // residues [0, longer_count)
  CUtensorMap shorter;  // the others
  int longer_count = 0;
  int stride = 1;
};

struct Params {
  Launch common;
  StridedRows query[kMaxBranches];  // [sweep]
  StridedRows key[kMaxBranches];    // [branch of the tiling]
  StridedRows value[kMaxBranches];
};

struct Ring {  // slot and parity of a ring of barriers
  int slot = 0;
  std::uint32_t parity = 0;
  template <int kSlots>
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Named barriers. 0 is __syncthreads.
constexpr int kTurn = 1;    // + consumer: its turn to issue
constexpr int kGroup = 4;   // + consumer: its own 128 threads
constexpr int kStored = 7;  // + 2 * consumer + query slot: O lies in shared memory

template <Sm90Config C>
struct Shared {
  std::uint32_t query, key, value, barriers;
  Tile* tiles;  // [tile_records], in turn; query_full and query_empty guard them too

  __device__ explicit Shared(std::uint8_t* raw) {
    const std::uint32_t start = ptx::shared_address(raw);
    query = (start + 1023) & ~1023u;
    key = query + C.query_slots * C.query_bytes();
    value = key + C.stages * C.block_bytes();
    barriers = value + C.stages * C.block_bytes();
    tiles = reinterpret_cast<Tile*>(raw + (barriers + C.barrier_bytes() - start));
  }
  __device__ std::uint32_t query_full(int slot) const { return barriers + 8 * slot; }
  __device__ std::uint32_t query_empty(int slot) const { return query_full(C.query_slots) + 8 * slot; }
  __device__ std::uint32_t key_full(int slot) const { return query_empty(C.query_slots) + 8 * slot; }
  __device__ std::uint32_t key_empty(int slot) const { return key_full(C.stages) + 8 * slot; }
  __device__ std::uint32_t value_full(int slot) const { return key_empty(C.stages) + 8 * slot; }
  __device__ std::uint32_t value_empty(int slot) const { return value_full(C.stages) + 8 * slot; }
  __device__ std::uint32_t tile_found() const { return value_empty(C.stages); }
  // Tiles lie as [head_dim / 64][rows][128 bytes], the rows of 128 bytes swizzled.
  __device__ std::uint32_t query_slab(int slot, int group) const {
    return query + slot * C.query_bytes() + group * (64 * 128);
  }
};

constexpr int kNoMoreTiles = -1;  // in Tile::sweep

// ---- Producer, warp 1, one thread: which tile is next

// Finding a tile takes a microsecond or two of divisions and loads. It is done while the tile before is attended to.
template <Sm90Config C>
class TileFinder {
 public:
  __device__ TileFinder(const Launch& launch, const Shared<C>& sh) : launch_(launch), sh_(sh) {}

  // The next tile that has something to do, into the next record. That one's last readers are through: they belong to
  // the tile whose query slot the present tile has.
  __device__ __forceinline__ void find() {
    Tile& tile = sh_.tiles[record_.slot];
    // By the counter from the first one on: tiles wait for those before them, so those must belong to blocks that run.
    if (index_ < 0) index_ = take();
    for (;;) {
      if (index_ >= launch_.tile_count) {
        tile.sweep = kNoMoreTiles;
        break;
      }
      at_ = find_stretch(launch_.stretches, launch_.stretch_count, index_, at_);
      const Stretch& stretch = launch_.stretches[at_];
      locate(launch_.tiling, stretch, static_cast<unsigned>(index_ - stretch.first_tile), tile);
      index_ = take();
      if (!has_nothing_to_do(tile)) break;
      if (tile.signal_set == kNoSet) continue;
      // Whoever waits for this set trusts it for the sets before. Those need no store, so waiting here blocks nobody.
      if (tile.wait_set != kNoSet)
        ptx::wait_global(launch_.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
      ptx::arrive_global(launch_.sets + tile.signal_set, C.groups);
    }
    record_.advance<C.tile_records()>();
    ptx::mbarrier_arrive(sh_.tile_found());
  }

 private:
  __device__ __forceinline__ std::int64_t take() const {
    return static_cast<std::int64_t>(atomicAdd(&launch_.control->next_tile, 1ull));
  }

  const Launch& launch_;
  const Shared<C>& sh_;
  std::int64_t index_ = -1;  // of the next tile
  int at_ = 0;               // stretch
  Ring record_;
};

// ---- Producer, warp 0, one thread: what the consumers read

__device__ __forceinline__ void load_rows(std::uint32_t to, int bytes_apart, int head_dim, const StridedRows& rows,
                                          std::uint32_t barrier, int row, int residue, int head, int batch) {
  const bool longer = residue < rows.longer_count;
  const CUtensorMap* map = longer ? &rows.longer : &rows.shorter;
  const int plane = longer ? residue : residue - rows.longer_count;
  for (int part = 0; part < head_dim / 64; ++part)
    ptx::tensor_load(to + part * bytes_apart, map, barrier, part * 64, row, plane, head, batch);
}

template <Sm90Config C>
__device__ __forceinline__ void feed(const Params& p, const Shared<C>& sh) {
  const Launch& launch = p.common;
  Ring found, record, query, key, value;
  for (;;) {
    ptx::mbarrier_wait(sh.tile_found(), found.parity);
    const Tile& tile = sh.tiles[record.slot];
    found.advance<1>();
    record.advance<C.tile_records()>();
    ptx::mbarrier_wait(sh.query_empty(query.slot), query.parity ^ 1);
    const std::uint32_t full = sh.query_full(query.slot);
    if (tile.sweep == kNoMoreTiles) {
      ptx::mbarrier_arrive(full);
      return;
    }
    if (tile.wait_set != kNoSet) ptx::wait_global(launch.sets + tile.wait_set, static_cast<unsigned>(tile.wait_count));
    const int groups = (tile.rows + 63) / 64;  // that have rows
    const StridedRows& query_rows = p.query[tile.sweep];
    ptx::mbarrier_arrive_expect(full, groups * (64 * C.head_dim * 2));
    for (int g = 0; g < groups; ++g)
      load_rows(sh.query_slab(query.slot, g), C.query_rows() * 128, C.head_dim, query_rows, full,
                tile.position / query_rows.stride + g * 64, tile.position % query_rows.stride, tile.head, tile.batch);
    query.advance<C.query_slots>();

    // V comes one block behind K: that is the order in which consumers let go of slots.
    const int kv_head = tile.head / launch.sharers;
    const int total = tile.total_blocks;
    int branch = 0, b = -1, n = 0, blocks = 0, row = 0, residue = 0;  // of the key block
    int value_branch = 0, value_row = 0, value_residue = 0;           // of the block before
    for (int i = 0; i <= total; ++i) {
      if (i < total) {
        if (++n >= blocks) {
          const TileBranch& part = tile.branches[++b];
          branch = part.branch;
          blocks = part.blocks;
          n = 0;
          row = part.key_begin / p.key[branch].stride;
          residue = part.key_begin % p.key[branch].stride;
        }
        const std::uint32_t barrier = sh.key_full(key.slot);
        ptx::mbarrier_wait(sh.key_empty(key.slot), key.parity ^ 1);
        ptx::mbarrier_arrive_expect(barrier, C.block_bytes());
        load_rows(sh.key + key.slot * C.block_bytes(), C.key_rows * 128, C.head_dim, p.key[branch], barrier,
                  row + n * C.key_rows, residue, kv_head, tile.batch);
        key.advance<C.stages>();
      }
      if (i > 0) {
        const std::uint32_t barrier = sh.value_full(value.slot);
        ptx::mbarrier_wait(sh.value_empty(value.slot), value.parity ^ 1);
        ptx::mbarrier_arrive_expect(barrier, C.block_bytes());
        load_rows(sh.value + value.slot * C.block_bytes(), C.key_rows * 128, C.head_dim, p.value[value_branch], barrier,
                  value_row, value_residue, kv_head, tile.batch);
        value.advance<C.stages>();
      }
      value_branch = branch;
      value_row = row + n * C.key_rows;
      value_residue = residue;
    }
  }
}

// ---- Producer, warps 1 and up: one consumer's rows of O to memory, past the cache that keeps keys and values

// Rows that no branch covers: [begin, begin + step) + i * stride for i in [0, 64), but for the tile's own, before end.
struct Uncovered {
  int begin = 0, end = 0, stride = 1, step = 0;
  int own = 0;           // begin + own is covered
  void* out = nullptr;   // of the head, row 0
  float* lse = nullptr;  // of the head; or null
};

template <Sm90Config C, class T>
__device__ __forceinline__ void clear(const Uncovered& rows, std::int64_t token_stride, int lane) {
  constexpr int kChunks = C.head_dim * 2 / 16;  // of a row
  constexpr int kRowsAtOnce = 32 / kChunks;
  const std::int64_t hop = static_cast<std::int64_t>(rows.stride) * kRowsAtOnce * token_stride;
  for (int e = 0; e < rows.step; ++e) {
    const int first = rows.begin + e;
    if (e == rows.own || first >= rows.end) continue;
    const int count = min(64, divide_up(rows.end - first, rows.stride));
    T* to = static_cast<T*>(rows.out) +
            (first + static_cast<std::int64_t>(rows.stride) * (lane / kChunks)) * token_stride + lane % kChunks * 8;
#pragma unroll 8
    for (int row = lane / kChunks; row < count; row += kRowsAtOnce, to += hop)
      __stcs(reinterpret_cast<uint4*>(to), uint4{0, 0, 0, 0});
    if (rows.lse != nullptr)
      for (int row = lane; row < count; row += 32)
        rows.lse[first + static_cast<std::int64_t>(rows.stride) * row] = -INFINITY;
  }
}

template <Sm90Config C, class T>
__device__ __forceinline__ void store(const Params& p, const Shared<C>& sh, int group, int lane) {
  constexpr int kChunks = C.head_dim * 2 / 16;
  constexpr int kRowsAtOnce = 32 / kChunks;
  const Launch& launch = p.common;
  const int chunk = lane % kChunks;
  TileFinder<C> finder(launch, sh);
  const bool finds = group == 0 && lane == 0;
  if (finds) finder.find();
  Uncovered uncovered;  // of the tile before: cleared when the next tile has been found, for that is waited for
  Ring query, record;
  for (;;) {
    ptx::mbarrier_wait(sh.query_full(query.slot), query.parity);
    const Tile& tile = sh.tiles[record.slot];
    record.advance<C.tile_records()>();
    const bool done = tile.sweep == kNoMoreTiles;
    if (finds && !done) finder.find();
    __syncwarp();
    clear<C, T>(uncovered, launch.out_stride.token, lane);
    if (done) return;
    T* const out =
        static_cast<T*>(launch.out) + tile.batch * launch.out_stride.batch + tile.head * launch.out_stride.head;
    uncovered.step = tile.is_last && tile.step > 1 ? tile.step : 0;
    if (uncovered.step > 0) {
      uncovered.begin = tile.clear_begin + tile.stride * group * 64;
      uncovered.end = tile.cell_end;
      uncovered.stride = tile.stride;
      uncovered.own = tile.position - tile.clear_begin;
      uncovered.out = out;
      uncovered.lse =
          launch.lse == nullptr
              ? nullptr
              : launch.lse + (static_cast<std::int64_t>(tile.batch) * launch.heads + tile.head) * launch.tokens;
    }
    ptx::named_sync(kStored + 2 * group + query.slot, 160);
    if (tile.is_last) {
      const int rows = min(tile.rows - group * 64, 64);
      const std::uint32_t slab = sh.query_slab(query.slot, group) + chunk / 8 * (C.query_rows() * 128);
      const std::int64_t hop = static_cast<std::int64_t>(tile.stride) * kRowsAtOnce * launch.out_stride.token;
      T* to = out +
              (tile.position + static_cast<std::int64_t>(tile.stride) * (group * 64 + lane / kChunks)) *
                  launch.out_stride.token +
              chunk * 8;
#pragma unroll 4
      for (int row = lane / kChunks; row < rows; row += kRowsAtOnce, to += hop)
        __stcs(reinterpret_cast<uint4*>(to), ptx::load_shared_16(slab + row * 128 + ((chunk % 8) ^ (row & 7)) * 16));
    }
    ptx::fence_async();  // the copy engine writes here next
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.query_empty(query.slot));
    query.advance<C.query_slots>();
  }
}

}  // namespace annulus::cuda::sm90
