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
  fetched_ = true;
  std::fill_n(values_, block.count() * padded(context_.problem.head_dim), 0.0f);
  std::fill_n(maximum_, block.count(), kNothing);
  std::fill_n(sum_, block.count(), 0.0f);
}

void QueryBlock::resume(const Block& block, const SoftmaxStates& states) {
  block_ = block;
  states_ = states;
  fetched_ = false;
}

void QueryBlock::fetch() {
  if (fetched_) return;
  fetched_ = true;
  const std::int64_t row = context_.row_index(block_.batch, block_.head, block_.first_row);
  std::copy_n(states_.maximum + row, block_.count(), maximum_);
  std::copy_n(states_.sum + row, block_.count(), sum_);
  context_.tiles.backward.pack_rows(source_rows(states_.values, block_.batch, block_.head, block_.memory()), 1.0f,
                                    values_);
}

void QueryBlock::keep(const SoftmaxStates& states) {
  if (!fetched_) return;
  const std::int64_t row = context_.row_index(block_.batch, block_.head, block_.first_row);
  std::copy_n(maximum_, block_.count(), states.maximum + row);
  std::copy_n(sum_, block_.count(), states.sum + row);
  std::fill_n(factor_, block_.count(), 1.0f);
  context_.tiles.store_rows(values_, block_.count(), factor_,
                            target_rows(states.values, block_.batch, block_.head, block_.memory()));
}

void QueryBlock::attend(const Task& task, const ConstTensorView& q, std::span<const KeySource> sources) {
  const Classes classes = classes_of(context_.problem, task.branch, block_.head);
  const std::int64_t kv_head = context_.kv_head(block_.head);
  for (const KeySource& source : sources) {
    if (!source.serves(task.branch)) continue;
    for_each_group(task, context_.dilation(task), classes, block_.positions, source.rows(),
                   [&](std::int64_t phase_class, const Rows& queries, const Rows& keys) {
                     const Rows rows = block_.find(queries);
                     const KeySource::Found found = source.find(kv_head, phase_class, keys);
                     attend_group({rows, source_rows(q, block_.batch, block_.head, rows.shifted(block_.first_row)),
                                   source_rows(source.tensors.k, block_.batch, found.head, found.rows),
                                   source_rows(source.tensors.v, block_.batch, found.head, found.rows),
                                   context_.problem.causal ? Diagonal::between(queries, keys) : kNoDiagonal});
                   });
  }
}

// Keys outside, queries inside: a chunk of keys is packed once for all queries of the block. Chunks begin at the
// group's first key wherever the block begins, so that a row's sums are the same in every block.
void QueryBlock::attend_group(const Group& group) {
  const std::int64_t head_dim = context_.problem.head_dim;
  const Rows& rows = group.queries;
  const std::int64_t last_key = group.diagonal.visible_keys(rows.count - 1, group.k.count);
  if (last_key == 0) return;
  fetch();
  const StateRows state{maximum_ + rows.first, sum_ + rows.first, values_ + rows.first * padded(head_dim), rows.stride};
  for (std::int64_t i = 0, tile = 0; i < rows.count; i += tiles_.query_tile, ++tile)
    tiles_.pack_queries(group.q.part(i, std::min(tiles_.query_tile, rows.count - i)), context_.scale_log2(),
                        packed_queries_ + tile * tiles_.query_tile_bytes(head_dim));
  for (std::int64_t j = 0; j < last_key; j += tiles_.key_chunk) {
    context_.make_progress();
    const std::int64_t key_count = std::min(tiles_.key_chunk, group.k.count - j);
    tiles_.pack_keys(group.k.part(j, key_count), packed_keys_);
    const bool values_finite = tiles_.pack_values(group.v.part(j, key_count), packed_values_);
    for (std::int64_t i = 0, tile = 0; i < rows.count; i += tiles_.query_tile, ++tile) {
      AttendTile work;
      work.query_count = std::min(tiles_.query_tile, rows.count - i);
      work.diagonal = group.diagonal.from(i, j);
      if (work.diagonal.hides_all(work.query_count)) continue;  // all of these keys lie ahead
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

void QueryBlock::add_padding(const Task& task) {
  if (task.padded_rows == 0) return;
  const Classes classes = classes_of(context_.problem, task.branch, block_.head);
  for_each_group(task, context_.dilation(task), classes, block_.positions, context_.positions(),
                 [&](std::int64_t, const Rows& queries, const Rows& keys) {
                   if (task.padded_rows > keys.count)
                     add_zero_keys(block_.find(queries), task.padded_rows - keys.count);
                 });
}

// Logit 0 and value 0, `count` times: only the sum notices.
void QueryBlock::add_zero_keys(const Rows& queries, std::int64_t count) {
  const std::int64_t width = padded(context_.problem.head_dim);
  for (std::int64_t i = 0; i < queries.count; ++i) {
    const std::int64_t row = queries[i];
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
  for (std::int64_t i = 0; i < block_.count(); ++i)
    factor_[i] = is_covered(maximum_[i]) ? context_.output_scale() / sum_[i] : 0.0f;
  return factor_;
}

float QueryBlock::lse(std::int64_t row) const { return log_sum_exp(maximum_[row], sum_[row]); }

std::vector<MemoryComponent> forward_workspace(const Context& context) {
  Carver carver;
  carve_blocks(context, carver);
  return carver.components();
}

void forward(const Context& context, const ForwardArgs& args, const ForwardStep& step) {
  Carver carver(args.workspace.data());
  std::vector<QueryBlock> slots = carve_blocks(context, carver);
  const Blocks blocks(context, context.problem.heads);
  ThreadPool::shared().run(blocks.count(), context.threads, [&](std::int64_t index, int slot) {
    const Block block = blocks[index];
    QueryBlock& work = slots[static_cast<std::size_t>(slot)];
    step.first ? work.begin(block) : work.resume(block, step.states);
    for (std::int64_t t = block.span->first_task; t < block.span->last_task; ++t) {
      const Task& task = context.plan.tasks[static_cast<std::size_t>(t)];
      work.attend(task, args.q, step.sources);
      if (step.first) work.add_padding(task);
    }
    if (!step.last) return work.keep(step.states);
    work.fetch();
    context.tiles.store_rows(work.values(), block.count(), work.factors(),
                             target_rows(args.out, block.batch, block.head, block.memory()));
    if (!args.lse.empty())
      for (std::int64_t i = 0; i < block.count(); ++i)
        args.lse[static_cast<std::size_t>(context.row_index(block.batch, block.head, block.first_row + i))] =
            work.lse(i);
  });
}

}  // namespace annulus::cpu
