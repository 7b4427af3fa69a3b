// FileTensor: what a tensor file says about one tensor, the same for safetensors and npy. The bytes are borrowed from
// the map of the file (reading) or from the caller (writing), dense, in row-major order, little-endian.
//
// Formats do not promise alignment: a safetensors header of odd length puts every element at an odd address. Whoever
// needs a pointer to elements takes AlignedElements; whoever copies can memcpy from `bytes` as they are.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/tensor.h"

namespace annulus {

static_assert(std::endian::native == std::endian::little, "tensor files hold little-endian elements, read in place");

enum class ElementType { f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, boolean };

std::string_view name(ElementType type);  // as safetensors spells it: F64, F32, F16, BF16, I64, ..., U8, BOOL
std::int64_t size_of(ElementType type);   // bytes
std::optional<ElementType> find_element_type(std::string_view name);
std::string element_type_names();  // all of them, for messages

inline constexpr std::size_t kMaxDimensions = 8;

struct FileTensor {
  std::string name;  // safetensors: its key; npy has none: the path it was read from
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;   // at most kMaxDimensions; empty: one element
  std::span<const std::byte> bytes;  // exactly as many as type and shape say
};

// Bytes of a dense tensor. Nothing when a size is negative or the sizes that are not 0 multiply to 2^63 bytes or more:
// such a shape is refused even where a 0 makes the tensor empty, so that strides computed from it cannot overflow
// either.
std::optional<std::int64_t> dense_bytes(std::span<const std::int64_t> shape, ElementType type);

// [2, 3, 4]
std::string shape_text(std::span<const std::int64_t> shape);

// Throws InvalidArgument unless the tensor can be written: dimensions, sizes, and as many bytes as they say.
void check_consistent(const FileTensor& tensor, std::string_view source);

ElementType element_type(DType dtype);

// The type to compute in. Without `expected`: that of the file, F32, BF16 or F16. With it, the file's type must be that
// one; U16 passes as bf16 then, for programs that have no bf16 and store its bits as integers. Else InvalidArgument.
DType dtype_of(const FileTensor& tensor, std::optional<DType> expected = std::nullopt);

// The elements at an address aligned to their size: in the file's own bytes where they are so already, else in a copy.
class AlignedElements {
 public:
  explicit AlignedElements(const FileTensor& tensor);

  const void* data() const { return data_; }
  bool is_copy() const { return copy_ != nullptr; }

 private:
  std::unique_ptr<std::byte[]> copy_;
  const std::byte* data_;
};

}  // namespace annulus
