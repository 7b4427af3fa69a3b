// A tensor in memory of its own that notices what is done to it.
//
// The view lies with any strides inside a buffer whose other bytes are guards. Elements begin as a NaN that no
// arithmetic makes, so one that was never written can be told from one that became NaN, and one that was read before it
// was written spoils the result.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "annulus/tensor.h"
#include "numeric/half.h"

namespace annulus::support {

using Shape = std::array<std::int64_t, 4>;

enum class Layout {
  dense,
  apart,        // rows, heads and batches with gaps between them
  heads_major,  // [batch, heads, tokens, head_dim], as many frameworks keep it
  broadcast,    // batch stride 0: inputs alone
};

inline Shape strides_of(Layout layout, const Shape& shape) {
  const auto [batch, tokens, heads, head_dim] = shape;
  switch (layout) {
    case Layout::dense:
    case Layout::broadcast:
      return {layout == Layout::dense ? tokens * heads * head_dim : 0, heads * head_dim, head_dim, 1};
    case Layout::apart: {
      const std::int64_t head = head_dim + 3;
      const std::int64_t token = heads * head + 5;
      return {tokens * token + 7, token, head, 1};
    }
    case Layout::heads_major:
      return {heads * tokens * head_dim, head_dim, tokens * head_dim, 1};
  }
  return {};
}

class HostTensor {
 public:
  HostTensor(DType dtype, const Shape& shape, Layout layout = Layout::dense)
      : HostTensor(dtype, shape, strides_of(layout, shape)) {}

  HostTensor(DType dtype, const Shape& shape, const Shape& stride) : dtype_(dtype), shape_(shape), stride_(stride) {
    std::int64_t extent = 1;
    for (std::size_t i = 0; i < 4; ++i)
      extent = shape[i] == 0 ? 0 : extent + (extent > 0 ? (shape[i] - 1) * stride[i] : 0);
    bytes_.assign(index(extent * size_of(dtype)) + 2 * kGuardBytes, kGuard);
    is_element_.assign(bytes_.size(), false);
    for_each_element([&](std::size_t at, std::size_t) {
      for (std::size_t byte = 0; byte < index(size_of(dtype_)); ++byte) is_element_[at + byte] = true;
      store_bits(at, poison());
    });
  }

  // The first element is aligned to its own size and to nothing more.
  TensorView view() { return {bytes_.data() + kGuardBytes, dtype_, shape_, stride_}; }
  ConstTensorView view() const { return {bytes_.data() + kGuardBytes, dtype_, shape_, stride_}; }

  // Dense values, rounded to the type. Where several elements share memory the last one stays.
  void fill(const std::vector<double>& values) {
    for_each_element([&](std::size_t at, std::size_t i) { store_bits(at, bits_of(values[i])); });
  }

  std::vector<double> read() const {
    std::vector<double> values(count());
    for_each_element([&](std::size_t at, std::size_t i) { values[i] = value_of(load_bits(at)); });
    return values;
  }

  // As stored, for comparisons bit by bit.
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> values(count());
    for_each_element([&](std::size_t at, std::size_t i) { values[i] = load_bits(at); });
    return values;
  }

  void set_bits(std::size_t element, std::uint32_t value) {
    for_each_element([&](std::size_t at, std::size_t i) {
      if (i == element) store_bits(at, value);
    });
  }

  // "" or what is wrong: a guard byte changed, or an element was never written.
  std::string faults(const char* name) const {
    for (std::size_t i = 0; i < bytes_.size(); ++i)
      if (!is_element_[i] && bytes_[i] != kGuard)
        return std::string(name) + ": written outside of the view at byte " + std::to_string(i);
    std::string fault;
    for_each_element([&](std::size_t at, std::size_t i) {
      if (fault.empty() && load_bits(at) == poison())
        fault = std::string(name) + ": element " + std::to_string(i) + " was not written";
    });
    return fault;
  }

  bool untouched() const {
    bool same = true;
    for_each_element([&](std::size_t at, std::size_t) { same = same && load_bits(at) == poison(); });
    for (std::size_t i = 0; i < bytes_.size(); ++i) same = same && (is_element_[i] || bytes_[i] == kGuard);
    return same;
  }

  std::size_t count() const { return index(shape_[0] * shape_[1] * shape_[2] * shape_[3]); }

  // Guards and all, to be copied to a device and back. The first element lies kGuardBytes behind the start.
  std::vector<std::byte>& storage() { return bytes_; }
  static constexpr std::size_t kGuardBytes = 68;  // no multiple of any vector

 private:
  static constexpr std::byte kGuard{0xa7};

  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  std::uint32_t poison() const {
    return dtype_ == DType::fp32 ? 0x7fa5a5a5u : dtype_ == DType::bf16 ? 0x7fa5u : 0x7da5u;
  }

  std::uint32_t bits_of(double value) const {
    if (dtype_ == DType::bf16) return from_double<BFloat16>(value).bits;
    if (dtype_ == DType::fp16) return from_double<Float16>(value).bits;
    return std::bit_cast<std::uint32_t>(static_cast<float>(value));
  }
  double value_of(std::uint32_t bits) const {
    if (dtype_ == DType::bf16) return static_cast<double>(to_float(BFloat16{static_cast<std::uint16_t>(bits)}));
    if (dtype_ == DType::fp16) return static_cast<double>(to_float(Float16{static_cast<std::uint16_t>(bits)}));
    return static_cast<double>(std::bit_cast<float>(bits));
  }

  void store_bits(std::size_t at, std::uint32_t bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (dtype_ == DType::fp32)
      std::memcpy(bytes_.data() + at, &bits, sizeof bits);
    else
      std::memcpy(bytes_.data() + at, &half, sizeof half);
  }
  std::uint32_t load_bits(std::size_t at) const {
    std::uint32_t bits = 0;
    std::uint16_t half = 0;
    if (dtype_ == DType::fp32) {
      std::memcpy(&bits, bytes_.data() + at, sizeof bits);
      return bits;
    }
    std::memcpy(&half, bytes_.data() + at, sizeof half);
    return half;
  }

  // f(byte, dense index)
  template <class F>
  void for_each_element(F f) const {
    std::size_t i = 0;
    for (std::int64_t b = 0; b < shape_[0]; ++b)
      for (std::int64_t t = 0; t < shape_[1]; ++t)
        for (std::int64_t h = 0; h < shape_[2]; ++h)
          for (std::int64_t d = 0; d < shape_[3]; ++d) {
            const std::int64_t at = b * stride_[0] + t * stride_[1] + h * stride_[2] + d * stride_[3];
            f(kGuardBytes + index(at * size_of(dtype_)), i++);
          }
  }

  DType dtype_;
  Shape shape_;
  Shape stride_;
  std::vector<std::byte> bytes_;
  std::vector<bool> is_element_;
};

}  // namespace annulus::support
