// Tiles of keys, for host and device. A tile of keys is a tile of queries (tiling.h) with the parts exchanged:
// keys first, first + stride, ... of one cell lie in one segment and one class of every branch of a sweep, so the
// queries that see them are, branch by branch, the rows of one group. TileBranch then counts queries where it says
// keys.
#pragma once

#include "kernels/cuda/tiling.h"

namespace annulus::cuda {

// The first block of queries that a tile of keys meets, blocks of `rows`.
ANNULUS_HOST_DEVICE int first_block(const TileBranch& part, bool causal, int rows) {
  return first_met_block(causal, part.first, rows);
}

// Where tiles of a group add to dq one after the other: how many come before a tile at the block of queries that begins
// at row `query` of the group. From the last tile on, those are the tiles that see the block and have later keys.
ANNULUS_HOST_DEVICE int turn_of(TileOrder order, const TileBranch& part, int query, int key_rows) {
  const int tile = part.first / key_rows;
  return order == TileOrder::blocks_back ? query / key_rows - tile : tile;
}

// The parts of a tile of keys as one query head has them.
ANNULUS_HOST_DEVICE void take_head(const Tiling& tiling, const Stretch& stretch, bool causal, int head, Tile& tile) {
  tile.head = head;
  gather_parts(tiling, stretch, causal ? Sight::behind : Sight::all, tile);
  tile.total_blocks = 0;
  for (int b = 0; b < tile.branch_count; ++b) {
    TileBranch& part = tile.branches[b];
    part.blocks -= first_block(part, causal, tiling.shape.key_rows);
    tile.total_blocks += part.blocks;
  }
}

}  // namespace annulus::cuda
