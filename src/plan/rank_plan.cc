#include "plan/rank_plan.h"

#include <algorithm>

#include "plan/names.h"

namespace annulus {
namespace {

constexpr NameTable<Strategy, 3> kStrategies{
    {{Strategy::exchange, "exchange"}, {Strategy::ring, "ring"}, {Strategy::gather, "gather"}}};

// The rank `distance` places behind `rank` on the circle.
int behind(int rank, int distance, int ranks) { return (rank - distance % ranks + ranks) % ranks; }
int ahead(int rank, int distance, int ranks) { return (rank + distance) % ranks; }

void add_message(std::vector<Message>& messages, int peer, std::vector<Parcel> parcels) {
  if (!parcels.empty()) messages.push_back({peer, std::move(parcels)});
}

std::vector<Parcel> whole_shard(const Problem& problem, const Sharding& sharding, int owner) {
  std::vector<Parcel> parcels;
  for (const Rows& piece : pieces_of(sharding, problem.tokens, owner))
    parcels.push_back({.owner = owner, .rows = piece});
  return parcels;
}

bool needs(const Problem& problem, const Sharding& sharding, int receiver, int owner) {
  return !needed_parcels(problem, sharding, receiver, owner).empty();
}

// In step s every rank hears from the one s places behind it: no rank sends or receives twice in a step.
RankPlan plan_exchange(const Problem& problem, const Sharding& sharding, int rank) {
  RankPlan plan;
  plan.steps.resize(static_cast<std::size_t>(sharding.ranks));
  for (int s = 1; s < sharding.ranks; ++s) {
    Step& step = plan.steps[static_cast<std::size_t>(s)];
    const int from = behind(rank, s, sharding.ranks);
    const int to = ahead(rank, s, sharding.ranks);
    add_message(step.receives, from, needed_parcels(problem, sharding, rank, from));
    add_message(step.sends, to, needed_parcels(problem, sharding, to, rank));
  }
  return plan;
}

// The last step in which anybody still needs the block of `owner`.
int last_hop(const Problem& problem, const Sharding& sharding, int owner) {
  for (int s = sharding.ranks - 1; s > 0; --s)
    if (needs(problem, sharding, ahead(owner, s, sharding.ranks), owner)) return s;
  return 0;
}

// In step s the block of the owner s places behind arrives from the neighbour.
RankPlan plan_ring(const Problem& problem, const Sharding& sharding, int rank) {
  RankPlan plan;
  plan.steps.resize(static_cast<std::size_t>(sharding.ranks));
  for (int s = 1; s < sharding.ranks; ++s) {
    Step& step = plan.steps[static_cast<std::size_t>(s)];
    const int incoming = behind(rank, s, sharding.ranks);
    const int outgoing = behind(rank, s - 1, sharding.ranks);
    if (s <= last_hop(problem, sharding, incoming))
      add_message(step.receives, behind(rank, 1, sharding.ranks), whole_shard(problem, sharding, incoming));
    if (s <= last_hop(problem, sharding, outgoing))
      add_message(step.sends, ahead(rank, 1, sharding.ranks), whole_shard(problem, sharding, outgoing));
  }
  return plan;
}

RankPlan plan_gather(const Problem& problem, const Sharding& sharding, int rank) {
  RankPlan plan;
  plan.steps.resize(sharding.ranks > 1 ? 2 : 1);
  for (int s = 1; s < sharding.ranks; ++s) {
    const int from = behind(rank, s, sharding.ranks);
    add_message(plan.steps[1].receives, from, whole_shard(problem, sharding, from));
    add_message(plan.steps[1].sends, ahead(rank, s, sharding.ranks), whole_shard(problem, sharding, rank));
  }
  return plan;
}

// The document that holds rows of both pieces; [0, 0) when there is none. Two pieces that lie apart share at most one.
std::pair<std::int64_t, std::int64_t> shared_document(const Problem& problem, const Rows& a, const Rows& b) {
  const std::int64_t later_first = std::max(a.first, b.first);
  const auto& bounds = problem.documents;
  const auto after =
      std::upper_bound(bounds.begin(), bounds.end(), later_first);  // the first bound behind it: the document's end
  const std::int64_t begin = *(after - 1);
  return std::min(a.last(), b.last()) >= begin ? std::pair(begin, *after) : std::pair<std::int64_t, std::int64_t>(0, 0);
}

// The parcels for queries of one block and keys of another. At most one segment of a branch reaches from the one into
// the other.
void add_block_parcels(const Problem& problem, const Rows& queries, const Rows& keys, int owner,
                       std::vector<Parcel>& parcels) {
  const auto [begin, end] = shared_document(problem, queries, keys);
  if (begin == end) return;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    const std::int64_t length = std::min(branch.segment, end - begin);
    const std::int64_t segment_begin = begin + (std::max(queries.first, keys.first) - begin) / length * length;
    const std::int64_t segment_end = std::min(segment_begin + length, end);
    const Rows here = cut(queries, segment_begin, segment_end);
    if (here.empty()) continue;
    const Rows seen = cut(keys, segment_begin, problem.causal ? std::min(segment_end, here.last() + 1) : segment_end);
    if (seen.empty()) continue;
    parcels.push_back({owner, seen, static_cast<int>(i), segment_begin, segment_end - segment_begin});
  }
}

// Two blocks of queries may need the same segment of the same keys: it travels once, as far as the later block sees it.
void merge_parcels(std::vector<Parcel>& parcels) {
  std::vector<Parcel> merged;
  for (const Parcel& parcel : parcels) {
    const auto same = std::find_if(merged.begin(), merged.end(), [&](const Parcel& other) {
      return other.branch == parcel.branch && other.segment_begin == parcel.segment_begin &&
             other.rows.first == parcel.rows.first;
    });
    if (same == merged.end())
      merged.push_back(parcel);
    else
      same->rows.count = std::max(same->rows.count, parcel.rows.count);
  }
  parcels = std::move(merged);
}

// Striped: every segment is spread over all ranks, so a rank that is needed at all is needed whole.
bool any_pair(const Problem& problem, const Rows& queries, const Rows& keys) {
  return !problem.causal || keys.first <= queries.last();
}

}  // namespace

std::string_view name(Strategy strategy) { return find_name(kStrategies, strategy); }
Strategy parse_strategy(std::string_view text) { return find_value(kStrategies, "the strategy", text); }

std::vector<Parcel> needed_parcels(const Problem& problem, const Sharding& sharding, int receiver, int owner) {
  std::vector<Parcel> parcels;
  const std::vector<Rows> all_keys = pieces_of(sharding, problem.tokens, owner);
  for (const Rows& queries : pieces_of(sharding, problem.tokens, receiver))
    for (const Rows& keys : all_keys) {
      if (sharding.layout != Layout::striped)
        add_block_parcels(problem, queries, keys, owner, parcels);
      else if (any_pair(problem, queries, keys))
        parcels.push_back({.owner = owner, .rows = keys});
    }
  merge_parcels(parcels);
  const ParcelReader reader(problem);
  std::erase_if(parcels, [&](const Parcel& parcel) { return reader.vectors(parcel) == 0; });
  return parcels;
}

RankPlan make_rank_plan(const Problem& problem, const Sharding& sharding, Strategy strategy, int rank) {
  RankPlan plan;
  switch (strategy) {
    case Strategy::exchange:
      plan = plan_exchange(problem, sharding, rank);
      break;
    case Strategy::ring:
      plan = plan_ring(problem, sharding, rank);
      break;
    case Strategy::gather:
      plan = plan_gather(problem, sharding, rank);
      break;
  }
  plan.pieces = pieces_of(sharding, problem.tokens, rank);
  return plan;
}

namespace {

std::int64_t message_bytes(const Problem& problem, const std::vector<Message>& messages) {
  const ParcelReader reader(problem);
  std::int64_t bytes = 0;
  for (const Message& message : messages)
    for (const Parcel& parcel : message.parcels) bytes += reader.bytes(parcel);
  return bytes;
}

}  // namespace

std::int64_t received_bytes(const Problem& problem, const RankPlan& plan) {
  std::int64_t bytes = 0;
  for (const Step& step : plan.steps) bytes += message_bytes(problem, step.receives);
  return bytes;
}

std::int64_t sent_bytes(const Problem& problem, const RankPlan& plan) {
  std::int64_t bytes = 0;
  for (const Step& step : plan.steps) bytes += message_bytes(problem, step.sends);
  return bytes;
}

}  // namespace annulus
