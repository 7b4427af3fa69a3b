#include "plan/shard.h"

#include <algorithm>
#include <set>
#include <string>

#include "annulus/errors.h"
#include "plan/names.h"

namespace annulus {
namespace {

using std::to_string;

constexpr NameTable<Layout, 3> kLayouts{
    {{Layout::contiguous, "contiguous"}, {Layout::zigzag, "zigzag"}, {Layout::striped, "striped"}}};
constexpr int kMostRanks = 1 << 20;

Rows block(std::int64_t tokens, std::int64_t blocks, std::int64_t i) {
  const std::int64_t begin = block_begin(tokens, blocks, i);
  return {begin, 1, block_begin(tokens, blocks, i + 1) - begin};
}

void check_boundaries(const Sharding& sharding, std::int64_t tokens) {
  const auto& bounds = sharding.boundaries;
  const std::string remedy = ": give 0, the end of rank 0, ..., tokens, or leave them out";
  if (bounds.size() != static_cast<std::size_t>(sharding.ranks) + 1)
    throw InvalidArgument("boundaries of " + to_string(sharding.ranks) + " ranks are " + to_string(sharding.ranks + 1) +
                          " numbers; got " + to_string(bounds.size()) + remedy);
  if (bounds.front() != 0 || bounds.back() != tokens)
    throw InvalidArgument("boundaries must run from 0 to tokens = " + to_string(tokens) + "; got " +
                          to_string(bounds.front()) + " to " + to_string(bounds.back()) + remedy);
  for (std::size_t i = 1; i < bounds.size(); ++i)
    if (bounds[i] < bounds[i - 1])
      throw InvalidArgument("boundaries must not fall; got " + to_string(bounds[i - 1]) + " before " +
                            to_string(bounds[i]) + remedy);
}

}  // namespace

std::string_view name(Layout layout) { return find_name(kLayouts, layout); }
Layout parse_layout(std::string_view text) { return find_value(kLayouts, "the layout", text); }

Sharding resolve(Sharding sharding, std::int64_t tokens) {
  if (sharding.ranks < 1 || sharding.ranks > kMostRanks)
    throw InvalidArgument("ranks must lie in [1, " + to_string(kMostRanks) + "]; got " + to_string(sharding.ranks) +
                          ": use at least one");
  (void)name(sharding.layout);
  if (sharding.layout != Layout::contiguous) {
    if (!sharding.boundaries.empty())
      throw InvalidArgument("boundaries are for the layout contiguous; got them with " +
                            std::string(name(sharding.layout)) + ": leave them out");
    return sharding;
  }
  if (sharding.boundaries.empty())
    for (int rank = 0; rank <= sharding.ranks; ++rank)
      sharding.boundaries.push_back(block_begin(tokens, sharding.ranks, rank));
  check_boundaries(sharding, tokens);
  return sharding;
}

std::vector<Rows> pieces_of(const Sharding& sharding, std::int64_t tokens, int rank) {
  std::vector<Rows> pieces;
  const auto add = [&](const Rows& rows) {
    if (!rows.empty()) pieces.push_back(rows);
  };
  const auto g = static_cast<std::size_t>(rank);
  switch (sharding.layout) {
    case Layout::contiguous:
      add({sharding.boundaries[g], 1, sharding.boundaries[g + 1] - sharding.boundaries[g]});
      break;
    case Layout::zigzag:
      add(block(tokens, 2 * sharding.ranks, rank));
      add(block(tokens, 2 * sharding.ranks, 2 * sharding.ranks - 1 - rank));
      break;
    case Layout::striped:
      add(progression(0, tokens, rank, sharding.ranks));
      break;
  }
  return pieces;
}

std::int64_t block_begin(std::int64_t tokens, std::int64_t blocks, std::int64_t i) {
  return tokens / blocks * i + std::min(i, tokens % blocks);
}

std::int64_t count_rows(const std::vector<Rows>& pieces) {
  std::int64_t count = 0;
  for (const Rows& piece : pieces) count += piece.count;
  return count;
}

std::vector<int> sample_ranks(const Sharding& sharding, std::int64_t tokens) {
  constexpr int kEveryRank = 16;
  const int ranks = sharding.ranks;
  std::set<int> sample;
  std::int64_t most = -1;
  int largest = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (ranks <= kEveryRank) sample.insert(rank);
    const std::int64_t rows = count_rows(pieces_of(sharding, tokens, rank));
    if (rows <= most) continue;
    most = rows;
    largest = rank;
  }
  if (ranks > kEveryRank) sample = {0, 1, ranks / 2 - 1, ranks / 2, ranks - 2, ranks - 1, largest};
  return {sample.begin(), sample.end()};
}

}  // namespace annulus
