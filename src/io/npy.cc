#include "io/npy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "io/atomic_file.h"
#include "io/file_error.h"
#include "io/header_cursor.h"

namespace annulus {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeaderBytes = 65'535;  // what version 1.0 can say; only structured types ever need more
constexpr std::size_t kDataAlignment = 64;
constexpr std::string_view kRemedy = "the file is damaged or not an npy file: write it again";

struct Descriptor {
  std::string_view text;
  ElementType type;
};

// The first one of a type is written.
constexpr Descriptor kDescriptors[] = {
    {"<f8", ElementType::f64},  {"<f4", ElementType::f32},     {"<f2", ElementType::f16}, {"<V2", ElementType::bf16},
    {"|V2", ElementType::bf16}, {"<i8", ElementType::i64},     {"<i4", ElementType::i32}, {"<i2", ElementType::i16},
    {"|i1", ElementType::i8},   {"<u8", ElementType::u64},     {"<u4", ElementType::u32}, {"<u2", ElementType::u16},
    {"|u1", ElementType::u8},   {"|b1", ElementType::boolean},
};

struct Sections {
  std::string_view header;
  std::span<const std::byte> data;
};

Sections split(std::span<const std::byte> file, std::string_view source) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  if (!text.starts_with(kMagic)) {
    reject_file(source, "an npy file begins with \\x93NUMPY", printable(text.substr(0, kMagic.size())), kRemedy);
  }
  const auto byte_at = [&](std::size_t i) { return i < file.size() ? std::to_integer<std::size_t>(file[i]) : 0; };
  const std::size_t major = byte_at(6);
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  const std::size_t header_begin = kMagic.size() + 2 + length_bytes;
  if (file.size() < header_begin) {
    reject_file(source, "an npy file has a version and a header length",
                "a file of " + std::to_string(file.size()) + " bytes", kRemedy);
  }
  if (major < 1 || major > 3 || byte_at(7) != 0) {
    reject_file(source, "the npy version must be 1.0, 2.0 or 3.0",
                std::to_string(major) + "." + std::to_string(byte_at(7)), "save the array again with numpy.save");
  }
  std::size_t header_bytes = 0;
  for (std::size_t i = length_bytes; i-- > 0;) header_bytes = header_bytes << 8 | byte_at(kMagic.size() + 2 + i);
  if (header_bytes > kMaxHeaderBytes) {
    reject_file(source, "an npy header has at most " + std::to_string(kMaxHeaderBytes) + " bytes",
                std::to_string(header_bytes), kRemedy);
  }
  if (header_bytes > file.size() - header_begin) {
    reject_file(source, "the header must lie inside the file",
                "a header of " + std::to_string(header_bytes) + " bytes in a file of " + std::to_string(file.size()),
                "the file is cut short: copy or write it again");
  }
  return {text.substr(header_begin, header_bytes), file.subspan(header_begin + header_bytes)};
}

// A Python string without escapes, in either kind of quotes; nothing when none begins here.
std::optional<std::string_view> take_string(HeaderCursor& cursor) {
  const std::string_view quote = cursor.take("'") ? "'" : cursor.take("\"") ? "\"" : "";
  if (quote.empty()) return std::nullopt;
  const std::string_view text = cursor.rest().substr(0, cursor.rest().find_first_of("'\"\\\n"));
  cursor.advance(text.size());
  if (!cursor.rest().starts_with(quote))
    cursor.fail("a string must end with " + std::string(quote) + ", without escapes");
  cursor.advance(1);
  return text;
}

ElementType read_descriptor(HeaderCursor& cursor, std::string_view source) {
  const std::optional<std::string_view> text = take_string(cursor);
  if (!text) {
    reject_file(source, "'descr' must be a string, the type of all elements", printable(cursor.rest().substr(0, 24)),
                "save each field of a structured array as an array of its own");
  }
  const auto* found = std::ranges::find(kDescriptors, *text, &Descriptor::text);
  if (found != std::end(kDescriptors)) return found->type;
  if (text->starts_with('>')) {
    reject_file(source, "elements must be little-endian", printable(*text),
                "save a.astype(a.dtype.newbyteorder('<')) instead");
  }
  std::string known;
  for (const Descriptor& descriptor : kDescriptors) known.append(known.empty() ? "" : ", ").append(descriptor.text);
  reject_file(source, "'descr' must be one of " + known, printable(*text),
              "convert the array, for example by astype('<f4')");
}

void read_order(HeaderCursor& cursor, std::string_view source) {
  if (cursor.take("False")) return;
  if (!cursor.take("True")) cursor.fail("'fortran_order' must be True or False");
  reject_file(source, "arrays must be in row-major (C) order", "fortran_order: True",
              "save numpy.ascontiguousarray(a) instead");
}

std::vector<std::int64_t> read_shape(HeaderCursor& cursor) {
  std::vector<std::int64_t> shape;
  cursor.expect("(", "'shape':");
  while (!cursor.take(")")) {
    if (shape.size() == kMaxDimensions) {
      cursor.fail("a shape has at most " + std::to_string(kMaxDimensions) + " dimensions");
    }
    shape.push_back(cursor.integer("a size in a shape"));
    // (3,) is a tuple, (3) is not.
    if (!cursor.take(",") && (shape.size() == 1 || !cursor.rest().starts_with(')'))) {
      cursor.fail("expected ',' after a size in a shape");
    }
  }
  return shape;
}

FileTensor read_header(std::string_view header, std::string_view source) {
  HeaderCursor cursor(header, source, kRemedy);
  std::optional<ElementType> type;
  std::optional<std::vector<std::int64_t>> shape;
  bool has_order = false;
  cursor.expect("{", "the header's length");
  while (!cursor.take("}")) {
    const std::optional<std::string_view> key = take_string(cursor);
    if (!key) cursor.fail("expected a key, a string in quotes");
    cursor.expect(":", "a key");
    if (key == "descr" && !type) {
      type = read_descriptor(cursor, source);
    } else if (key == "fortran_order" && !std::exchange(has_order, true)) {
      read_order(cursor, source);
    } else if (key == "shape" && !shape) {
      shape = read_shape(cursor);
    } else {
      cursor.fail("the header has the keys descr, fortran_order and shape, each once, and not " + printable(*key));
    }
    if (cursor.take(",")) continue;
    cursor.expect("}", "the last value (or ',' and another one)");
    break;
  }
  cursor.skip_blanks();
  if (!cursor.at_end()) cursor.fail("only blanks may follow the header's closing '}'");
  if (!type || !shape || !has_order) cursor.fail("the header must have all of descr, fortran_order and shape");
  return {.name = std::string(source), .type = *type, .shape = *std::move(shape), .bytes = {}};
}

std::string shape_tuple(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (const std::int64_t size : shape) text += std::to_string(size) + ", ";
  if (!shape.empty()) text.pop_back();    // (3, 4,
  if (shape.size() > 1) text.pop_back();  // (3, 4
  return text + ")";
}

}  // namespace

FileTensor parse_npy(std::span<const std::byte> file, std::string_view source) {
  const auto [header, data] = split(file, source);
  FileTensor tensor = read_header(header, source);
  tensor.bytes = data;
  check_consistent(tensor, source);
  return tensor;
}

NpyFile::NpyFile(const std::filesystem::path& path) : file_(path), tensor_(parse_npy(file_.bytes(), path.string())) {}

std::string npy_header(const FileTensor& tensor, std::string_view source) {
  check_consistent(tensor, source);
  const auto* descriptor = std::ranges::find(kDescriptors, tensor.type, &Descriptor::type);
  std::string dict = "{'descr': '" + std::string(descriptor->text) +
                     "', 'fortran_order': False, 'shape': " + shape_tuple(tensor.shape) + ", }";
  const std::size_t prefix_bytes = kMagic.size() + 4;  // version and length
  const std::size_t total_bytes =
      (prefix_bytes + dict.size() + 1 + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  const std::size_t dict_bytes = total_bytes - prefix_bytes;
  static_assert(kMaxDimensions * 21 + 128 < kMaxHeaderBytes, "every shape's header fits version 1.0");
  dict.resize(dict_bytes - 1, ' ');
  dict += '\n';

  std::string header(kMagic);
  header.append("\x01\x00", 2);
  header += static_cast<char>(dict_bytes & 0xff);
  header += static_cast<char>(dict_bytes >> 8);
  return header + dict;
}

void write_npy(const std::filesystem::path& path, const FileTensor& tensor) {
  const std::string header = npy_header(tensor, path.string());
  AtomicFile file(path);
  file.write(header);
  file.write(tensor.bytes);
  file.commit();
}

}  // namespace annulus
