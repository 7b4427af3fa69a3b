// Tiles of the Hopper kernel: sizes and their reasons, in one table.
#pragma once

#include "kernels/cuda/tiling.h"

namespace annulus::cuda {

struct Sm90Config {
  int head_dim = 0;
  bool causal = false;
  int groups = 0;    // consumer warpgroups, 64 query rows each
  int key_rows = 0;  // of one block
  int stages = 0;    // slots of K, and of V
  int query_slots = 2;
  int consumer_registers = 0;
  int producer_registers = 0;

  ANNULUS_HOST_DEVICE constexpr int query_rows() const { return groups * 64; }
  ANNULUS_HOST_DEVICE constexpr int query_bytes() const { return query_rows() * head_dim * 2; }
  ANNULUS_HOST_DEVICE constexpr int block_bytes() const { return key_rows * head_dim * 2; }
  ANNULUS_HOST_DEVICE constexpr int tile_records() const { return query_slots + 1; }  // one is found ahead
  ANNULUS_HOST_DEVICE constexpr int threads() const { return (groups + 1) * 128; }
  ANNULUS_HOST_DEVICE constexpr int barrier_bytes() const { return 8 * (2 * query_slots + 4 * stages + 1); }
  ANNULUS_HOST_DEVICE constexpr int shared_bytes() const {  // slots begin at multiples of 1024
    return 1024 + query_slots * query_bytes() + 2 * stages * block_bytes() + barrier_bytes() +
           tile_records() * static_cast<int>(sizeof(Tile));
  }
  // setmaxnreg deals from what the block was launched with, (65536 / threads, down to a multiple of 8) * threads.
  // Asking for more hangs without a word.
  ANNULUS_HOST_DEVICE constexpr bool registers_fit() const {
    return groups * consumer_registers + producer_registers <= (groups + 1) * (65536 / threads() / 8 * 8);
  }
};

// Two groups of 64 rows alternate at D = 128, where accumulators take 64 registers for O and 80 for S; 160 keys a block
// are 3 to 5 % faster than 128. When causal, smaller blocks waste less on the diagonal.
// At D = 64 the exponentials weigh twice as much and it takes three groups to hide them; a third stage is worth 2 %.
inline constexpr Sm90Config kSm90Configs[] = {
    {.head_dim = 128,
     .causal = false,
     .groups = 2,
     .key_rows = 160,
     .stages = 2,
     .consumer_registers = 232,
     .producer_registers = 40},
    {.head_dim = 128,
     .causal = true,
     .groups = 2,
     .key_rows = 128,
     .stages = 2,
     .consumer_registers = 232,
     .producer_registers = 40},
    {.head_dim = 64,
     .causal = false,
     .groups = 3,
     .key_rows = 128,
     .stages = 3,
     .consumer_registers = 160,
     .producer_registers = 32},
    {.head_dim = 64,
     .causal = true,
     .groups = 3,
     .key_rows = 128,
     .stages = 3,
     .consumer_registers = 160,
     .producer_registers = 32},
};
inline constexpr int kMostSharedBytes = 232448;  // of one block on sm_90

constexpr bool all_fit() {
  for (const Sm90Config& config : kSm90Configs)
    if (!config.registers_fit() || config.shared_bytes() > kMostSharedBytes) return false;
  return true;
}
static_assert(all_fit());

}  // namespace annulus::cuda
