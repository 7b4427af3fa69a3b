// KeySource: keys and values that are at hand. Which positions they have, and where in memory the rows of a group lie.
//
// A rank's own keys lie as the caller laid them; those of other ranks lie in a slot as they were packed. Kernels see no
// difference.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "annulus/tensor.h"
#include "plan/parcel.h"

namespace annulus {

struct KeyTensors {
  ConstTensorView k, v;  // plain parcels: [batch, rows, kv_heads, head_dim]; of a branch: [batch, vectors, 1, head_dim]
  TensorView dk, dv;     // the same shapes in fp32; for backward alone
};

class KeySource {
 public:
  KeySource(const Problem& problem, const Parcel& parcel, const KeyTensors& given) : tensors(given), parcel_(parcel) {
    if (parcel.branch != kEveryBranch) places_ = ParcelReader(problem).places(parcel);
  }

  bool serves(int branch) const { return parcel_.branch == kEveryBranch || parcel_.branch == branch; }
  const Rows& rows() const { return parcel_.rows; }

  // Rows of the tensors, and the head in them, that hold these keys of one class of a key/value head.
  struct Found {
    Rows rows;
    std::int64_t head = 0;
  };
  Found find(std::int64_t kv_head, std::int64_t phase_class, const Rows& keys) const {
    if (parcel_.branch == kEveryBranch) return {memory_rows(keys, parcel_.rows), kv_head};
    const Place place = annulus::find(places_[static_cast<std::size_t>(kv_head)], phase_class, keys);
    return {{place.first, place.rows.count == 1 ? 1 : place.stride, place.rows.count}, 0};
  }

  KeyTensors tensors;

 private:
  Parcel parcel_;
  std::vector<std::vector<Place>> places_;  // of each key/value head; none for plain parcels
};

}  // namespace annulus
