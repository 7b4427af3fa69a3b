// RowSource: rows that are at hand, a rank's own or ones that have travelled. Which positions they have, and where in
// memory the rows of a group lie.
//
// A rank's own rows lie as the caller laid them; those of other ranks lie in a slot as they were packed. Kernels see no
// difference.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "annulus/tensor.h"
#include "plan/parcel.h"

namespace annulus {

// Tensors of plain parcels are [batch, rows, heads, width], those of a branch's [batch, vectors, 1, width].
class RowSource {
 public:
  // `problem` is that of keys; see problem_of_queries for the other side.
  RowSource(const Problem& problem, const Parcel& parcel) : parcel_(parcel) {
    if (parcel.branch != kEveryBranch) places_ = ParcelReader(problem).places(parcel);
  }

  bool serves(int branch) const { return parcel_.branch == kEveryBranch || parcel_.branch == branch; }
  const Rows& rows() const { return parcel_.rows; }
  const Parcel& parcel() const { return parcel_; }

  // Rows of the tensors, and the head in them, that hold these positions of one class.
  struct Found {
    Rows rows;
    std::int64_t head = 0;
  };
  Found find(std::int64_t head, std::int64_t phase_class, const Rows& positions) const {
    if (parcel_.branch == kEveryBranch) return {memory_rows(positions, parcel_.rows), head};
    const Place place = annulus::find(places_[static_cast<std::size_t>(head)], phase_class, positions);
    return {{place.first, place.rows.count == 1 ? 1 : place.stride, place.rows.count}, 0};
  }

 private:
  Parcel parcel_;
  std::vector<std::vector<Place>> places_;  // of each head; none for plain parcels
};

struct KeyTensors {
  ConstTensorView k, v;
  TensorView dk, dv;  // fp32; for backward alone
};

struct KeySource : RowSource {
  KeySource(const Problem& problem, const Parcel& parcel, const KeyTensors& given)
      : RowSource(problem, parcel), tensors(given) {}
  KeyTensors tensors;
};

// For backward. lse and Delta are tensors of single numbers.
struct QueryTensors {
  ConstTensorView q, dout, lse, delta;
  TensorView dq;  // fp32
};

struct QuerySource : RowSource {
  QuerySource(const Problem& problem, const Parcel& parcel, const QueryTensors& given)
      : RowSource(problem, parcel), tensors(given) {}
  QueryTensors tensors;
};

// [batch, heads, rows] as a tensor of single numbers.
template <class Void>
BasicTensorView<Void> single_numbers(Void* data, std::int64_t batch, std::int64_t rows, std::int64_t heads) {
  return {data, DType::fp32, {batch, rows, heads, 1}, {heads * rows, 1, rows, 1}};
}

}  // namespace annulus
