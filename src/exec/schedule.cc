#include "exec/schedule.h"

#include <algorithm>

namespace annulus {
namespace {

std::int64_t largest_shard_rows(const Problem& problem, const Sharding& sharding) {
  std::int64_t rows = 0;
  for (int rank = 0; rank < sharding.ranks; ++rank)
    rows = std::max(rows, count_rows(pieces_of(sharding, problem.tokens, rank)));
  return rows;
}

// The most that a rank may have to receive in one step, the same number on every rank: all rows of the largest shard,
// in the form that they travel in.
std::int64_t largest_step_bytes(const Problem& problem, const Sharding& sharding, Strategy strategy,
                                std::int64_t rows) {
  const ParcelReader reader(problem);
  const std::int64_t whole = reader.bytes({.owner = 0, .rows = {0, 1, rows}});
  if (strategy != Strategy::exchange || sharding.layout == Layout::striped) return whole;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const std::int64_t length = std::min(problem.pattern.branches[i].segment, problem.tokens);
    bytes += reader.bytes({.owner = 0,
                           .rows = {0, 1, std::min(rows, length)},
                           .branch = static_cast<int>(i),
                           .segment_begin = 0,
                           .segment_length = length});
  }
  return bytes;
}

std::vector<Message> slices_of(const std::vector<Message>& messages, std::int64_t i, std::int64_t parts) {
  std::vector<Message> result;
  for (const Message& message : messages) {
    std::vector<Parcel> parcels;
    for (const Parcel& parcel : message.parcels)
      if (const Parcel part = slice(parcel, i, parts); !part.rows.empty()) parcels.push_back(part);
    if (!parcels.empty()) result.push_back({message.peer, std::move(parcels)});
  }
  return result;
}

}  // namespace

Schedule::Schedule(const Problem& problem, const Sharding& sharding, Strategy strategy, int rank,
                   std::int64_t slot_bytes, Cargo cargo)
    : plan_(make_rank_plan(problem, sharding, strategy, rank, cargo)) {
  if (strategy != Strategy::gather) {  // which is what its name says
    const std::int64_t rows = largest_shard_rows(problem, sharding);
    const std::int64_t bytes =
        largest_step_bytes(cargo == Cargo::keys ? problem : problem_of_queries(problem), sharding, strategy, rows);
    slices_ = 1 + std::max<std::int64_t>(bytes - 1, 0) / std::max<std::int64_t>(slot_bytes, 1);
    slices_ = std::min(slices_, std::max<std::int64_t>(rows, 1));  // a slice without a row moves nothing
  }
  const bool receives =
      std::any_of(plan_.steps.begin(), plan_.steps.end(), [](const Step& step) { return !step.receives.empty(); });
  if (!receives) return;
  for (std::int64_t e = count(); e > 0 && last_receive_ == 0; --e)
    if (!exchange(e).receives.empty()) last_receive_ = e;
}

Step Schedule::exchange(std::int64_t e) const {
  if (e < 1 || e > count()) return {};
  const auto per_slice = static_cast<std::int64_t>(plan_.steps.size()) - 1;
  const Step& step = plan_.steps[static_cast<std::size_t>(1 + (e - 1) % per_slice)];
  const std::int64_t i = (e - 1) / per_slice;
  return {slices_of(step.sends, i, slices_), slices_of(step.receives, i, slices_), slices_of(step.returns, i, slices_),
          slices_of(step.homecomings, i, slices_)};
}

bool Schedule::is_empty() const {
  return std::ranges::all_of(plan_.steps, [](const Step& step) { return step.sends.empty() && step.receives.empty(); });
}

}  // namespace annulus
