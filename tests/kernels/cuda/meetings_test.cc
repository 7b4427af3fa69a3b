// Lists of meetings, without a GPU: every query meets every key that it sees once, at the addresses where the rows lie,
// and no two tiles of a list add to the same rows.
#include "kernels/cuda/meetings.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "plan/phase.h"
#include "plan/shard.h"
#include "support/describe.h"
#include "support/draw_case.h"
#include "support/draw_sharding.h"

namespace annulus::cuda {
namespace {

// A row of a tensor: batch, head, position.
using Place = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

// Tensors of a rank's rows, [batch, rows, heads, head_dim], piece after piece: their memory is never touched.
class PretendTensor {
 public:
  PretendTensor(const Problem& problem, const std::vector<Rows>& pieces, std::int64_t heads, std::int64_t head_dim,
                DType dtype)
      : pieces_(pieces), heads_(heads), head_dim_(head_dim) {
    std::int64_t rows = 0;
    for (const Rows& piece : pieces) rows += piece.count;
    rows_ = rows;
    memory_.resize(
        static_cast<std::size_t>(std::max<std::int64_t>(1, problem.batch * rows * heads * head_dim) * size_of(dtype)));
    view_ = {memory_.data(), dtype, {problem.batch, rows, heads, head_dim}};
  }
  TensorView piece(std::size_t i) {
    std::int64_t first = 0;
    for (std::size_t before = 0; before < i; ++before) first += pieces_[before].count;
    TensorView view = view_;
    view.data = memory_.data() + first * view.stride[1] * size_of(view.dtype);
    view.shape[1] = pieces_[i].count;
    return view;
  }
  // What lies at an offset, in elements from the first piece on.
  Place at(std::int64_t offset) const {
    if (offset % head_dim_ != 0) throw std::out_of_range("within a row");
    const std::int64_t head = offset / head_dim_ % heads_;
    std::int64_t row = offset / head_dim_ / heads_ % rows_;
    for (const Rows& piece : pieces_) {
      if (row < piece.count) return {offset / head_dim_ / heads_ / rows_, head, piece[row]};
      row -= piece.count;
    }
    throw std::out_of_range("behind the last row");
  }

 private:
  std::vector<Rows> pieces_;
  std::int64_t heads_, head_dim_, rows_ = 0;
  std::vector<std::byte> memory_;
  TensorView view_;
};

struct Ranks {
  Ranks(const Problem& problem, const std::vector<Rows>& query_pieces, const std::vector<Rows>& key_pieces)
      : q(problem, query_pieces, problem.heads, problem.head_dim, problem.dtype),
        k(problem, key_pieces, problem.kv_heads, problem.head_dim, problem.dtype),
        dq(problem, query_pieces, problem.heads, problem.head_dim, DType::fp32),
        dk(problem, key_pieces, problem.kv_heads, problem.head_dim, DType::fp32) {
    for (std::size_t i = 0; i < query_pieces.size(); ++i)
      queries.push_back({problem,
                         {.owner = 0, .rows = query_pieces[i]},
                         {.q = q.piece(i), .dout = q.piece(i), .lse = {}, .delta = {}, .dq = dq.piece(i)}});
    for (std::size_t i = 0; i < key_pieces.size(); ++i)
      keys.push_back(
          {problem, {.owner = 1, .rows = key_pieces[i]}, {k.piece(i), k.piece(i), dk.piece(i), dk.piece(i)}});
  }
  PretendTensor q, k, dq, dk;
  std::vector<QuerySource> queries;
  std::vector<KeySource> keys;
};

// (branch, batch, head, query, key): how often they meet.
using Meets = std::map<std::tuple<int, std::int64_t, std::int64_t, std::int64_t, std::int64_t>, int>;

std::string walk(const Problem& problem, const MeetingRules& rules, Ranks& ranks, Meets& meets) {
  for (const MeetingList& list : list_meetings(rules, ranks.queries, ranks.keys)) {
    std::set<Place> written;
    for (const MeetingTile& tile : list.tiles) {
      if (tile.rows < 1 || tile.rows > rules.tile_rows) return "a tile of too many rows";
      if (tile.part_count < 1 || tile.part_count > kMaxSweepBranches) return "a tile of too many parts";
      for (int i = 0; i < tile.rows; ++i) {
        const Place own = (rules.of_keys ? ranks.k : ranks.q).at(tile.x.at + i * tile.x.stride);
        const Place sums = (rules.of_keys ? ranks.dk : ranks.dq).at(tile.sums[0].at + i * tile.sums[0].stride);
        if (sums != own) return "sums of other rows";
        if (!written.insert(own).second) return "two tiles of a list add to a row";
        for (int p = 0; p < tile.part_count; ++p) {
          const MeetingPart& part = list.parts.at(static_cast<std::size_t>(tile.first_part + p));
          const std::int64_t edge = part.first + std::int64_t{part.step} * i;
          for (std::int64_t n = 0; n < part.rows; ++n) {
            if (problem.causal && (rules.of_keys ? n < edge : n > edge)) continue;
            const Place other = (rules.of_keys ? ranks.q : ranks.k).at(part.u.at + n * part.u.stride);
            const Place &query = rules.of_keys ? other : own, &key = rules.of_keys ? own : other;
            if (std::get<0>(query) != std::get<0>(key)) return "rows of two batches meet";
            if (std::get<1>(query) / (problem.heads / problem.kv_heads) != std::get<1>(key)) return "another key head";
            ++meets[{list.branch, std::get<0>(query), std::get<1>(query), std::get<2>(query), std::get<2>(key)}];
          }
        }
      }
    }
  }
  return "";
}

// Eq. 1 to 3, position by position.
Meets all_that_see(const Problem& problem, const std::vector<Rows>& queries, const std::vector<Rows>& keys) {
  Meets meets;
  const Plan plan = make_plan(problem);
  const auto each = [](const std::vector<Rows>& pieces, auto f) {
    for (const Rows& piece : pieces)
      for (std::int64_t i = 0; i < piece.count; ++i) f(piece[i]);
  };
  for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
    const annulus::Branch& branch = problem.pattern.branches[b];
    for (std::int64_t head = 0; head < problem.heads; ++head) {
      const Classes classes = classes_of(problem, static_cast<int>(b), head);
      each(queries, [&](std::int64_t query) {
        each(keys, [&](std::int64_t key) {
          if (problem.causal && key > query) return;
          for (const Span& span : plan.spans) {
            const auto inside = [&](std::int64_t t) { return t >= span.begin && t < span.end; };
            if (!inside(query) || !inside(key)) continue;
            const std::int64_t t = query - span.begin, k = key - span.begin;
            const std::int64_t own = t % branch.segment % branch.dilation;
            if (t / branch.segment != k / branch.segment || own != k % branch.segment % branch.dilation) continue;
            if (own < classes.first || own >= classes.first + classes.count) continue;
            for (std::int64_t batch = 0; batch < problem.batch; ++batch)
              ++meets[{static_cast<int>(b), batch, head, query, key}];
          }
        });
      });
    }
  }
  return meets;
}

std::string faults(const Problem& problem, const std::vector<Rows>& queries, const std::vector<Rows>& keys) {
  const Plan plan = make_plan(problem);
  const Meets expected = all_that_see(problem, queries, keys);
  for (const bool of_keys : {false, true}) {
    MeetingRules rules{problem, plan};
    rules.of_keys = of_keys;
    rules.tile_rows = 5;
    rules.block_rows = 3;
    Ranks ranks(problem, queries, keys);
    Meets meets;
    std::string fault = walk(problem, rules, ranks, meets);
    if (fault.empty() && meets != expected) fault = "wrong pairs";
    if (!fault.empty()) return fault + (of_keys ? ", tiles of keys, in " : ", in ") + support::describe(problem);
  }
  return "";
}

// Rows of one rank meet those of another, or its own.
RC_GTEST_PROP(MeetingsProperty, EveryPairOnce, ()) {
  const Problem problem = support::draw_problem(60, 8);
  const Sharding sharding = support::draw_sharding(problem.tokens, 6);
  const auto pieces = [&] {
    return pieces_of(sharding, problem.tokens, static_cast<int>(support::draw_between(0, sharding.ranks - 1)));
  };
  const std::string fault = faults(problem, pieces(), pieces());
  if (!fault.empty()) RC_FAIL(fault);
}

// Replicated queries: a rank has all of them, and of the keys perhaps every p-th.
RC_GTEST_PROP(MeetingsProperty, AllQueriesMeetTheKeysOfARank, ()) {
  const Problem problem = support::draw_problem(60, 8);
  const Sharding sharding = support::draw_sharding(problem.tokens, 6);
  const int rank = static_cast<int>(support::draw_between(0, sharding.ranks - 1));
  const std::string fault = faults(problem, {{0, 1, problem.tokens}}, pieces_of(sharding, problem.tokens, rank));
  if (!fault.empty()) RC_FAIL(fault);
}

}  // namespace
}  // namespace annulus::cuda
