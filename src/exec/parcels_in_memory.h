// Parcels in memory: as they lie packed in a slot, and as their rows lie in the owner's tensors.
//
// Packed, a parcel is several tensors one behind the other:
//   keys      k, v            home: dk, dv in fp32
//   queries   lse, Delta in fp32, then q, dout; home: dq in fp32
#pragma once

#include <cstddef>
#include <vector>

#include "annulus/strided_block.h"
#include "annulus/tensor.h"
#include "kernels/row_source.h"
#include "plan/parcel.h"
#include "plan/rank_plan.h"

namespace annulus {

enum class Way { out, home };

class ParcelMemory {
 public:
  // What it is given must outlive it.
  ParcelMemory(const Problem& problem, const std::vector<Rows>& pieces, Cargo cargo);

  std::int64_t bytes(const Parcel& parcel, Way way) const;
  std::int64_t bytes(const std::vector<Parcel>& parcels, Way way) const;
  // The most that one of `parts` slices of all of them together can have.
  std::int64_t most_bytes(const std::vector<Message>& messages, Way way, std::int64_t parts) const;

  // [batch, rows, heads, width], or [batch, vectors, 1, width] for a parcel of a branch.
  std::vector<TensorView> packed(const Parcel& parcel, Way way, std::byte* data) const;

  // The bytes of this rank's parcel in its own tensors [batch, rows, heads, width], in packed order.
  void add_blocks(const Parcel& parcel, const std::vector<ConstTensorView>& tensors,
                  std::vector<StridedBlock>& blocks) const;

  // The parts of a packed tensor of this rank's parcel and those of its own tensor that hold the same rows.
  struct Match {
    ConstTensorView packed;
    TensorView own;
  };
  std::vector<Match> matches(const Parcel& parcel, const ConstTensorView& packed, const TensorView& own) const;

  // Where these positions lie in this rank's tensors; they must lie in one of its pieces.
  Rows own_rows(const Rows& positions) const;
  // A whole view as bytes.
  static StridedBlock block(const ConstTensorView& view);

 private:
  struct Element {
    DType dtype = DType::fp32;
    std::int64_t width = 0;
  };
  std::int64_t row_bytes(Way way) const;
  const std::vector<Element>& elements(Way way) const { return way == Way::out ? out_ : home_; }

  Problem packed_as_;
  const std::vector<Rows>& pieces_;
  ParcelReader reader_;
  std::vector<Element> out_, home_;
};

// This rank's own keys, piece by piece. Tensors without data stay so.
std::vector<KeySource> own_keys(const Problem& problem, const std::vector<Rows>& pieces, int rank,
                                const KeyTensors& tensors);

// Some rows of one head, or of all (head < 0), of a tensor. One that is not there stays so.
template <class View>
View part_of(View view, const Rows& rows, std::int64_t head = -1) {
  const std::int64_t offset = rows.first * view.stride[1] + (head < 0 ? 0 : head * view.stride[2]);
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, std::byte, const std::byte>;
  if (view.data != nullptr) view.data = static_cast<Byte*>(view.data) + offset * size_of(view.dtype);
  view.shape[1] = rows.count;
  view.stride[1] *= rows.stride;
  if (head >= 0) view.shape[2] = 1;
  return view;
}

}  // namespace annulus
