#include "kernels/cpu/forward.h"

#include <cmath>

#include "kernels/groups.h"
#include "kernels/softmax_state.h"
#include "kernels/thread_pool.h"

namespace annulus::cpu {
namespace {

// A dot product of bf16 pairs is scaled afterwards, when a masked logit is -inf already: that needs a scale other than
// 0.
const ForwardTiles& choose_tiles(const Context& context) {
  const bool dot = context.problem.dtype == DType::bf16 && context.scale_log2() != 0.0f;
  return dot ? context.tiles.forward_bf16 : context.tiles.forward;
}

std::vector<QueryBlock> carve_blocks(const Context& context, Carver& carver) {
  std::vector<QueryBlock> blocks;
  for (int slot = 0; slot < context.threads; ++slot) blocks.emplace_back(context, carver);
  return blocks;
}

}  // namespace

QueryBlock::QueryBlock(const Context& context, Carver& carver) : context_(context), tiles_(choose_tiles(context)) {
  const std::int64_t head_dim = context.problem.head_dim;
  const std::int64_t rows = Blocks::max_rows(head_dim);
  const std::int64_t tile_count = (rows + tiles_.query_tile - 1) / tiles_.query_tile;
  values_ = carver.take<float>("tiles", rows * padded(head_dim));
  maximum_ = carver.take<float>("tiles", rows);
  sum_ = carver.take<float>("tiles", rows);
  factor_ = carver.take<float>("tiles", rows);
  packed_queries_ = carver.take<std::byte>("tiles", tile_count * tiles_.query_tile_bytes(head_dim));
  packed_keys_ = carver.take<std::byte>("tiles", tiles_.key_chunk_bytes(head_dim));
  packed_values_ = carver.take<std::byte>("tiles", tiles_.key_chunk_bytes(head_dim));
  scores_ = carver.take<std::byte>("tiles", tiles_.score_bytes);
}

void QueryBlock::begin(const Block& block) {
  block_ = block;
  std::fill_n(values_, rows() * padded(context_.problem.head_dim), 0.0f);
  std::fill_n(maximum_, rows(), kNothing);
  std::fill_n(sum_, rows(), 0.0f);
}

void QueryBlock::attend(const Task& task, const ForwardArgs& args) {
  const Classes classes = classes_of(context_.problem, task.branch, block_.head);
  const Rows block_rows{block_.begin, 1, rows()};
  for_each_group(task, context_.dilation(task), classes, block_rows, context_.positions(),
                 [&](const Rows& queries, const Rows& keys) {
                   attend_group(queries, keys, args);
                   if (task.padded_rows > keys.count) add_zero_keys(queries, task.padded_rows - keys.count);
                 });
}

// Keys outside, queries inside: a chunk of keys is packed once for all queries of the block. Chunks begin at the
// group's first key wherever the block begins, so that a row's sums are the same in every block.
void QueryBlock::attend_group(const Rows& queries, const Rows& keys, const ForwardArgs& args) {
  const std::int64_t head_dim = context_.problem.head_dim;
  const std::int64_t diagonal = diagonal_of(queries, keys);
  const std::int64_t kv_head = context_.kv_head(block_.head);
  const SourceRows q = source_rows(args.q, block_.batch, block_.head, queries);
  const SourceRows k = source_rows(args.k, block_.batch, kv_head, keys);
  const SourceRows v = source_rows(args.v, block_.batch, kv_head, keys);
  const std::int64_t first_row = queries.first - block_.begin;
  const StateRows state{maximum_ + first_row, sum_ + first_row, values_ + first_row * padded(head_dim), queries.stride};
  for (std::int64_t i = 0, tile = 0; i < queries.count; i += tiles_.query_tile, ++tile)
    tiles_.pack_queries(q.part(i, std::min(tiles_.query_tile, queries.count - i)), context_.scale_log2(),
                        packed_queries_ + tile * tiles_.query_tile_bytes(head_dim));
  const std::int64_t last_key = context_.problem.causal ? std::min(keys.count, queries.count + diagonal) : keys.count;
  for (std::int64_t j = 0; j < last_key; j += tiles_.key_chunk) {
    const std::int64_t key_count = std::min(tiles_.key_chunk, keys.count - j);
    tiles_.pack_keys(k.part(j, key_count), packed_keys_);
    const bool values_finite = tiles_.pack_values(v.part(j, key_count), packed_values_);
    for (std::int64_t i = 0, tile = 0; i < queries.count; i += tiles_.query_tile, ++tile) {
      AttendTile work;
      work.query_count = std::min(tiles_.query_tile, queries.count - i);
      work.diagonal = context_.problem.causal ? i + diagonal - j : kNoDiagonal;
      if (work.query_count + work.diagonal <= 0) continue;  // all of these keys lie ahead
      work.queries = packed_queries_ + tile * tiles_.query_tile_bytes(head_dim);
      work.keys = packed_keys_;
      work.values = packed_values_;
      work.values_finite = values_finite;
      work.key_count = key_count;
      work.head_dim = head_dim;
      work.scale_log2 = context_.scale_log2();
      work.scores = scores_;
      work.state = state.from(i, head_dim);
      tiles_.attend(work);
    }
  }
}

// Logit 0 and value 0, `count` times: only the sum notices.
void QueryBlock::add_zero_keys(const Rows& queries, std::int64_t count) {
  const std::int64_t width = padded(context_.problem.head_dim);
  for (std::int64_t i = 0; i < queries.count; ++i) {
    const std::int64_t row = queries[i] - block_.begin;
    if (maximum_[row] < 0.0f) {
      const float shrink = std::exp2(maximum_[row]);
      for (std::int64_t k = 0; k < width; ++k) values_[row * width + k] *= shrink;
      sum_[row] *= shrink;
      maximum_[row] = 0.0f;
    }
    sum_[row] += static_cast<float>(count) * std::exp2(-maximum_[row]);
  }
}

const float* QueryBlock::factors() {
  for (std::int64_t i = 0; i < rows(); ++i)
    factor_[i] = is_covered(maximum_[i]) ? context_.output_scale() / sum_[i] : 0.0f;
  return factor_;
}

float QueryBlock::lse(std::int64_t row) const { return log_sum_exp(maximum_[row], sum_[row]); }

std::vector<MemoryComponent> forward_workspace(const Context& context) {
  Carver carver;
  carve_blocks(context, carver);
  return carver.components();
}

void forward(const Context& context, const ForwardArgs& args) {
  Carver carver(args.workspace.data());
  std::vector<QueryBlock> slots = carve_blocks(context, carver);
  const Blocks blocks(context, context.problem.heads);
  ThreadPool::shared().run(blocks.count(), context.threads, [&](std::int64_t index, int slot) {
    const Block block = blocks[index];
    QueryBlock& work = slots[static_cast<std::size_t>(slot)];
    work.begin(block);
    for (std::int64_t t = block.span->first_task; t < block.span->last_task; ++t)
      work.attend(context.plan.tasks[static_cast<std::size_t>(t)], args);
    const Rows rows{block.begin, 1, work.rows()};
    context.tiles.store_rows(work.values(), rows.count, work.factors(),
                             target_rows(args.out, block.batch, block.head, rows));
    if (!args.lse.empty())
      for (std::int64_t i = 0; i < rows.count; ++i)
        args.lse[static_cast<std::size_t>(context.row_index(block.batch, block.head, rows[i]))] = work.lse(i);
  });
}

}  // namespace annulus::cpu
