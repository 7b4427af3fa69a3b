#include "exec/parcels_in_memory.h"

#include <stdexcept>

namespace annulus {
namespace {

// One sequence of a batch.
ConstTensorView sequence(ConstTensorView view, std::int64_t batch) {
  view.data = static_cast<const std::byte*>(view.data) + batch * view.stride[0] * size_of(view.dtype);
  view.shape[0] = 1;
  return view;
}

}  // namespace

StridedBlock ParcelMemory::block(const ConstTensorView& view) {
  const std::int64_t size = size_of(view.dtype);
  return {static_cast<const std::byte*>(view.data),
          {Axis{1, 0}, Axis{view.shape[0], view.stride[0] * size}, Axis{view.shape[1], view.stride[1] * size},
           Axis{view.shape[2], view.stride[2] * size}},
          view.shape[3] * size};
}

std::int64_t ParcelMemory::bytes(const Parcel& parcel, DType dtype) const {
  return 2 * problem_.batch * reader_.vectors(parcel) * problem_.head_dim * size_of(dtype);
}

std::int64_t ParcelMemory::bytes(const std::vector<Parcel>& parcels, DType dtype) const {
  std::int64_t sum = 0;
  for (const Parcel& parcel : parcels) sum += bytes(parcel, dtype);
  return sum;
}

PackedPair ParcelMemory::packed(const Parcel& parcel, DType dtype, std::byte* data) const {
  const bool plain = parcel.branch == kEveryBranch;
  const std::int64_t rows = plain ? parcel.rows.count : reader_.vectors(parcel);
  const std::array<std::int64_t, 4> shape{problem_.batch, rows, plain ? problem_.kv_heads : 1, problem_.head_dim};
  const std::int64_t size = shape[0] * shape[1] * shape[2] * shape[3] * size_of(dtype);
  return {TensorView(data, dtype, shape), TensorView(data + size, dtype, shape)};
}

Rows ParcelMemory::own_rows(const Rows& positions) const {
  std::int64_t first = 0;
  for (const Rows& piece : pieces_) {
    if (positions.first >= piece.first && positions.last() <= piece.last() &&
        (positions.first - piece.first) % piece.stride == 0)
      return memory_rows(positions, piece).shifted(first);
    first += piece.count;
  }
  throw std::logic_error("a parcel of rows that this rank does not own");
}

void ParcelMemory::add_blocks(const Parcel& parcel, const ConstTensorView& first, const ConstTensorView& second,
                              std::vector<StridedBlock>& blocks) const {
  for (const ConstTensorView& view : {first, second}) {
    if (parcel.branch == kEveryBranch) {
      blocks.push_back(block(part_of(view, own_rows(parcel.rows))));
      continue;
    }
    const auto places = reader_.places(parcel);
    for (std::int64_t batch = 0; batch < problem_.batch; ++batch)
      for (std::size_t kv_head = 0; kv_head < places.size(); ++kv_head)
        for (const Place& place : places[kv_head])
          blocks.push_back(
              block(part_of(sequence(view, batch), own_rows(place.rows), static_cast<std::int64_t>(kv_head))));
  }
}

std::vector<ParcelMemory::Match> ParcelMemory::matches(const Parcel& parcel, const ConstTensorView& packed,
                                                       const TensorView& own) const {
  if (parcel.branch == kEveryBranch) return {{packed, part_of(own, own_rows(parcel.rows))}};
  std::vector<Match> result;
  const auto places = reader_.places(parcel);
  for (std::size_t kv_head = 0; kv_head < places.size(); ++kv_head)
    for (const Place& place : places[kv_head])
      result.push_back({part_of(packed, {place.first, 1, place.rows.count}),
                        part_of(own, own_rows(place.rows), static_cast<std::int64_t>(kv_head))});
  return result;
}

}  // namespace annulus
