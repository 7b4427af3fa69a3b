// Two passes over blocks, like forward: one keeps the dq of a block of queries, the other dk and dv of a block of keys, each in fp32
// scratch through all branches and heads until it is complete and can be rounded once.
#include "kernels/cpu/backward.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/operands.h"
#include "kernels/groups.h"
#include "kernels/thread_pool.h"

namespace annulus::cpu {
namespace {

class SplitBlock {
 public:
  SplitBlock(const Context& context, Carver& carver)
      : context_(context), tiles_(context.tiles.backward), queries_(context, carver), keys_(context, carver) {
    const std::int64_t rows = Blocks::max_rows(context.problem.head_dim);
    const std::int64_t width = padded(context.problem.head_dim);
    scratch_ = carver.take<float>("tiles", tiles_.score_bytes / 4);
    first_ = carver.take<float>("tiles", rows * width);
    second_ = carver.take<float>("tiles", rows * width);
    factors_ = carver.take<float>("tiles", rows);
  }

  void compute_dq(const Block& block, const BackwardArgs& args, const Deltas& deltas) {
    begin(block, first_);
    for_each_task([&](const Task& task) {
      if (!takes_part(task.heads, block_.head)) return;
      for_each_group(task, Side::queries, block_.begin, block_.end, [&](const Rows& queries, const Rows& keys) {
        for_each_tile(keys, tiles_.key_tile, [&](std::int64_t, const Rows& key_rows) {
          keys_.pack(args, Wanted::dq, block_.batch, context_.kv_head(block_.head), key_rows);
          pass_queries(args, deltas.of_branch(task.branch), Wanted::dq, queries, key_rows);
        });
      });
    });
    store(args.dq, first_, static_cast<float>(*context_.problem.scale));
  }

  // The block's head is a key/value head.
  void compute_dk_dv(const Block& block, const BackwardArgs& args, const Deltas& deltas) {
    begin(block, first_);
    std::fill_n(second_, (block.end - block.begin) * padded(context_.problem.head_dim), 0.0f);
    const std::int64_t sharers = context_.problem.heads / context_.problem.kv_heads;
    for_each_task([&](const Task& task) {
      const Rows heads = cut(task.heads, block.head * sharers, (block.head + 1) * sharers);
      if (heads.empty()) return;
      for_each_group(task, Side::keys, block.begin, block.end, [&](const Rows& queries, const Rows& keys) {
        for_each_tile(keys, tiles_.key_tile, [&](std::int64_t, const Rows& key_rows) {
          keys_.pack(args, Wanted::dk_dv, block.batch, block.head, key_rows);
          for (std::int64_t h = 0; h < heads.count; ++h) {
            block_.head = heads[h];
            pass_queries(args, deltas.of_branch(task.branch), Wanted::dk_dv, queries, key_rows);
          }
        });
      });
    });
    block_.head = block.head;
    store(args.dk, first_, kLn2);  // packed queries carry scale * log2(e)
    store(args.dv, second_, 1.0f);
  }

 private:
  template <class F>
  void for_each_task(F f) const {
    for (std::int64_t t = block_.span->first_task; t < block_.span->last_task; ++t) f(context_.plan.tasks[static_cast<std::size_t>(t)]);
  }

  template <class F>
  static void for_each_tile(const Rows& rows, std::int64_t tile, F f) {
    for (std::int64_t i = 0; i < rows.count; i += tile) f(i, Rows{rows[i], rows.stride, std::min(tile, rows.count - i)});
  }

  void begin(const Block& block, float* sums) {
    block_ = block;
    std::fill_n(sums, (block.end - block.begin) * padded(context_.problem.head_dim), 0.0f);
  }

  // The packed keys meet all these queries of head block_.head.
  void pass_queries(const BackwardArgs& args, const float* delta, Wanted wanted, const Rows& queries, const Rows& keys) {
    const std::int64_t width = padded(context_.problem.head_dim);
    const std::int64_t diagonal = diagonal_of(queries, keys);
    for_each_tile(queries, tiles_.query_tile, [&](std::int64_t first, const Rows& rows) {
      DifferentiateTile tile;
      tile.diagonal = context_.problem.causal ? first + diagonal : kNoDiagonal;
      if (rows.count + tile.diagonal <= 0) return;  // all of these queries lie before
      queries_.pack(args, delta, wanted, block_.batch, block_.head, rows);
      queries_.enter(tile);
      keys_.enter(tile);
      tile.head_dim = context_.problem.head_dim;
      tile.scratch = scratch_;
      if (wanted == Wanted::dq) {
        tile.dq = first_ + (rows.first - block_.begin) * width;
        tile.dq_step = rows.stride;
      } else {
        tile.dk = first_ + (keys.first - block_.begin) * width;
        tile.dv = second_ + (keys.first - block_.begin) * width;
        tile.dk_step = keys.stride;
      }
      tiles_.differentiate(tile);
    });
  }

  void store(const TensorView& view, const float* sums, float factor) {
    const Rows rows{block_.begin, 1, block_.end - block_.begin};
    std::fill_n(factors_, rows.count, factor);
    context_.tiles.store_rows(sums, rows.count, factors_, target_rows(view, block_.batch, block_.head, rows));
  }

  const Context& context_;
  const BackwardTiles& tiles_;
  QueryOperands queries_;
  KeyOperands keys_;
  Block block_;
  float *scratch_, *first_, *second_, *factors_;
};

}  // namespace

void backward_split(const Context& context, const BackwardArgs& args, const Deltas& deltas, Carver& carver) {
  std::vector<SplitBlock> slots;
  for (int slot = 0; slot < context.threads; ++slot) slots.emplace_back(context, carver);
  if (carver.measuring()) return;
  const Blocks query_blocks(context, context.problem.heads);
  ThreadPool::shared().run(query_blocks.count(), context.threads, [&](std::int64_t index, int slot) {
    slots[static_cast<std::size_t>(slot)].compute_dq(query_blocks[index], args, deltas);
  });
  const Blocks key_blocks(context, context.problem.kv_heads);
  ThreadPool::shared().run(key_blocks.count(), context.threads, [&](std::int64_t index, int slot) {
    slots[static_cast<std::size_t>(slot)].compute_dk_dv(key_blocks[index], args, deltas);
  });
}

}  // namespace annulus::cpu
