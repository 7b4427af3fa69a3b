// Where a rank's rows lie in the whole tensor.
//
// Seen by rows, a tensor is [outer, tokens, inner] in all and [outer, rows, inner] on a rank: outer is the batch and
// inner the elements of a token; lse, [batch, heads, tokens], has outer = batch * heads and inner = 1.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/shard.h"

namespace annulus::cli {

struct RowShape {
  std::int64_t outer = 0;
  std::int64_t inner = 0;
};

struct ShardMap {
  std::vector<Rows> pieces;  // in the order of memory
  std::int64_t tokens = 0;

  std::int64_t rows() const { return count_rows(pieces); }
  bool is_whole() const { return rows() == tokens && (pieces.empty() || pieces.front().first == 0); }

  // f(i, j) for rows i in [begin, end) of [outer * rows], which are rows j of [outer * tokens].
  template <class F>
  void for_each_row(std::int64_t begin, std::int64_t end, F f) const {
    const std::int64_t count = rows();
    for (std::int64_t i = begin; i < end;) {
      const std::int64_t outer = i / count;
      std::int64_t row = i % count;
      for (const Rows& piece : pieces) {
        for (; row < piece.count && i < end; ++row, ++i) f(i, outer * tokens + piece[row]);
        row -= piece.count;  // not in this piece: counted from the next one on
        if (row < 0 || i == end) break;
      }
    }
  }
};

inline ShardMap whole_sequence(std::int64_t tokens) {
  ShardMap map{{}, tokens};
  if (tokens > 0) map.pieces.push_back({0, 1, tokens});
  return map;
}

inline std::vector<ShardMap> shard_maps(const Sharding& sharding, std::int64_t tokens) {
  std::vector<ShardMap> maps;
  for (int rank = 0; rank < sharding.ranks; ++rank) maps.push_back({pieces_of(sharding, tokens, rank), tokens});
  return maps;
}

// What a rank has in memory: rows of q, out, lse, dout and dq, and rows of k, v, dk and dv.
struct Holding {
  ShardMap queries, keys;
};

// Of every rank. Where queries are replicated, each has all of them; the results of rank 0 are then the ones that
// count.
class Holdings {
 public:
  Holdings(const Sharding& sharding, std::int64_t tokens, bool replicates_queries)
      : keys_(shard_maps(sharding, tokens)), queries_(keys_), replicates_queries_(replicates_queries) {
    if (!replicates_queries) return;
    for (ShardMap& shard : queries_) shard.pieces.clear();
    queries_.front() = whole_sequence(tokens);
  }

  Holding of(int rank) const {
    const auto& keys = keys_[static_cast<std::size_t>(rank)];
    return {replicates_queries_ ? queries_.front() : keys, keys};
  }
  // Who answers for which rows: every row is somebody's, and nobody else's.
  const std::vector<ShardMap>& owned(bool key_side) const { return key_side ? keys_ : queries_; }

 private:
  std::vector<ShardMap> keys_, queries_;
  bool replicates_queries_;
};

}  // namespace annulus::cli
