#include "kernels/cuda/meetings.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "kernels/groups.h"

namespace annulus::cuda {
namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 30;  // farther than any row of a rank

std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// Where one batch of the rows of a group lies, from `base` on.
template <class View>
RowRun run_of(const View& view, const void* base, std::int64_t batch, const RowSource::Found& found) {
  if (view.data == nullptr) return {};
  const auto* data = static_cast<const std::byte*>(static_cast<const void*>(view.data));
  const std::int64_t bytes = data - static_cast<const std::byte*>(base);
  if (bytes % size_of(view.dtype) != 0) throw std::logic_error("rows lie whole elements apart");
  return {bytes / size_of(view.dtype) + batch * view.stride[0] + found.rows.first * view.stride[1] +
              found.head * view.stride[2],
          found.rows.stride * view.stride[1]};
}
RowRun advanced(RowRun run, std::int64_t rows) { return {run.at + rows * run.stride, run.stride}; }

// One side of a group in one batch: where its rows lie.
struct Side {
  RowRun a, b;        // q, dout; or k, v
  RowRun lse, delta;  // of queries
  RowRun sums[2];     // dq; or dk, dv
  std::int64_t state = 0;
  std::int64_t state_stride = 0;
};

class Lister {
 public:
  Lister(const MeetingRules& rules, std::span<const QuerySource> queries, std::span<const KeySource> keys)
      : rules_(rules), problem_(rules.problem), queries_(queries), keys_(keys) {}

  std::vector<MeetingList> make() {
    for (int branch = 0; branch < static_cast<int>(problem_.pattern.branches.size()); ++branch) {
      groups_.clear();
      collect(branch);
      write(branch);
    }
    return std::move(lists_);
  }

 private:
  // Some rows of a source, as they take part in a group.
  struct Member {
    std::size_t source = 0;
    std::int64_t head = 0;  // of the queries
    Rows positions;
    RowSource::Found found;
  };
  struct Group {
    Member own;
    std::vector<Member> others;
  };
  // What the rows of a tile have in common: a source, a head, a class, the first position.
  using Name = std::tuple<std::size_t, std::int64_t, std::int64_t, std::int64_t>;

  void collect(int branch) {
    const std::int64_t dilation = problem_.pattern.branches[static_cast<std::size_t>(branch)].dilation;
    other_strides_ = 1;
    for (const QuerySource& source : queries_)
      if (rules_.of_keys && source.serves(branch)) other_strides_ = std::lcm(other_strides_, source.rows().stride);
    for (const KeySource& source : keys_)
      if (!rules_.of_keys && source.serves(branch)) other_strides_ = std::lcm(other_strides_, source.rows().stride);
    for (std::size_t i = 0; i < queries_.size(); ++i)
      for (std::size_t j = 0; j < keys_.size(); ++j) {
        if (!queries_[i].serves(branch) || !keys_[j].serves(branch)) continue;
        if (rules_.of_keys && keys_[j].tensors.dk.data == nullptr) continue;
        for (const Task& task : rules_.plan.tasks) {
          if (task.branch != branch) continue;
          for (std::int64_t head = 0; head < problem_.heads; ++head)
            for_each_group(task, dilation, classes_of(problem_, branch, head), queries_[i].rows(), keys_[j].rows(),
                           [&](std::int64_t c, const Rows& of_queries, const Rows& of_keys) {
                             if (rules_.skips && rules_.skips(branch, i, j, of_queries)) return;
                             if (problem_.causal && of_queries.last() < of_keys.first) return;
                             for_each_even(rules_.of_keys ? of_keys : of_queries, [&](const Rows& own) {
                               add(i, j, head, c, rules_.of_keys ? of_queries : own, rules_.of_keys ? own : of_keys);
                             });
                           });
        }
      }
  }

  // Causal: rows of a tile must lie at a multiple of the stride of what they meet (see sight). A rank that has all
  // queries but of the keys every p-th alone has finer ones: a group of those is dealt out to several.
  template <class F>
  void for_each_even(const Rows& own, F f) const {
    const std::int64_t steps =
        problem_.causal && own.count > 1 ? other_strides_ / std::gcd(other_strides_, own.stride) : 1;
    for (std::int64_t i = 0; i < std::min(steps, own.count); ++i) {
      const std::int64_t count = (own.count - i + steps - 1) / steps;
      f(Rows{own[i], count > 1 ? steps * own.stride : 1, count});
    }
  }

  void add(std::size_t i, std::size_t j, std::int64_t head, std::int64_t c, const Rows& of_queries,
           const Rows& of_keys) {
    const std::int64_t kv_head = head / (problem_.heads / problem_.kv_heads);
    const Member query{i, head, of_queries, queries_[i].find(head, c, of_queries)};
    const Member key{j, head, of_keys, keys_[j].find(kv_head, c, of_keys)};
    Group& group = groups_[rules_.of_keys ? Name{j, kv_head, c, of_keys.first} : Name{i, head, c, of_queries.first}];
    group.own = rules_.of_keys ? key : query;
    group.others.push_back(rules_.of_keys ? query : key);
  }

  Side side_of_keys(const Member& member, std::int64_t batch) const {
    const KeyTensors& tensors = keys_[member.source].tensors;
    const KeyTensors& first = keys_.front().tensors;
    Side side;
    side.a = run_of(tensors.k, first.k.data, batch, member.found);
    side.b = run_of(tensors.v, first.v.data, batch, member.found);
    side.sums[0] = run_of(tensors.dk, first.dk.data, batch, member.found);
    side.sums[1] = run_of(tensors.dv, first.dv.data, batch, member.found);
    return side;
  }
  Side side_of_queries(const Member& member, std::int64_t batch) const {
    const QueryTensors& tensors = queries_[member.source].tensors;
    const QueryTensors& first = queries_.front().tensors;
    Side side;
    side.a = run_of(tensors.q, first.q.data, batch, member.found);
    side.b = run_of(tensors.dout, first.dout.data, batch, member.found);
    side.lse = run_of(tensors.lse, first.lse.data, batch, member.found);
    side.delta = run_of(tensors.delta, first.delta.data, batch, member.found);
    side.sums[0] = run_of(tensors.dq, first.dq.data, batch, member.found);
    if (rules_.state_first.empty()) return side;
    side.state = (batch * problem_.heads + member.head) * rules_.state_rows + rules_.state_first[member.source] +
                 member.found.rows.first;
    side.state_stride = member.found.rows.stride;
    return side;
  }
  Side side(bool of_keys, const Member& member, std::int64_t batch) const {
    return of_keys ? side_of_keys(member, batch) : side_of_queries(member, batch);
  }

  // Causal: what row i of the tile sees of the other rows, as first + step * i (MeetingPart).
  struct Sight {
    std::int64_t first = 0;
    std::int64_t step = 1;
  };
  Sight sight(const Rows& own, const Rows& other) const {
    if (!problem_.causal) return {};
    const std::int64_t stride = other.count > 1 ? other.stride : own.count > 1 ? own.stride : 1;
    Sight sight;
    if (own.count > 1) sight.step = own.stride / stride;
    if (own.count > 1 && own.stride % stride != 0)
      throw std::logic_error("rows of a tile lie at a multiple of the stride of those that they meet");
    sight.first =
        rules_.of_keys ? -floor_div(other.first - own.first, stride) : floor_div(own.first - other.first, stride);
    return sight;
  }

  void write(int branch) {
    const std::size_t begin = lists_.size();
    const auto list_of = [&](std::size_t i) -> MeetingList& {
      while (lists_.size() <= begin + i) lists_.push_back({branch, problem_.head_dim % unit() == 0, {}, {}});
      return lists_[begin + i];
    };
    for (const auto& [name, group] : groups_)
      for (std::int64_t batch = 0; batch < problem_.batch; ++batch)
        for (std::int64_t done = 0; done < group.own.positions.count; done += rules_.tile_rows)
          write_tile(group, batch, done, list_of);
  }

  template <class ListOf>
  void write_tile(const Group& group, std::int64_t batch, std::int64_t done, ListOf list_of) {
    const Side own = side(rules_.of_keys, group.own, batch);
    MeetingTile tile;
    tile.x = advanced(own.a, done);
    tile.y = advanced(own.b, done);
    tile.lse = advanced(own.lse, done);
    tile.delta = advanced(own.delta, done);
    for (int i = 0; i < 2; ++i) tile.sums[i] = advanced(own.sums[i], done);
    tile.state = own.state + done * own.state_stride;
    tile.state_stride = static_cast<int>(own.state_stride);
    tile.rows = static_cast<int>(std::min<std::int64_t>(rules_.tile_rows, group.own.positions.count - done));
    std::vector<MeetingPart> parts;
    for (const Member& member : group.others) {
      const Side other = side(!rules_.of_keys, member, batch);
      MeetingPart part;
      part.u = other.a;
      part.w = other.b;
      part.lse = other.lse;
      part.delta = other.delta;
      part.rows = static_cast<int>(member.positions.count);
      const Sight seen = sight(group.own.positions, member.positions);
      part.step = static_cast<int>(std::min(seen.step, kFar));
      part.first = static_cast<int>(std::clamp(seen.first + seen.step * done, -kFar, kFar));
      if (met_blocks(part, rules_.of_keys, problem_.causal, tile.rows, rules_.block_rows) > 0) parts.push_back(part);
    }
    for (std::size_t first = 0; first < parts.size(); first += kMaxSweepBranches) {
      MeetingList& list = list_of(first / kMaxSweepBranches);
      const std::size_t count = std::min<std::size_t>(kMaxSweepBranches, parts.size() - first);
      tile.first_part = static_cast<int>(list.parts.size());
      tile.part_count = static_cast<int>(count);
      list.parts.insert(list.parts.end(), parts.begin() + static_cast<std::ptrdiff_t>(first),
                        parts.begin() + static_cast<std::ptrdiff_t>(first + count));
      list.tiles.push_back(tile);
      for (const RowRun& run : {tile.x, tile.y}) note(list, run);
      for (std::size_t i = first; i < first + count; ++i)
        for (const RowRun& run : {parts[i].u, parts[i].w}) note(list, run);
    }
  }

  std::int64_t unit() const { return 16 / size_of(problem_.dtype); }  // elements in 16 bytes
  void note(MeetingList& list, const RowRun& run) const {
    if (run.at % unit() != 0 || run.stride % unit() != 0) list.aligned = false;
  }

  const MeetingRules& rules_;
  const Problem& problem_;
  std::span<const QuerySource> queries_;
  std::span<const KeySource> keys_;
  std::int64_t other_strides_ = 1;  // of the branch: a multiple of the strides of all sources that tiles meet
  std::map<Name, Group> groups_;
  std::vector<MeetingList> lists_;
};

}  // namespace

std::vector<MeetingList> list_meetings(const MeetingRules& rules, std::span<const QuerySource> queries,
                                       std::span<const KeySource> keys) {
  if (queries.empty() || keys.empty()) return {};
  return Lister(rules, queries, keys).make();
}

}  // namespace annulus::cuda
