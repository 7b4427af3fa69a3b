// The packed operands of a backward tile: queries with their dout, G and Delta on one side, keys with their values on
// the other.
#pragma once

#include <cmath>
#include <limits>

#include "annulus/attention.h"
#include "kernels/cpu/backward.h"
#include "kernels/cpu/context.h"
#include "kernels/softmax_state.h"
#include "kernels/workspace.h"

namespace annulus::cpu {

// Which products a tile is packed for.
enum class Wanted { dq, dk_dv, all };

class QueryOperands {
 public:
  QueryOperands(const Context& context, Carver& carver) : context_(context), tiles_(context.tiles.backward) {
    const std::int64_t head_dim = context.problem.head_dim;
    queries_ = carver.take<float>("tiles", tiles_.panel_floats(head_dim));
    dout_ = carver.take<float>("tiles", tiles_.panel_floats(head_dim));
    query_rows_ = carver.take<float>("tiles", tiles_.query_tile * padded(head_dim));
    dout_rows_ = carver.take<float>("tiles", tiles_.query_tile * padded(head_dim));
    lse_log2_ = carver.take<float>("tiles", tiles_.query_tile);
    delta_ = carver.take<float>("tiles", tiles_.query_tile);
  }

  // Rows of the tensors, of one head, at most a tile of them.
  void pack(const QueryTensors& tensors, Wanted wanted, std::int64_t batch, std::int64_t head, const Rows& rows) {
    const SourceRows q = source_rows(tensors.q, batch, head, rows);
    const SourceRows dout = source_rows(tensors.dout, batch, head, rows);
    tiles_.pack_panels(q, context_.scale_log2(), queries_);
    tiles_.pack_panels(dout, context_.output_scale(), dout_);
    finite_ = true;
    if (wanted != Wanted::dq) {
      finite_ = tiles_.pack_rows(q, context_.scale_log2(), query_rows_);
      finite_ = tiles_.pack_rows(dout, context_.output_scale(), dout_rows_) && finite_;
    }
    for (std::int64_t i = 0; i < rows.count; ++i) {
      const float lse = number(tensors.lse, batch, rows[i], head);
      lse_log2_[i] = std::isnan(lse) ? std::numeric_limits<float>::quiet_NaN() : lse * kLog2E;  // see rows-inl.h
      delta_[i] = number(tensors.delta, batch, rows[i], head);
    }
    count_ = rows.count;
  }

  void enter(DifferentiateTile& tile) const {
    tile.queries = queries_;
    tile.query_rows = query_rows_;
    tile.dout = dout_;
    tile.dout_rows = dout_rows_;
    tile.lse_log2 = lse_log2_;
    tile.delta = delta_;
    tile.query_count = count_;
    tile.finite = tile.finite && finite_;
  }

 private:
  static float number(const ConstTensorView& view, std::int64_t batch, std::int64_t row, std::int64_t head) {
    return *reinterpret_cast<const float*>(row_pointer(view, batch, row, head));
  }

  const Context& context_;
  const BackwardTiles& tiles_;
  float *queries_, *dout_, *query_rows_, *dout_rows_, *lse_log2_, *delta_;
  std::int64_t count_ = 0;
  bool finite_ = true;
};

class KeyOperands {
 public:
  KeyOperands(const Context& context, Carver& carver) : tiles_(context.tiles.backward) {
    const std::int64_t head_dim = context.problem.head_dim;
    keys_ = carver.take<float>("tiles", tiles_.column_floats(head_dim));
    values_ = carver.take<float>("tiles", tiles_.column_floats(head_dim));
    key_rows_ = carver.take<float>("tiles", tiles_.key_tile * padded(head_dim));
  }

  void pack(const SourceRows& k, const SourceRows& v, Wanted wanted) {
    tiles_.pack_columns(k, keys_);
    tiles_.pack_columns(v, values_);
    finite_ = wanted == Wanted::dk_dv || tiles_.pack_rows(k, 1.0f, key_rows_);
    count_ = k.count;
  }

  void enter(DifferentiateTile& tile) const {
    tile.keys = keys_;
    tile.values = values_;
    tile.key_rows = key_rows_;
    tile.key_count = count_;
    tile.finite = tile.finite && finite_;
  }

 private:
  const BackwardTiles& tiles_;
  float *keys_, *values_, *key_rows_;
  std::int64_t count_ = 0;
  bool finite_ = true;
};

}  // namespace annulus::cpu
