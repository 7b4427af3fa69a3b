// Meetings: some rows of one rank against rows of another, as lists of tiles. Where rows that have travelled meet a
// rank's own, groups are cut in ways that no arithmetic of cells follows (tiling.h), so each tile says where everything
// lies.
//
// A tile has rows x (and y) of one head and meets one part after the other, each with rows u and w: queries meet keys
// and values, or, for the gradients of keys, keys and values meet queries and dout. Results are added to fp32 sums, or
// to the softmax state. No two tiles of a list have a row of results in common.
#pragma once

#include <cstdint>

#include "kernels/cuda/tiling.h"

namespace annulus::cuda {

// Rows at + i * stride of memory, both in elements.
struct RowRun {
  std::int64_t at = 0;
  std::int64_t stride = 0;
};

struct MeetingTile {
  RowRun x, y;
  RowRun lse, delta;       // of x, if those are queries
  RowRun sums[2];          // of dq; or of dk and dv
  std::int64_t state = 0;  // forward: the row of state of the first query
  int state_stride = 0;    // of state, from one query to the next
  int rows = 0;
  int first_part = 0;
  int part_count = 0;  // at most kMaxSweepBranches
};

struct MeetingPart {
  RowRun u, w;
  RowRun lse, delta;  // of u, if those are queries
  int rows = 0;
  // Causal: row i of the tile sees the rows up to (of keys), or from (of queries), first + step * i on.
  int first = 0;
  int step = 0;
};

struct Meetings {
  const MeetingTile* tiles = nullptr;
  const MeetingPart* parts = nullptr;
  bool of_keys = false;  // tiles are of keys
  bool causal = false;
  bool aligned = false;  // every row of x, y, u and w begins at a multiple of 16 bytes
};

// The blocks of `block_rows` that a part has for a tile of so many rows.
ANNULUS_HOST_DEVICE int met_blocks(const MeetingPart& part, bool of_keys, bool causal, int tile_rows, int block_rows) {
  if (of_keys) {
    const int blocks = divide_up(part.rows, block_rows) - first_met_block(causal, part.first, block_rows);
    return blocks > 0 ? blocks : 0;
  }
  const int last = causal ? at_most(part.rows - 1, part.first + part.step * (tile_rows - 1)) : part.rows - 1;
  return last < 0 ? 0 : last / block_rows + 1;
}

// Tile `index` of a list.
ANNULUS_HOST_DEVICE void meet(const Meetings& meetings, int index, int block_rows, Tile& tile) {
  const MeetingTile& given = meetings.tiles[index];
  tile = Tile{};
  tile.stride = given.state_stride;
  tile.continues = true;
  tile.rows = given.rows;
  tile.state_row = given.state;
  tile.meeting = index;
  for (int i = 0; i < given.part_count; ++i) {
    const MeetingPart& part = meetings.parts[given.first_part + i];
    TileBranch branch;
    branch.branch = given.first_part + i;
    branch.blocks = met_blocks(part, meetings.of_keys, meetings.causal, given.rows, block_rows);
    branch.keys = part.rows;
    branch.first = part.first;
    branch.step = part.step;
    if (branch.blocks == 0) continue;
    tile.branches[tile.branch_count++] = branch;
    tile.total_blocks += branch.blocks;
  }
}

}  // namespace annulus::cuda
