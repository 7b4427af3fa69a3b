#include "plan/needs.h"

#include <algorithm>
#include <numeric>

namespace annulus {
namespace {

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
void add_block_parcels(const Problem& problem, const Rows& queries, const Rows& keys, const Need& need,
                       std::vector<Parcel>& parcels) {
  const auto [begin, end] = shared_document(problem, queries, keys);
  if (begin == end) return;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    const std::int64_t length = std::min(branch.segment, end - begin);
    const std::int64_t segment_begin = begin + (std::max(queries.first, keys.first) - begin) / length * length;
    const std::int64_t segment_end = std::min(segment_begin + length, end);
    Rows seeing = cut(queries, segment_begin, segment_end);
    Rows seen = cut(keys, segment_begin, segment_end);
    if (seeing.empty() || seen.empty()) continue;
    if (problem.causal) {
      const Rows all_seen = seen;
      seen = cut(seen, segment_begin, seeing.last() + 1);
      seeing = cut(seeing, all_seen.first, segment_end);
      if (seeing.empty() || seen.empty()) continue;
    }
    parcels.push_back({need.owner, need.cargo == Cargo::keys ? seen : seeing, static_cast<int>(i), segment_begin,
                       segment_end - segment_begin});
  }
}

// Two blocks of one rank may need the same segment of the same block of the other: it travels once, as far as either
// needs it.
void merge_parcels(std::vector<Parcel>& parcels) {
  std::vector<Parcel> merged;
  for (const Parcel& parcel : parcels) {
    const auto same = std::find_if(merged.begin(), merged.end(), [&](const Parcel& other) {
      return other.branch == parcel.branch && other.segment_begin == parcel.segment_begin &&
             (other.rows.first == parcel.rows.first || other.rows.last() == parcel.rows.last());
    });
    if (same == merged.end())
      merged.push_back(parcel);
    else if (parcel.rows.count > same->rows.count)
      same->rows = parcel.rows;
  }
  parcels = std::move(merged);
}

// Striped: every long enough segment is spread over all ranks. Queries and keys of one class are a multiple of r apart,
// those of two ranks a fixed distance modulo p: they meet if the greatest common divisor allows.
bool stripes_meet(const Problem& problem, int ranks, const Rows& queries, const Rows& keys) {
  if (problem.causal && keys.first > queries.last()) return false;
  const std::int64_t distance = queries.first - keys.first;
  return std::any_of(problem.pattern.branches.begin(), problem.pattern.branches.end(), [&](const Branch& branch) {
    return branch.head_count > 0 && distance % std::gcd<std::int64_t>(branch.dilation, ranks) == 0;
  });
}

}  // namespace

std::vector<Parcel> needed_parcels(const ParcelReader& reader, const Problem& problem, const Sharding& sharding,
                                   const Need& need) {
  std::vector<Parcel> parcels;
  const bool keys_travel = need.cargo == Cargo::keys;
  const std::vector<Rows> all_keys = pieces_of(sharding, problem.tokens, keys_travel ? need.owner : need.receiver);
  for (const Rows& queries : pieces_of(sharding, problem.tokens, keys_travel ? need.receiver : need.owner))
    for (const Rows& keys : all_keys) {
      if (sharding.layout != Layout::striped)
        add_block_parcels(problem, queries, keys, need, parcels);
      else if (stripes_meet(problem, sharding.ranks, queries, keys))
        parcels.push_back({.owner = need.owner, .rows = keys_travel ? keys : queries});
    }
  merge_parcels(parcels);
  std::erase_if(parcels, [&](const Parcel& parcel) { return reader.vectors(parcel) == 0; });
  return parcels;
}

Reach::Reach(const Problem& problem, const Sharding& sharding, int owner)
    : problem_(problem), sharding_(sharding), owner_(owner) {
  const auto& bounds = problem.documents;
  for (const Rows& piece : pieces_of(sharding, problem.tokens, owner)) {
    if (sharding.layout == Layout::striped) {
      ranges_.push_back({problem.causal ? piece.first : 0, problem.tokens});
      continue;
    }
    // Where the documents of the first and the last key begin and end: segments stay inside.
    const auto first = std::upper_bound(bounds.begin(), bounds.end(), piece.first);
    const auto last = std::upper_bound(bounds.begin(), bounds.end(), piece.last());
    Range range{piece.first, piece.last() + 1};
    for (const Branch& branch : problem.pattern.branches) {
      if (branch.head_count == 0) continue;
      const std::int64_t begin = *(first - 1), end = *last, last_begin = *(last - 1);
      const std::int64_t length = std::min(branch.segment, *first - begin);
      const std::int64_t last_length = std::min(branch.segment, end - last_begin);
      range.begin = std::min(range.begin, begin + (piece.first - begin) / length * length);
      range.end = std::max(range.end,
                           std::min(end, last_begin + ((piece.last() - last_begin) / last_length + 1) * last_length));
    }
    if (problem.causal) range.begin = piece.first;
    ranges_.push_back(range);
  }
}

bool Reach::meets(int receiver) const {
  for (const Rows& piece : pieces_of(sharding_, problem_.tokens, receiver))
    for (const Range& range : ranges_)
      if (piece.first < range.end && piece.last() >= range.begin) return true;
  return false;
}

int Reach::last_hop() const {
  if (ranges_.empty()) return 0;
  if (sharding_.layout == Layout::contiguous) {
    // The ranks that meet it follow one another: the one behind the owner is the last, else the one furthest ahead.
    const auto& bounds = sharding_.boundaries;
    const Range& range = ranges_.front();
    if (owner_ > 0 && range.begin < bounds[static_cast<std::size_t>(owner_)]) return sharding_.ranks - 1;
    const auto end = std::lower_bound(bounds.begin(), bounds.end(), range.end);
    return static_cast<int>(end - bounds.begin()) - 1 - owner_;
  }
  for (int s = sharding_.ranks - 1; s > 0; --s)
    if (meets((owner_ + s) % sharding_.ranks)) return s;
  return 0;
}

Rows Reach::hull() const {
  if (ranges_.empty()) return {};
  Range all = ranges_.front();
  for (const Range& range : ranges_) all = {std::min(all.begin, range.begin), std::max(all.end, range.end)};
  return {all.begin, 1, all.end - all.begin};
}

}  // namespace annulus
