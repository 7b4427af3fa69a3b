// One pass: a stretch of keys stays, queries pass by a tile at a time. dk and dv of the stretch are summed in scratch;
// dq is summed over the stretch and then added to the output.
//
// Two stretches of one group add to the same rows of dq. They do so in the order of their keys: each waits, before it
// adds, until the one before it has added to the same rows. The threads then follow one another through the queries, a
// tile apart, and the sum is the same for every number of threads. Waiting is safe because the pool starts tasks in
// order: the one before is always on its way.
#include <atomic>
#include <thread>

#include "kernels/cpu/backward.h"
#include "kernels/cpu/operands.h"
#include "kernels/groups.h"
#include "kernels/thread_pool.h"

namespace annulus::cpu {
namespace {

constexpr std::int64_t kWindow = 8192;  // items between two barriers: bounds the progress counters whatever N is
constexpr std::int64_t kDone = INT64_MAX;

// Key tiles of a stretch. Queries are packed once a stretch, so it should be long; packed keys and values, dk and dv
// (five fp32 rows a key) must stay below 2.5 MiB. A function of the head size alone: the order of the sums in dq
// depends on it.
std::int64_t tiles_in_stretch(std::int64_t head_dim) { return std::clamp<std::int64_t>(512 / padded(head_dim), 1, 4); }

// One stretch of keys of one group, for all query heads that share it.
struct Item {
  const Task* task = nullptr;
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  std::int64_t segment = 0;
  std::int64_t class_number = 0;  // among those that the heads of kv_head take
  std::int64_t stretch = 0;       // its number in the group
};

// The items of one branch. Their groups touch disjoint rows of dq, dk and dv, so all of them may run at the same time.
class Items {
 public:
  Items(const Context& context, int branch) : context_(context) {
    for (std::int64_t head = 0; head < context.problem.kv_heads; ++head)
      takers_.push_back(takers_of(context.problem, branch, head));
    for (const Task& task : context.plan.tasks) {
      if (task.branch != branch) continue;
      tasks_.push_back(&task);
      first_.push_back(first_.back() +
                       context.problem.batch * context.problem.kv_heads * task.count * classes(task) * stretches(task));
    }
  }

  std::int64_t count() const { return first_.back(); }
  const std::vector<Takers>& takers(std::int64_t kv_head) const { return takers_[static_cast<std::size_t>(kv_head)]; }

  Item operator[](std::int64_t index) const {
    const std::int64_t t = std::upper_bound(first_.begin(), first_.end(), index) - first_.begin() - 1;
    const Task& task = *tasks_[static_cast<std::size_t>(t)];
    std::int64_t rest = index - first_[static_cast<std::size_t>(t)];
    const auto next = [&rest](std::int64_t size) {
      const std::int64_t digit = rest % size;
      rest /= size;
      return digit;
    };
    Item item;
    item.task = &task;
    item.stretch = next(stretches(task));  // fastest: the item before is the stretch before
    item.class_number = next(classes(task));
    item.segment = next(task.count);
    item.kv_head = next(context_.problem.kv_heads);
    item.batch = rest;
    return item;
  }

 private:
  // The most of any group and of any head: some items then have nothing to do.
  std::int64_t stretches(const Task& task) const {
    const std::int64_t length = tiles_in_stretch(context_.problem.head_dim) * context_.tiles.backward.key_tile;
    const std::int64_t rows = 1 + (task.length - 1) / context_.dilation(task);
    return (rows + length - 1) / length;
  }
  std::int64_t classes(const Task& task) const {
    std::int64_t most = 0;
    for (const auto& takers : takers_) {
      std::int64_t sum = 0;
      for (const Takers& t : takers) sum += std::min(t.classes.count, task.length);
      most = std::max(most, sum);
    }
    return most;
  }

  const Context& context_;
  std::vector<std::vector<Takers>> takers_;  // of each key/value head
  std::vector<const Task*> tasks_;
  std::vector<std::int64_t> first_{0};  // item of each task, and the total
};

// Whose turn it is to add to dq.
struct Turns {
  const std::atomic<std::int64_t>* before;  // how far the stretch before has come; null for the first of a group
  std::atomic<std::int64_t>* own;

  void await(std::int64_t turn) const {
    while (before != nullptr && before->load(std::memory_order_acquire) < turn) std::this_thread::yield();
  }
  void pass(std::int64_t turn) const { own->store(turn, std::memory_order_release); }
};

class Stretch {
 public:
  Stretch(const Context& context, Carver& carver)
      : context_(context), tiles_(context.tiles.backward), queries_(context, carver) {
    const std::int64_t width = padded(context.problem.head_dim);
    const std::int64_t key_tiles = tiles_in_stretch(context.problem.head_dim);
    for (std::int64_t i = 0; i < key_tiles; ++i) keys_.emplace_back(context, carver);
    scratch_ = carver.take<float>("tiles", tiles_.score_bytes / 4);
    dq_ = carver.take<float>("tiles", tiles_.query_tile * width);
    dk_ = carver.take<float>("tiles", key_tiles * tiles_.key_tile * width);
    dv_ = carver.take<float>("tiles", key_tiles * tiles_.key_tile * width);
  }

  void run(const Item& item, const std::vector<Takers>& takers, const BackwardArgs& args, const float* delta,
           Turns turns) {
    std::int64_t number = item.class_number;
    for (const Takers& t : takers) {
      const std::int64_t count = std::min(t.classes.count, item.task->length);
      if (number < count) run_class(item, t.classes.first + number, t.heads, args, delta, turns);
      number -= count;
      if (number < 0) return;
    }
  }

 private:
  void run_class(const Item& item, std::int64_t phase_class, const std::vector<std::int64_t>& heads,
                 const BackwardArgs& args, const float* delta, Turns turns) {
    const Problem& problem = context_.problem;
    const Rows group = item.task->rows(item.segment, phase_class, context_.dilation(*item.task));
    const Rows keys = pack_keys(item, group, args);
    if (keys.empty()) return;
    const std::int64_t diagonal = diagonal_of(group, keys);
    const std::int64_t query_tiles = (group.count + tiles_.query_tile - 1) / tiles_.query_tile;
    std::int64_t turn = 0;
    for (const std::int64_t head : heads)
      for (std::int64_t t = 0; t < query_tiles; ++t) {
        ++turn;
        const std::int64_t first = t * tiles_.query_tile;
        const Rows queries{group[first], group.stride, std::min(tiles_.query_tile, group.count - first)};
        if (problem.causal && queries.count + first + diagonal <= 0) continue;  // all of these queries lie before
        queries_.pack(args, delta, Wanted::all, item.batch, head, queries);
        differentiate(problem.causal ? first + diagonal : kNoDiagonal, queries.count, keys.count);
        turns.await(turn);
        context_.tiles.add_rows(dq_, queries.count, static_cast<float>(*problem.scale),
                                target_rows(args.dq, item.batch, head, queries));
        turns.pass(turn);
      }
    // Packed queries carry scale * log2(e): what is left of the scale is ln(2).
    context_.tiles.add_rows(dk_, keys.count, kLn2, target_rows(args.dk, item.batch, item.kv_head, keys));
    context_.tiles.add_rows(dv_, keys.count, 1.0f, target_rows(args.dv, item.batch, item.kv_head, keys));
    turns.pass(kDone);
  }

  Rows pack_keys(const Item& item, const Rows& group, const BackwardArgs& args) {
    const std::int64_t width = padded(context_.problem.head_dim);
    const std::int64_t length = static_cast<std::int64_t>(keys_.size()) * tiles_.key_tile;
    const std::int64_t first = item.stretch * length;
    if (first >= group.count) return {};
    const Rows keys{group[first], group.stride, std::min(length, group.count - first)};
    for (std::int64_t j = 0; j < keys.count; j += tiles_.key_tile)
      keys_[static_cast<std::size_t>(j / tiles_.key_tile)].pack(
          args, Wanted::all, item.batch, item.kv_head,
          {keys[j], keys.stride, std::min(tiles_.key_tile, keys.count - j)});
    std::fill_n(dk_, keys.count * width, 0.0f);
    std::fill_n(dv_, keys.count * width, 0.0f);
    return keys;
  }

  void differentiate(std::int64_t diagonal, std::int64_t query_count, std::int64_t key_count) {
    const std::int64_t width = padded(context_.problem.head_dim);
    std::fill_n(dq_, query_count * width, 0.0f);
    for (std::int64_t j = 0; j < key_count; j += tiles_.key_tile) {
      DifferentiateTile tile;
      tile.diagonal = diagonal == kNoDiagonal ? kNoDiagonal : diagonal - j;
      if (query_count + tile.diagonal <= 0) break;  // the rest of the keys lie ahead
      queries_.enter(tile);
      keys_[static_cast<std::size_t>(j / tiles_.key_tile)].enter(tile);
      tile.head_dim = context_.problem.head_dim;
      tile.scratch = scratch_;
      tile.dq = dq_;
      tile.dk = dk_ + j * width;
      tile.dv = dv_ + j * width;
      tiles_.differentiate(tile);
    }
  }

  const Context& context_;
  const BackwardTiles& tiles_;
  QueryOperands queries_;
  std::vector<KeyOperands> keys_;
  float *scratch_, *dq_, *dk_, *dv_;
};

void clear(const Context& context, const TensorView& view) {
  constexpr std::int64_t kTokens = 256;  // enough work for one task
  const std::int64_t stretches = (view.shape[1] + kTokens - 1) / kTokens;
  ThreadPool::shared().run(view.shape[0] * stretches, context.threads, [&](std::int64_t index, int) {
    const std::int64_t batch = index / stretches;
    const std::int64_t begin = index % stretches * kTokens;
    for (std::int64_t token = begin; token < std::min(begin + kTokens, view.shape[1]); ++token)
      for (std::int64_t head = 0; head < view.shape[2]; ++head)
        std::fill_n(reinterpret_cast<float*>(row_pointer(view, batch, token, head)), view.shape[3], 0.0f);
  });
}

}  // namespace

void backward_fused(const Context& context, const BackwardArgs& args, const Deltas& deltas, Carver& carver) {
  std::vector<Stretch> slots;
  for (int slot = 0; slot < context.threads; ++slot) slots.emplace_back(context, carver);
  auto* progress = carver.take<std::atomic<std::int64_t>>("tiles", kWindow);
  if (carver.measuring()) return;
  for (const TensorView& view : {args.dq, args.dk, args.dv}) clear(context, view);
  for (int branch = 0; branch < static_cast<int>(context.problem.pattern.branches.size()); ++branch) {
    const Items items(context, branch);
    for (std::int64_t begin = 0; begin < items.count(); begin += kWindow) {
      const std::int64_t count = std::min(kWindow, items.count() - begin);
      for (std::int64_t i = 0; i < count; ++i) new (progress + i) std::atomic<std::int64_t>(0);
      ThreadPool::shared().run(count, context.threads, [&](std::int64_t i, int slot) {
        const Item item = items[begin + i];
        const bool follows = item.stretch > 0 && i > 0;  // the window before has ended
        slots[static_cast<std::size_t>(slot)].run(item, items.takers(item.kv_head), args, deltas.of_branch(branch),
                                                  {follows ? progress + i - 1 : nullptr, progress + i});
      });
    }
  }
}

}  // namespace annulus::cpu
