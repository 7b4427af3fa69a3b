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

ParcelMemory::ParcelMemory(const Problem& problem, const std::vector<Rows>& pieces, Cargo cargo)
    : packed_as_(cargo == Cargo::keys ? problem : problem_of_queries(problem)), pieces_(pieces), reader_(packed_as_) {
  const Element vector{problem.dtype, problem.head_dim}, sums{DType::fp32, problem.head_dim}, number{DType::fp32, 1};
  if (cargo == Cargo::keys) {
    out_ = {vector, vector};
    home_ = {sums, sums};
  } else {
    out_ = {number, number, vector, vector};
    home_ = {sums};
  }
}

std::int64_t ParcelMemory::row_bytes(Way way) const {
  std::int64_t bytes = 0;
  for (const Element& element : elements(way)) bytes += element.width * size_of(element.dtype);
  return packed_as_.batch * bytes;
}

std::int64_t ParcelMemory::bytes(const Parcel& parcel, Way way) const {
  return reader_.vectors(parcel) * row_bytes(way);
}

std::int64_t ParcelMemory::most_bytes(const std::vector<Message>& messages, Way way, std::int64_t parts) const {
  std::int64_t sum = 0;
  for (const Message& message : messages)
    for (const Parcel& parcel : message.parcels) sum += reader_.most_vectors(parcel, parts) * row_bytes(way);
  return sum;
}

std::int64_t ParcelMemory::bytes(const std::vector<Parcel>& parcels, Way way) const {
  std::int64_t sum = 0;
  for (const Parcel& parcel : parcels) sum += bytes(parcel, way);
  return sum;
}

std::vector<TensorView> ParcelMemory::packed(const Parcel& parcel, Way way, std::byte* data) const {
  const bool plain = parcel.branch == kEveryBranch;
  const std::int64_t rows = plain ? parcel.rows.count : reader_.vectors(parcel);
  std::vector<TensorView> views;
  for (const Element& element : elements(way)) {
    views.emplace_back(
        data, element.dtype,
        std::array<std::int64_t, 4>{packed_as_.batch, rows, plain ? packed_as_.kv_heads : 1, element.width});
    data += packed_as_.batch * rows * (plain ? packed_as_.kv_heads : 1) * element.width * size_of(element.dtype);
  }
  return views;
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

void ParcelMemory::add_blocks(const Parcel& parcel, const std::vector<ConstTensorView>& tensors,
                              std::vector<StridedBlock>& blocks) const {
  const auto places = parcel.branch == kEveryBranch ? std::vector<std::vector<Place>>{} : reader_.places(parcel);
  for (const ConstTensorView& view : tensors) {
    if (parcel.branch == kEveryBranch) {
      blocks.push_back(block(part_of(view, own_rows(parcel.rows))));
      continue;
    }
    for (std::int64_t batch = 0; batch < packed_as_.batch; ++batch)
      for (std::size_t head = 0; head < places.size(); ++head)
        for (const Place& place : places[head])
          blocks.push_back(
              block(part_of(sequence(view, batch), own_rows(place.rows), static_cast<std::int64_t>(head))));
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

std::vector<KeySource> own_keys(const Problem& problem, const std::vector<Rows>& pieces, int rank,
                                const KeyTensors& tensors) {
  std::vector<KeySource> sources;
  std::int64_t first = 0;
  for (const Rows& piece : pieces) {
    const Rows rows{first, 1, piece.count};
    sources.push_back(
        {problem,
         {.owner = rank, .rows = piece},
         {part_of(tensors.k, rows), part_of(tensors.v, rows), part_of(tensors.dk, rows), part_of(tensors.dv, rows)}});
    first += piece.count;
  }
  return sources;
}

}  // namespace annulus
