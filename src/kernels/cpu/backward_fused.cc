// One pass: a stretch of keys stays, queries pass by a tile at a time. dk and dv of the stretch are summed in scratch;
// dq is summed over the stretch and then added to the output.
//
// Two stretches of one group add to the same rows of dq. They do so in the order of their keys: each waits, before it
// adds, until the one before it has added to the same rows. The threads then follow one another through the queries, a
// tile apart, and the sum is the same for every number of threads. Waiting is safe because the pool starts tasks in
// order: the one before is always on its way.
#include <algorithm>
#include <atomic>
#include <new>
#include <thread>

#include "kernels/cpu/backward.h"
#include "kernels/cpu/operands.h"
#include "kernels/groups.h"
#include "kernels/thread_pool.h"

namespace annulus::cpu {
namespace {

constexpr std::int64_t kWindow = 8192;  // items between two barriers: bounds the progress counters whatever N is
constexpr std::int64_t kDone = INT64_MAX, kFailed = -1;  // beside the turns of a stretch, which count from 1

// Key tiles of a stretch. Queries are packed once a stretch, so it should be long; packed keys and values, dk and dv
// (five fp32 rows a key) must stay below 2.5 MiB. A function of the head size alone: the order of the sums in dq
// depends on it.
std::int64_t tiles_in_stretch(std::int64_t head_dim) { return std::clamp<std::int64_t>(512 / padded(head_dim), 1, 4); }

// The queries of one source and the keys of another, in one branch.
struct Meeting {
  int branch = 0;
  const QuerySource* queries = nullptr;
  const KeySource* keys = nullptr;
  Wanted wanted = Wanted::all;
};

// One stretch of keys of one group, for all query heads that share it.
struct Item {
  const Task* task = nullptr;
  std::int64_t batch = 0;
  std::int64_t kv_head = 0;
  std::int64_t segment = 0;
  std::int64_t class_number = 0;  // among those that the heads of kv_head take
  std::int64_t stretch = 0;       // its number in the group
};

// The items of one meeting. Their groups touch disjoint rows of dq, dk and dv, so all of them may run at the same time.
class Items {
 public:
  Items(const Context& context, const Meeting& meeting) : context_(context) {
    for (std::int64_t head = 0; head < context.problem.kv_heads; ++head)
      takers_.push_back(takers_of(context.problem, meeting.branch, head));
    for (const Task& task : context.plan.tasks) {
      if (task.branch != meeting.branch) continue;
      const SegmentRange segments = shared_segments(task, meeting.queries->rows(), meeting.keys->rows());
      if (segments.count == 0) continue;
      runs_.push_back({&task, segments, classes(task), stretches(task, meeting.keys->rows())});
      first_.push_back(first_.back() + context.problem.batch * context.problem.kv_heads * segments.count *
                                           runs_.back().classes * runs_.back().stretches);
    }
  }

  std::int64_t count() const { return first_.back(); }
  const std::vector<Takers>& takers(std::int64_t kv_head) const { return takers_[static_cast<std::size_t>(kv_head)]; }

  Item operator[](std::int64_t index) const {
    const std::int64_t r = std::upper_bound(first_.begin(), first_.end(), index) - first_.begin() - 1;
    const Run& run = runs_[static_cast<std::size_t>(r)];
    std::int64_t rest = index - first_[static_cast<std::size_t>(r)];
    const auto next = [&rest](std::int64_t size) {
      const std::int64_t digit = rest % size;
      rest /= size;
      return digit;
    };
    Item item;
    item.task = run.task;
    item.stretch = next(run.stretches);  // fastest: the item before is the stretch before
    item.class_number = next(run.classes);
    item.segment = run.segments.first + next(run.segments.count);
    item.kv_head = next(context_.problem.kv_heads);
    item.batch = rest;
    return item;
  }

 private:
  // Segments of one task that have queries and keys here.
  struct Run {
    const Task* task = nullptr;
    SegmentRange segments;
    std::int64_t classes = 0;    // the most of any head
    std::int64_t stretches = 0;  // the most of any group: some items then have nothing to do
  };

  std::int64_t stretches(const Task& task, const Rows& keys) const {
    const std::int64_t length = tiles_in_stretch(context_.problem.head_dim) * context_.tiles.backward.key_tile;
    const std::int64_t rows = std::min(1 + (task.length - 1) / context_.dilation(task), keys.count);
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
  std::vector<Run> runs_;
  std::vector<std::int64_t> first_{0};  // item of each run, and the total
};

// Whose turn it is to add to dq.
struct Turns {
  const std::atomic<std::int64_t>* before;  // how far the stretch before has come; null for the first of a group
  std::atomic<std::int64_t>* own;

  // False: the stretch before has failed, and this one need not go on.
  bool await(std::int64_t turn) const {
    if (before == nullptr) return true;
    for (;;) {
      const std::int64_t reached = before->load(std::memory_order_acquire);
      if (reached == kFailed) return false;
      if (reached >= turn) return true;
      std::this_thread::yield();
    }
  }
  void pass(std::int64_t turn) const { own->store(turn, std::memory_order_release); }
};

// A stretch that ends by an exception, of a rank that was told to stop, must not leave the next one waiting.
struct Leave {
  const Turns& turns;
  bool done = false;
  ~Leave() { turns.pass(done ? kDone : kFailed); }
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

  void run(const Item& item, const std::vector<Takers>& takers, const Meeting& meeting, Turns turns) {
    std::int64_t number = item.class_number;
    for (const Takers& t : takers) {
      const std::int64_t count = std::min(t.classes.count, item.task->length);
      if (number < count) run_class(item, t.classes.first + number, t.heads, meeting, turns);
      number -= count;
      if (number < 0) return;
    }
  }

 private:
  void run_class(const Item& item, std::int64_t phase_class, const std::vector<std::int64_t>& heads,
                 const Meeting& meeting, Turns turns) {
    Leave leave{turns};
    const Problem& problem = context_.problem;
    const Rows group = item.task->rows(item.segment, phase_class, context_.dilation(*item.task));
    const Rows all_queries = intersect(group, meeting.queries->rows());
    const Rows keys = take_stretch(intersect(group, meeting.keys->rows()), item.stretch);
    if (all_queries.empty() || keys.empty()) {
      leave.done = true;
      return;
    }
    const RowSource::Found found = meeting.keys->find(item.kv_head, phase_class, keys);
    const KeyTensors& tensors = meeting.keys->tensors;
    pack_keys(source_rows(tensors.k, item.batch, found.head, found.rows),
              source_rows(tensors.v, item.batch, found.head, found.rows), meeting.wanted);
    const Diagonal diagonal = problem.causal ? Diagonal::between(all_queries, keys) : kNoDiagonal;
    const std::int64_t query_tiles = (all_queries.count + tiles_.query_tile - 1) / tiles_.query_tile;
    std::int64_t turn = 0;
    for (const std::int64_t head : heads) {
      const auto [rows, row_head] = meeting.queries->find(head, phase_class, all_queries);
      for (std::int64_t t = 0; t < query_tiles; ++t) {
        ++turn;
        const std::int64_t first = t * tiles_.query_tile;
        const Rows queries{rows[first], rows.stride, std::min(tiles_.query_tile, rows.count - first)};
        if (diagonal.from(first, 0).hides_all(queries.count)) continue;  // all of these queries lie before
        context_.make_progress();
        queries_.pack(meeting.queries->tensors, meeting.wanted, item.batch, row_head, queries);
        differentiate(diagonal.from(first, 0), queries.count, keys.count, meeting.wanted);
        if (meeting.wanted == Wanted::dk_dv) continue;
        if (!turns.await(turn)) return;
        context_.tiles.add_rows(dq_, queries.count, static_cast<float>(*problem.scale),
                                target_rows(meeting.queries->tensors.dq, item.batch, row_head, queries));
        turns.pass(turn);
      }
    }
    // Packed queries carry scale * log2(e): what is left of the scale is ln(2).
    if (meeting.wanted != Wanted::dq) {
      context_.tiles.add_rows(dk_, keys.count, kLn2, target_rows(tensors.dk, item.batch, found.head, found.rows));
      context_.tiles.add_rows(dv_, keys.count, 1.0f, target_rows(tensors.dv, item.batch, found.head, found.rows));
    }
    leave.done = true;
  }

  Rows take_stretch(const Rows& keys, std::int64_t stretch) const {
    const std::int64_t length = static_cast<std::int64_t>(keys_.size()) * tiles_.key_tile;
    const std::int64_t first = stretch * length;
    if (first >= keys.count) return {};
    const std::int64_t count = std::min(length, keys.count - first);
    return {keys[first], count == 1 ? 1 : keys.stride, count};
  }

  void pack_keys(const SourceRows& k, const SourceRows& v, Wanted wanted) {
    const std::int64_t width = padded(context_.problem.head_dim);
    for (std::int64_t j = 0; j < k.count; j += tiles_.key_tile) {
      const std::int64_t count = std::min(tiles_.key_tile, k.count - j);
      keys_[static_cast<std::size_t>(j / tiles_.key_tile)].pack(k.part(j, count), v.part(j, count), wanted);
    }
    std::fill_n(dk_, k.count * width, 0.0f);
    std::fill_n(dv_, k.count * width, 0.0f);
  }

  void differentiate(const Diagonal& diagonal, std::int64_t query_count, std::int64_t key_count, Wanted wanted) {
    const std::int64_t width = padded(context_.problem.head_dim);
    std::fill_n(dq_, query_count * width, 0.0f);
    for (std::int64_t j = 0; j < key_count; j += tiles_.key_tile) {
      DifferentiateTile tile;
      tile.diagonal = diagonal.from(0, j);
      if (tile.diagonal.hides_all(query_count)) break;  // the rest of the keys lie ahead
      queries_.enter(tile);
      keys_[static_cast<std::size_t>(j / tiles_.key_tile)].enter(tile);
      tile.head_dim = context_.problem.head_dim;
      tile.scratch = scratch_;
      if (wanted != Wanted::dk_dv) tile.dq = dq_;
      if (wanted != Wanted::dq) {
        tile.dk = dk_ + j * width;
        tile.dv = dv_ + j * width;
      }
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
  if (view.data == nullptr) return;    // not wanted
  constexpr std::int64_t kRows = 256;  // enough work for one task
  const std::int64_t stretches = (view.shape[1] + kRows - 1) / kRows;
  ThreadPool::shared().run(view.shape[0] * stretches, context.threads, [&](std::int64_t index, int) {
    const std::int64_t batch = index / stretches;
    const std::int64_t begin = index % stretches * kRows;
    for (std::int64_t row = begin; row < std::min(begin + kRows, view.shape[1]); ++row)
      for (std::int64_t head = 0; head < view.shape[2]; ++head)
        std::fill_n(reinterpret_cast<float*>(row_pointer(view, batch, row, head)), view.shape[3], 0.0f);
  });
}

// This rank's own queries, piece by piece.
std::vector<QuerySource> own_queries(const Context& context, const PhaseArgs& phase, int branch) {
  const QueryTensors whole = query_tensors(context, phase, branch);
  std::vector<QuerySource> sources;
  std::int64_t first = 0;
  for (const Rows& piece : context.shard.pieces) {
    const auto part = [&](auto view) {
      if (view.data != nullptr) view.data = row_pointer(view, 0, first, 0);
      view.shape[1] = piece.count;
      return view;
    };
    sources.push_back({context.problem,
                       {.owner = 0, .rows = piece},
                       {part(whole.q), part(whole.dout), part(whole.lse), part(whole.delta), part(whole.dq)}});
    first += piece.count;
  }
  return sources;
}

}  // namespace

void backward_fused(const Context& context, const PhaseArgs& phase, Carver& carver) {
  std::vector<Stretch> slots;
  for (int slot = 0; slot < context.threads; ++slot) slots.emplace_back(context, carver);
  auto* progress = carver.take<std::atomic<std::int64_t>>("tiles", kWindow);
  if (carver.measuring()) return;
  const BackwardStep& step = phase.step;
  if (step.first) clear(context, step.dq);
  for (const QuerySource& visitor : step.visitors) clear(context, visitor.tensors.dq);
  for (const KeySource& source : step.sources) {
    if (!step.visitors.empty()) break;
    clear(context, source.tensors.dk);
    clear(context, source.tensors.dv);
  }
  const auto run_meeting = [&](const Meeting& meeting) {
    const Items items(context, meeting);
    for (std::int64_t begin = 0; begin < items.count(); begin += kWindow) {
      const std::int64_t count = std::min(kWindow, items.count() - begin);
      for (std::int64_t i = 0; i < count; ++i) new (progress + i) std::atomic<std::int64_t>(0);
      ThreadPool::shared().run(count, context.threads, [&](std::int64_t i, int slot) {
        const Item item = items[begin + i];
        const bool follows = item.stretch > 0 && i > 0;  // the window before has ended
        slots[static_cast<std::size_t>(slot)].run(item, items.takers(item.kv_head), meeting,
                                                  {follows ? progress + i - 1 : nullptr, progress + i});
      });
    }
  };
  for (int branch = 0; branch < static_cast<int>(context.problem.pattern.branches.size()); ++branch) {
    const std::vector<QuerySource> own = own_queries(context, phase, branch);
    for (const KeySource& source : step.sources)
      for (const QuerySource& queries : step.visitors.empty() ? std::span(own) : step.visitors) {
        const bool wants_dq = queries.tensors.dq.data != nullptr, wants_dk = source.tensors.dk.data != nullptr;
        if (!source.serves(branch) || !queries.serves(branch) || !(wants_dq || wants_dk)) continue;
        run_meeting({branch, &queries, &source, !wants_dq ? Wanted::dk_dv : !wants_dk ? Wanted::dq : Wanted::all});
      }
  }
}

}  // namespace annulus::cpu
