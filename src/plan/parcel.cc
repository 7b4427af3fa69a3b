#include "plan/parcel.h"

#include <algorithm>
#include <limits>

namespace annulus {
namespace {

constexpr Classes kEveryClass{0, std::numeric_limits<std::int64_t>::max()};

}  // namespace

ParcelReader::ParcelReader(const Problem& problem) : problem_(problem) {
  for (std::size_t branch = 0; branch < problem.pattern.branches.size(); ++branch)
    for (std::int64_t kv_head = 0; kv_head < problem.kv_heads; ++kv_head)
      takers_.push_back(takers_of(problem, static_cast<int>(branch), kv_head));
}

template <class F>
void ParcelReader::for_each_run(const Parcel& parcel, F f) const {
  const std::int64_t dilation = problem_.pattern.branches[static_cast<std::size_t>(parcel.branch)].dilation;
  const std::int64_t end = parcel.segment_begin + parcel.segment_length;
  for (std::int64_t kv_head = 0; kv_head < problem_.kv_heads; ++kv_head)
    for (const Takers& takers : takers_[static_cast<std::size_t>(parcel.branch * problem_.kv_heads + kv_head)]) {
      const bool all = takers.classes.count == dilation;
      f(kv_head, takers.classes,
        all ? parcel.rows
            : intersect(progression(parcel.segment_begin, end, takers.classes.first, dilation), parcel.rows));
    }
}

std::vector<std::vector<Place>> ParcelReader::places(const Parcel& parcel) const {
  std::vector<std::vector<Place>> result(static_cast<std::size_t>(problem_.kv_heads));
  if (parcel.branch == kEveryBranch) {
    for (std::int64_t kv_head = 0; kv_head < problem_.kv_heads; ++kv_head)
      result[static_cast<std::size_t>(kv_head)].push_back({kEveryClass, parcel.rows, kv_head, problem_.kv_heads});
    return result;
  }
  std::int64_t vectors = 0;
  for_each_run(parcel, [&](std::int64_t kv_head, const Classes& classes, const Rows& rows) {
    if (!rows.empty()) result[static_cast<std::size_t>(kv_head)].push_back({classes, rows, vectors, 1});
    vectors += rows.count;
  });
  return result;
}

std::int64_t ParcelReader::vectors(const Parcel& parcel) const {
  if (parcel.branch == kEveryBranch) return parcel.rows.count * problem_.kv_heads;
  std::int64_t count = 0;
  for_each_run(parcel, [&](std::int64_t, const Classes&, const Rows& rows) { count += rows.count; });
  return count;
}

std::int64_t ParcelReader::bytes(const Parcel& parcel) const {
  return 2 * problem_.batch * vectors(parcel) * problem_.head_dim * size_of(problem_.dtype);
}

// Of n neighbouring rows, a class has n / r at most, rounded up.
std::int64_t ParcelReader::most_vectors(const Parcel& parcel, std::int64_t parts) const {
  const std::int64_t rows = (parcel.rows.count + parts - 1) / parts;
  if (parcel.branch == kEveryBranch) return rows * problem_.kv_heads;
  if (parts == 1 || parcel.rows.stride != 1) return vectors(parcel);
  const std::int64_t dilation = problem_.pattern.branches[static_cast<std::size_t>(parcel.branch)].dilation;
  std::int64_t count = 0;
  for (std::int64_t kv_head = 0; kv_head < problem_.kv_heads; ++kv_head)
    for (const Takers& takers : takers_[static_cast<std::size_t>(parcel.branch * problem_.kv_heads + kv_head)])
      count += takers.classes.count == dilation ? rows : rows / dilation + (rows % dilation != 0);  // r may be 2^63 - 1
  return count;
}

Place find(const std::vector<Place>& places, std::int64_t phase_class, const Rows& rows) {
  for (const Place& place : places) {
    if (phase_class < place.classes.first || phase_class - place.classes.first >= place.classes.count) continue;
    const Rows found = intersect(rows, place.rows);
    if (found.empty()) continue;
    const Rows memory = memory_rows(found, place.rows);
    return {place.classes, found, place.first + memory.first * place.stride, memory.stride * place.stride};
  }
  return {};
}

Problem problem_of_queries(Problem problem) {
  problem.kv_heads = problem.heads;
  return problem;
}

Parcel slice(const Parcel& parcel, std::int64_t i, std::int64_t parts) {
  const std::int64_t count = parcel.rows.count;
  const auto begin = [&](std::int64_t part) { return count / parts * part + std::min(part, count % parts); };
  Parcel result = parcel;
  const std::int64_t first = begin(i), rows = begin(i + 1) - first;
  result.rows = {parcel.rows[first], rows == 1 ? 1 : parcel.rows.stride, rows};
  return result;
}

}  // namespace annulus
