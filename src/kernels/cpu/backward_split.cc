// Two passes over blocks, like forward: one keeps the dq of a block of queries, the other dk and dv of a block of keys,
// each in fp32 scratch through all branches and heads until it is complete and can be rounded once. One rank alone has
// this form: its rows of memory are the positions.
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

  void compute_dq(const Block& block, const PhaseArgs& phase) {
    const BackwardArgs& args = phase.args;
    begin(block, first_);
    for_each_task([&](const Task& task) {
      const Classes classes = classes_of(context_.problem, task.branch, block.head);
      for_each_group(task, context_.dilation(task), classes, rows(), context_.positions(),
                     [&](std::int64_t, const Rows& queries, const Rows& keys) {
                       for_each_tile(keys, tiles_.key_tile, [&](std::int64_t, const Rows& key_rows) {
                         pack_keys(args, Wanted::dq, context_.kv_head(block.head), key_rows);
                         pass_queries(query_tensors(context_, phase, task.branch), Wanted::dq, block.head, queries,
                                      key_rows);
                       });
                     });
    });
    store(args.dq, first_, static_cast<float>(*context_.problem.scale));
  }

  // The block's head is a key/value head.
  void compute_dk_dv(const Block& block, const PhaseArgs& phase) {
    const BackwardArgs& args = phase.args;
    begin(block, first_);
    std::fill_n(second_, rows().count * padded(context_.problem.head_dim), 0.0f);
    for_each_task([&](const Task& task) {
      for (const Takers& takers : takers_of(context_.problem, task.branch, block.head))
        for_each_group(task, context_.dilation(task), takers.classes, context_.positions(), rows(),
                       [&](std::int64_t, const Rows& queries, const Rows& keys) {
                         for_each_tile(keys, tiles_.key_tile, [&](std::int64_t, const Rows& key_rows) {
                           pack_keys(args, Wanted::dk_dv, block.head, key_rows);
                           for (const std::int64_t head : takers.heads)
                             pass_queries(query_tensors(context_, phase, task.branch), Wanted::dk_dv, head, queries,
                                          key_rows);
                         });
                       });
    });
    store(args.dk, first_, kLn2);  // packed queries carry scale * log2(e)
    store(args.dv, second_, 1.0f);
  }

 private:
  template <class F>
  void for_each_task(F f) const {
    for (std::int64_t t = block_.span->first_task; t < block_.span->last_task; ++t)
      f(context_.plan.tasks[static_cast<std::size_t>(t)]);
  }

  template <class F>
  static void for_each_tile(const Rows& rows, std::int64_t tile, F f) {
    for (std::int64_t i = 0; i < rows.count; i += tile)
      f(i, Rows{rows[i], rows.stride, std::min(tile, rows.count - i)});
  }

  Rows rows() const { return block_.positions; }

  void begin(const Block& block, float* sums) {
    block_ = block;
    std::fill_n(sums, rows().count * padded(context_.problem.head_dim), 0.0f);
  }

  void pack_keys(const BackwardArgs& args, Wanted wanted, std::int64_t kv_head, const Rows& keys) {
    keys_.pack(source_rows(args.k, block_.batch, kv_head, keys), source_rows(args.v, block_.batch, kv_head, keys),
               wanted);
  }

  // The packed keys meet all these queries of one head.
  void pass_queries(const QueryTensors& tensors, Wanted wanted, std::int64_t head, const Rows& queries,
                    const Rows& keys) {
    const std::int64_t width = padded(context_.problem.head_dim);
    const Diagonal diagonal = Diagonal::between(queries, keys);
    for_each_tile(queries, tiles_.query_tile, [&](std::int64_t first, const Rows& tile_rows) {
      DifferentiateTile tile;
      if (context_.problem.causal) tile.diagonal = diagonal.from(first, 0);
      if (tile.diagonal.hides_all(tile_rows.count)) return;  // all of these queries lie before
      context_.make_progress();
      queries_.pack(tensors, wanted, block_.batch, head, tile_rows);
      queries_.enter(tile);
      keys_.enter(tile);
      tile.head_dim = context_.problem.head_dim;
      tile.scratch = scratch_;
      if (wanted == Wanted::dq) {
        tile.dq = first_ + (tile_rows.first - rows().first) * width;
        tile.dq_step = tile_rows.stride;
      } else {
        tile.dk = first_ + (keys.first - rows().first) * width;
        tile.dv = second_ + (keys.first - rows().first) * width;
        tile.dk_step = keys.stride;
      }
      tiles_.differentiate(tile);
    });
  }

  void store(const TensorView& view, const float* sums, float factor) {
    std::fill_n(factors_, rows().count, factor);
    context_.tiles.store_rows(sums, rows().count, factors_, target_rows(view, block_.batch, block_.head, rows()));
  }

  const Context& context_;
  const BackwardTiles& tiles_;
  QueryOperands queries_;
  KeyOperands keys_;
  Block block_;
  float *scratch_, *first_, *second_, *factors_;
};

}  // namespace

void backward_split(const Context& context, const PhaseArgs& phase, Carver& carver) {
  std::vector<SplitBlock> slots;
  for (int slot = 0; slot < context.threads; ++slot) slots.emplace_back(context, carver);
  if (carver.measuring()) return;
  const Blocks query_blocks(context, context.problem.heads);
  ThreadPool::shared().run(query_blocks.count(), context.threads, [&](std::int64_t index, int slot) {
    slots[static_cast<std::size_t>(slot)].compute_dq(query_blocks[index], phase);
  });
  const Blocks key_blocks(context, context.problem.kv_heads);
  ThreadPool::shared().run(key_blocks.count(), context.threads, [&](std::int64_t index, int slot) {
    slots[static_cast<std::size_t>(slot)].compute_dk_dv(key_blocks[index], phase);
  });
}

}  // namespace annulus::cpu
