#include "plan/parcel.h"

#include "plan/phase.h"

namespace annulus {

// Calls f(classes, place) with places counted from the head's own first vector. Parcels of a branch alone.
template <class F>
void ParcelReader::for_each_place(const Parcel& parcel, std::int64_t kv_head, F f) const {
  const std::int64_t dilation = problem_.pattern.branches[static_cast<std::size_t>(parcel.branch)].dilation;
  const std::int64_t segment_end = parcel.segment_begin + parcel.segment_length;
  std::int64_t first = 0;
  for (const Takers& takers : takers_of(problem_, parcel.branch, kv_head)) {
    const bool all = takers.classes.count == dilation;
    const Rows rows =
        all ? parcel.rows
            : intersect(progression(parcel.segment_begin, segment_end, takers.classes.first, dilation), parcel.rows);
    f(takers.classes, Place{rows, first, 1});
    first += rows.count;
  }
}

std::int64_t ParcelReader::vectors_of_head(const Parcel& parcel, std::int64_t kv_head) const {
  std::int64_t count = 0;
  for_each_place(parcel, kv_head, [&](const Classes&, const Place& place) { count += place.rows.count; });
  return count;
}

std::int64_t ParcelReader::vectors(const Parcel& parcel) const {
  if (parcel.branch == kEveryBranch) return parcel.rows.count * problem_.kv_heads;
  std::int64_t count = 0;
  for (std::int64_t kv_head = 0; kv_head < problem_.kv_heads; ++kv_head) count += vectors_of_head(parcel, kv_head);
  return count;
}

std::int64_t ParcelReader::bytes(const Parcel& parcel) const {
  return 2 * problem_.batch * vectors(parcel) * problem_.head_dim * size_of(problem_.dtype);
}

std::vector<Place> ParcelReader::places(const Parcel& parcel, std::int64_t kv_head) const {
  if (parcel.branch == kEveryBranch) return {{parcel.rows, kv_head, problem_.kv_heads}};
  std::int64_t before = 0;
  for (std::int64_t head = 0; head < kv_head; ++head) before += vectors_of_head(parcel, head);
  std::vector<Place> result;
  for_each_place(parcel, kv_head, [&](const Classes&, const Place& place) {
    if (!place.rows.empty()) result.push_back({place.rows, before + place.first, 1});
  });
  return result;
}

Place ParcelReader::find(const Parcel& parcel, std::int64_t kv_head, std::int64_t phase_class,
                         const Rows& group) const {
  if (parcel.branch == kEveryBranch) {
    const Rows rows = intersect(group, parcel.rows);
    if (rows.empty()) return {};
    const Rows memory = memory_rows(rows, parcel.rows);
    return {rows, memory.first * problem_.kv_heads + kv_head, memory.stride * problem_.kv_heads};
  }
  std::int64_t before = 0;
  for (std::int64_t head = 0; head < kv_head; ++head) before += vectors_of_head(parcel, head);
  Place found;
  for_each_place(parcel, kv_head, [&](const Classes& classes, const Place& place) {
    if (phase_class < classes.first || phase_class >= classes.first + classes.count) return;
    const Rows rows = intersect(group, place.rows);
    if (rows.empty()) return;
    const Rows memory = memory_rows(rows, place.rows);
    found = {rows, before + place.first + memory.first, memory.stride};
  });
  return found;
}

}  // namespace annulus
