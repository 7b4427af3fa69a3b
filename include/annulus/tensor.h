// Views of the caller's memory. Annulus never owns a tensor.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace annulus {

enum class DType { fp32, bf16, fp16 };

constexpr std::int64_t size_of(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }
std::string_view name(DType dtype);
DType parse_dtype(std::string_view text);  // throws InvalidArgument

// A tensor [batch, tokens, heads, head_dim] anywhere in memory. Strides are in elements; the elements of one head are
// contiguous (stride[3] == 1), all other strides are free.
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::fp32;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> stride{};

  BasicTensorView() = default;
  // Dense, in the order of the shape.
  BasicTensorView(Void* data_, DType dtype_, std::array<std::int64_t, 4> shape_)
      : BasicTensorView(data_, dtype_, shape_,
                        {shape_[1] * shape_[2] * shape_[3], shape_[2] * shape_[3], shape_[3], 1}) {}
  BasicTensorView(Void* data_, DType dtype_, std::array<std::int64_t, 4> shape_, std::array<std::int64_t, 4> stride_)
      : data(data_), dtype(dtype_), shape(shape_), stride(stride_) {}
  // What may be written may be read.
  template <class Other>
  requires(std::is_const_v<Void>&& std::is_same_v<Void, const Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : BasicTensorView(other.data, other.dtype, other.shape, other.stride) {}
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

}  // namespace annulus
