#include "io/file_tensor.h"

#include <algorithm>
#include <cstring>

#include "annulus/errors.h"
#include "io/file_error.h"

namespace annulus {
namespace {

struct TypeEntry {
  ElementType type;
  std::string_view name;
  std::int64_t size;
};

constexpr TypeEntry kTypes[] = {
    {ElementType::f64, "F64", 8},      {ElementType::f32, "F32", 4}, {ElementType::f16, "F16", 2},
    {ElementType::bf16, "BF16", 2},    {ElementType::i64, "I64", 8}, {ElementType::i32, "I32", 4},
    {ElementType::i16, "I16", 2},      {ElementType::i8, "I8", 1},   {ElementType::u64, "U64", 8},
    {ElementType::u32, "U32", 4},      {ElementType::u16, "U16", 2}, {ElementType::u8, "U8", 1},
    {ElementType::boolean, "BOOL", 1},
};

constexpr bool in_enum_order() {
  for (std::size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i].type != static_cast<ElementType>(i)) return false;
  }
  return true;
}
static_assert(in_enum_order(), "kTypes is indexed by ElementType");

const TypeEntry& entry(ElementType type) { return kTypes[static_cast<std::size_t>(type)]; }

std::string label(const FileTensor& tensor) { return "tensor " + printable(tensor.name); }

}  // namespace

std::string_view name(ElementType type) { return entry(type).name; }

std::int64_t size_of(ElementType type) { return entry(type).size; }

std::optional<ElementType> find_element_type(std::string_view name) {
  const auto* found = std::ranges::find(kTypes, name, &TypeEntry::name);
  if (found == std::end(kTypes)) return std::nullopt;
  return found->type;
}

std::string element_type_names() {
  std::string names;
  for (const TypeEntry& type : kTypes) {
    if (!names.empty()) names += ", ";
    names += type.name;
  }
  return names;
}

std::optional<std::int64_t> dense_bytes(std::span<const std::int64_t> shape, ElementType type) {
  std::int64_t bytes = size_of(type);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, size, &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

void check_consistent(const FileTensor& tensor, std::string_view source) {
  const std::string where = std::string(source) + ": " + label(tensor);
  if (tensor.shape.size() > kMaxDimensions) {
    reject_file(where, "a shape has at most " + std::to_string(kMaxDimensions) + " dimensions",
                std::to_string(tensor.shape.size()), "merge some dimensions");
  }
  const std::optional<std::int64_t> bytes = dense_bytes(tensor.shape, tensor.type);
  if (!bytes) {
    reject_file(where, "sizes must be at least 0 and multiply to less than 2^63 bytes", shape_text(tensor.shape),
                "give the tensor's real shape");
  }
  if (static_cast<std::size_t>(*bytes) != tensor.bytes.size()) {
    reject_file(where,
                "shape " + shape_text(tensor.shape) + " of " + std::string(name(tensor.type)) + " takes " +
                    std::to_string(*bytes) + " bytes",
                std::to_string(tensor.bytes.size()), "make the shape, the type and the data agree");
  }
}

ElementType element_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return ElementType::bf16;
    case DType::fp16:
      return ElementType::f16;
    case DType::fp32:
      break;
  }
  return ElementType::f32;
}

DType dtype_of(const FileTensor& tensor, std::optional<DType> expected) {
  const std::string received(name(tensor.type));
  if (expected) {
    const ElementType wanted = element_type(*expected);
    const bool bits_of_bf16 = wanted == ElementType::bf16 && tensor.type == ElementType::u16;
    if (tensor.type == wanted || bits_of_bf16) return *expected;
    reject_file(label(tensor), "its type must be " + std::string(name(wanted)), received,
                "convert the tensor, or ask for the type it has");
  }
  switch (tensor.type) {
    case ElementType::f32:
      return DType::fp32;
    case ElementType::bf16:
      return DType::bf16;
    case ElementType::f16:
      return DType::fp16;
    case ElementType::u16:
      reject_file(label(tensor), "its type must be F32, BF16 or F16", received,
                  "if these are the bits of bf16 numbers, ask for bf16");
    default:
      reject_file(label(tensor), "its type must be F32, BF16 or F16", received, "convert the tensor to one of these");
  }
}

AlignedElements::AlignedElements(const FileTensor& tensor) : data_(tensor.bytes.data()) {
  const auto address = reinterpret_cast<std::uintptr_t>(data_);
  if (tensor.bytes.empty() || address % static_cast<std::uintptr_t>(size_of(tensor.type)) == 0) return;
  copy_ = std::make_unique_for_overwrite<std::byte[]>(tensor.bytes.size());  // new[] aligns for every element type
  std::memcpy(copy_.get(), tensor.bytes.data(), tensor.bytes.size());
  data_ = copy_.get();
}

}  // namespace annulus
