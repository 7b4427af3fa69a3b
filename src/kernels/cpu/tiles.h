// What an instruction set offers to the drivers in forward.cc and backward_*.cc: packing strided rows and the
// arithmetic of one tile.
//
// Drivers know tasks, heads and memory; tiles know registers and lanes. A call is tens of microseconds of work, so a
// table of function pointers costs nothing, and each instruction set can be forced and tested on its own. Results of a
// row do not depend on the rows that share its tile: that is why neither block sizes nor the thread count change a bit
// of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/tensor.h"
#include "kernels/diagonal.h"

namespace annulus::cpu {

inline constexpr std::int64_t kMaxHeadDim = 512;

// Rows of fp32 scratch are padded to whole vectors of any instruction set.
constexpr std::int64_t padded(std::int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr std::int64_t round_up(std::int64_t x, std::int64_t unit) { return (x + unit - 1) / unit * unit; }

// Rows of one head in the caller's memory, `stride` elements apart.
struct SourceRows {
  const void* data = nullptr;
  DType dtype = DType::fp32;
  std::int64_t stride = 0;
  std::int64_t count = 0;
  std::int64_t head_dim = 0;

  SourceRows part(std::int64_t first, std::int64_t part_count) const {
    return {static_cast<const char*>(data) + first * stride * size_of(dtype), dtype, stride, part_count, head_dim};
  }
};

struct TargetRows {
  void* data = nullptr;
  DType dtype = DType::fp32;
  std::int64_t stride = 0;
  std::int64_t head_dim = 0;
};

// The running softmax (softmax_state.h) of rows that lie `step` rows apart in a block.
struct StateRows {
  float* maximum = nullptr;  // [rows]
  float* sum = nullptr;      // [rows]
  float* values = nullptr;   // [rows, padded(head_dim)]
  std::int64_t step = 1;

  StateRows from(std::int64_t row, std::int64_t head_dim) const {
    return {maximum + row * step, sum + row * step, values + row * step * padded(head_dim), step};
  }
};

struct AttendTile {
  const void* queries = nullptr;  // packed, of this tile
  const void* keys = nullptr;     // packed chunk
  const void* values = nullptr;   // packed chunk
  bool values_finite = true;
  std::int64_t query_count = 0;
  std::int64_t key_count = 0;
  std::int64_t head_dim = 0;
  Diagonal diagonal = kNoDiagonal;
  float scale_log2 = 0;    // logits in log2 units = scale_log2 * q . k
  void* scores = nullptr;  // scratch of score_bytes
  StateRows state;
};

// Forward. Sizes are in bytes and depend on the head size alone.
struct ForwardTiles {
  std::int64_t query_tile = 0;  // most rows of a tile; queries are packed in whole tiles
  std::int64_t key_chunk = 0;   // most keys of a chunk
  std::int64_t score_bytes = 0;
  std::int64_t (*query_tile_bytes)(std::int64_t head_dim) = nullptr;
  std::int64_t (*key_chunk_bytes)(std::int64_t head_dim) = nullptr;  // of keys, and again of values
  void (*pack_queries)(const SourceRows&, float scale_log2, void* packed) = nullptr;
  void (*pack_keys)(const SourceRows&, void* packed) = nullptr;
  bool (*pack_values)(const SourceRows&, void* packed) = nullptr;  // returns whether all of them are finite
  void (*attend)(const AttendTile&) = nullptr;
};

// One tile of eq. 6. The softmax is known: `lse_log2` is G, `delta` is Delta.
struct DifferentiateTile {
  const float* queries = nullptr;     // packed panels, times scale_log2
  const float* query_rows = nullptr;  // packed rows, times scale_log2; for dk alone
  const float* dout = nullptr;        // packed panels, times output_scale
  const float* dout_rows = nullptr;   // packed rows, times output_scale; for dv alone
  const float* lse_log2 = nullptr;    // [query_count]
  const float* delta = nullptr;       // [query_count]
  const float* keys = nullptr;        // packed columns
  const float* values = nullptr;      // packed columns
  const float* key_rows = nullptr;    // packed rows; for dq alone
  bool finite = true;                 // all of the above
  std::int64_t query_count = 0;
  std::int64_t key_count = 0;
  std::int64_t head_dim = 0;
  Diagonal diagonal = kNoDiagonal;
  float* scratch = nullptr;  // of score_bytes
  float* dq = nullptr;       // += dS k, rows dq_step * padded(head_dim) apart; null: not wanted
  std::int64_t dq_step = 1;
  float* dk =
      nullptr;  // += dS^T q scale_log2, [key_count, padded(head_dim)] rows dk_step apart; null: dk and dv not wanted
  float* dv = nullptr;  // += P^T dout
  std::int64_t dk_step = 1;
};

struct BackwardTiles {
  std::int64_t query_tile = 0;
  std::int64_t key_tile = 0;
  std::int64_t score_bytes = 0;
  std::int64_t (*panel_floats)(std::int64_t head_dim) = nullptr;                 // of query_tile rows packed as panels
  std::int64_t (*column_floats)(std::int64_t head_dim) = nullptr;                // of key_tile rows packed as columns
  void (*pack_panels)(const SourceRows&, float scale, float* packed) = nullptr;  // the left factor of a product
  void (*pack_columns)(const SourceRows&, float* packed) = nullptr;              // the transposed right factor
  bool (*pack_rows)(const SourceRows&, float scale,
                    float* packed) = nullptr;  // the right factor, [count, padded(head_dim)]; are they finite?
  void (*differentiate)(const DifferentiateTile&) = nullptr;
};

struct Tiles {
  std::string_view name;
  ForwardTiles forward;       // fp32 sums of fp32 products, any input type
  ForwardTiles forward_bf16;  // bf16 input; the same as `forward` where there is no bf16 dot product
  BackwardTiles backward;
  // row i of target = factor[i] * row i of source, [count, padded(head_dim)], rounded to nearest even.
  void (*store_rows)(const float* source, std::int64_t count, const float* factor, TargetRows) = nullptr;
  // row i of target += factor * row i of source, [count, padded(head_dim)]. fp32 targets alone.
  void (*add_rows)(const float* source, std::int64_t count, float factor, TargetRows) = nullptr;
  // result[i] = a_i . b_i, of any two types.
  void (*dot_rows)(const SourceRows& a, const SourceRows& b, float* result) = nullptr;
  double (*fma_chains)(std::int64_t rounds) = nullptr;   // returns the FLOP done: the yardstick of peak.h
  double (*bf16_chains)(std::int64_t rounds) = nullptr;  // null where there is no bf16 dot product
};

// What this build has and this CPU can run, best first.
const std::vector<const Tiles*>& available_tiles();

// "" or "auto": the best. Throws InvalidArgument that lists the choices.
const Tiles& find_tiles(std::string_view instruction_set);

}  // namespace annulus::cpu
