// Tiles of the Hopper backward kernel: sizes and their reasons, in one table.
#pragma once

#include "kernels/cuda/gradient_launch.h"
#include "kernels/cuda/tiles_sm90.h"

namespace annulus::cuda {

inline constexpr double kLeastScale = 1e-30;     // LSE / scale has to fit fp32; 1e30 is the most
inline constexpr int kMaxGradientBranches = 12;  // all tensor maps travel as one kernel argument

// One query head's part of a tile of keys, as the finder leaves it.
struct GradientItem {
  Tile tile;  // its head is the query head
  int kv_head = 0;
  bool starts = false;  // the first of its tile
  bool ends = false;    // the last one
  bool done = false;    // there are no more tiles
  TileOrder order = TileOrder::blocks_first;
};

// What consumers and the closing warp want to know of a tile.
struct GradientNote {
  std::int64_t state_row = 0;
  int rows = 0, stride = 1, step = 1;
  int batch = 0, kv_head = 0, position = 0;
  int clear_begin = 0, cell_end = 0;
  int signal_set = kNoSet;
  bool continues = false, is_last = false, empty = false, done = false;
};

// What consumers, and warp 1 where it takes turns, want to know of a block of queries.
struct GradientBlock {
  std::int64_t sums = 0;  // where the head's sums of dq begin
  int first = 0;          // row of the first query in SumLayout,
  int step = 1;           // from one query to the next
  std::int16_t rows = 0;  // queries; the slot may have more rows
  bool last = false;      // of the tile
  int low = 0;            // causal: the first query that sees key 0 of the tile; key i is seen from
  int low_step = 0;       // low + i * low_step on
  int turn = 0;           // so many tiles of the group add to it before this one
};
static_assert(sizeof(GradientBlock) == 32);  // there is hardly a byte left at D = 128

// So that the consumers need not keep step: who finds dS of a block shared by both knows that the other one is through
// with the block two before it, whose slot is written next.
inline constexpr int kDsSlots = 3;

// How dq comes about.
enum class DqSums {
  none,       // by another kernel: dq_sm90.cuh
  unordered,  // added up as tiles come by: other bits in every run
  in_order,   // added up tile after tile, as GradientLaunch::tiles_added says
};

inline constexpr int kGradientThreads = 384;
inline constexpr int kGradientRegisters = 3 * (65536 / kGradientThreads / 8 * 8);  // of a thread of each warpgroup

struct Sm90GradientConfig {
  int head_dim = 0;
  bool causal = false;
  int query_rows = 0;            // of one block
  int query_slots = 0;           // Q of so many blocks
  int grad_slots = 0;            // dO, which is let go half a turn earlier
  bool dq_leaves_first = false;  // before the exponentials of the next block
  int consumer_registers = 240;  // of a thread; producers have what is left
  int rounded_at_once = 2;       // loads of a producer warp in flight, by its registers
  int ds_slots = kDsSlots;       // shared between the consumers, for dQ
  DqSums sums = DqSums::unordered;

  static constexpr int kKeyRows = 128;  // two consumer groups of 64
  static constexpr int kKeySlots = 2;   // the next tile begins while this one still ends
  static constexpr int kBlocks = 4;     // records: those of the numbers, the block whose dQ is late, and one
  static constexpr int kNumberSlots = 2;
  static constexpr int kSumSlots = 2;  // blocks that consumers may add to in order
  // Whether a tile begins with the last queries. Causal tiles that add in the order of their keys do: all of a group
  // meet those, so that one follows the other at once. Those that come from the last one on begin with their own, which
  // the tile behind has just left.
  ANNULUS_HOST_DEVICE constexpr bool walks_back(TileOrder order) const {
    return causal && sums == DqSums::in_order && order == TileOrder::blocks_last;
  }
  ANNULUS_HOST_DEVICE constexpr int producer_registers() const { return kGradientRegisters - 2 * consumer_registers; }
  ANNULUS_HOST_DEVICE constexpr int query_bytes() const { return query_rows * head_dim * 2; }
  ANNULUS_HOST_DEVICE constexpr int key_bytes() const { return kKeyRows * head_dim * 2; }
  ANNULUS_HOST_DEVICE constexpr int ds_bytes() const { return kKeyRows * query_rows * 2; }
  ANNULUS_HOST_DEVICE constexpr int number_bytes() const { return query_rows * 16; }  // LSE and Delta
  ANNULUS_HOST_DEVICE constexpr int barrier_bytes() const {
    return 8 * (2 * kKeySlots + 2 + ds_slots + 2 * query_slots + 2 * grad_slots + 2 * kNumberSlots + 5 +
                (sums == DqSums::in_order    ? 2 * kSumSlots
                 : sums == DqSums::unordered ? kKeySlots
                                             : 0));
  }
  ANNULUS_HOST_DEVICE constexpr int slot_bytes() const {
    return (kKeySlots + 1) * key_bytes() + query_slots * query_bytes() + kNumberSlots * number_bytes() +
           grad_slots * query_bytes() + ds_slots * ds_bytes();
  }
  ANNULUS_HOST_DEVICE constexpr int shared_bytes() const {
    return slot_bytes() + (barrier_bytes() + 15) / 16 * 16 + kBlocks * static_cast<int>(sizeof(GradientBlock)) +
           kKeySlots * static_cast<int>(sizeof(GradientNote)) + 2 * static_cast<int>(sizeof(GradientItem));
  }
};

// dK and dV of 64 keys take 128 registers at D = 128 and 64 at D = 64, S and dP of a block 64 and 128. At D = 64 the dQ
// of the block before has to leave first, or registers spill; its third slot of Q would be 1.2 KB too much, where there
// are sums of dQ. At D = 128 consumers need all registers that they can have, and producers spill for it.
inline constexpr Sm90GradientConfig kSm90GradientConfigs[] = {
    {.head_dim = 128, .causal = false, .query_rows = 64, .query_slots = 3, .grad_slots = 2, .dq_leaves_first = false},
    {.head_dim = 128, .causal = true, .query_rows = 64, .query_slots = 3, .grad_slots = 2, .dq_leaves_first = false},
    {.head_dim = 64,
     .causal = false,
     .query_rows = 128,
     .query_slots = 2,
     .grad_slots = 2,
     .dq_leaves_first = true,
     .consumer_registers = 232,
     .rounded_at_once = 4},
    {.head_dim = 64,
     .causal = true,
     .query_rows = 128,
     .query_slots = 2,
     .grad_slots = 2,
     .dq_leaves_first = true,
     .consumer_registers = 232,
     .rounded_at_once = 4},
};

constexpr Sm90GradientConfig with_sums(Sm90GradientConfig config, DqSums sums) {
  config.sums = sums;
  if (sums == DqSums::none) {  // dS never leaves registers, and every head size has room for three slots
    config.ds_slots = 0;
    config.query_slots = config.grad_slots = 3;
  }
  return config;
}
template <int kConfig, DqSums kSums>
inline constexpr Sm90GradientConfig kGradientConfig = with_sums(kSm90GradientConfigs[kConfig], kSums);

// dQ alone, by tiles of queries.
struct Sm90DqConfig {
  int head_dim = 0;
  bool causal = false;
  int key_rows = 0;  // of one block

  static constexpr int kQueryRows = 128;  // two consumer groups of 64
  static constexpr int kQuerySlots = 2;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kProducerRegisters = kGradientRegisters - 2 * kConsumerRegisters;
  static constexpr int kKeyStages = 3;  // a block is read once more a turn later
  static constexpr int kValueStages = 2;
  static constexpr int kTileRecords = kQuerySlots + 1;  // one is found ahead
  ANNULUS_HOST_DEVICE constexpr int query_bytes() const { return kQueryRows * head_dim * 2; }
  ANNULUS_HOST_DEVICE constexpr int block_bytes() const { return key_rows * head_dim * 2; }
  ANNULUS_HOST_DEVICE constexpr int barrier_bytes() const {
    return 8 * (2 * kQuerySlots + 2 * kKeyStages + 2 * kValueStages + 1);
  }
  ANNULUS_HOST_DEVICE constexpr int shared_bytes() const {  // slots begin at multiples of 1024
    return 1024 + 2 * kQuerySlots * query_bytes() + (kKeyStages + kValueStages) * block_bytes() +
           (barrier_bytes() + 15) / 16 * 16 + kTileRecords * static_cast<int>(sizeof(Tile));
  }
};
// Q and dO twice leave room for 64 keys at D = 128; at D = 64 registers hold S and dP of 128.
inline constexpr Sm90DqConfig kSm90DqConfigs[] = {
    {.head_dim = 128, .causal = false, .key_rows = 64},
    {.head_dim = 128, .causal = true, .key_rows = 64},
    {.head_dim = 64, .causal = false, .key_rows = 128},
    {.head_dim = 64, .causal = true, .key_rows = 128},
};

constexpr bool fits(const Sm90GradientConfig& config) {
  return config.shared_bytes() <= kMostSharedBytes && config.kBlocks > config.kNumberSlots + 1;
}
constexpr bool all_gradients_fit() {
  for (const Sm90GradientConfig& config : kSm90GradientConfigs)
    if (!fits(config) || !fits(with_sums(config, DqSums::none)) || !fits(with_sums(config, DqSums::in_order)))
      return false;
  for (const Sm90DqConfig& config : kSm90DqConfigs)
    if (config.shared_bytes() > kMostSharedBytes) return false;
  return true;
}
static_assert(all_gradients_fit());

}  // namespace annulus::cuda
