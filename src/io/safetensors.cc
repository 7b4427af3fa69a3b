// The reading half; safetensors_writer.cc writes.
#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include "io/file_error.h"
#include "io/header_cursor.h"
#include "io/json_string.h"
#include "io/safetensors_format.h"

namespace annulus {
namespace {

constexpr std::string_view kRemedy = "the file is damaged or not a safetensors file: write it again";

struct Sections {
  std::string_view header;
  std::span<const std::byte> data;
};

Sections split(std::span<const std::byte> file, std::string_view source) {
  std::uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes) {
    reject_file(source, "a safetensors file begins with 8 bytes of header length",
                "a file of " + std::to_string(file.size()) + " bytes", kRemedy);
  }
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const std::span<const std::byte> behind = file.subspan(sizeof header_bytes);
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    reject_file(source, "a safetensors header has at most " + std::to_string(kMaxSafetensorsHeaderBytes) + " bytes",
                std::to_string(header_bytes), kRemedy);
  }
  if (header_bytes > behind.size()) {
    reject_file(source, "the header must lie inside the file",
                "a header of " + std::to_string(header_bytes) + " bytes in a file of " + std::to_string(file.size()),
                "the file is cut short or not a safetensors file: copy or write it again");
  }
  const auto length = static_cast<std::size_t>(header_bytes);
  return {{reinterpret_cast<const char*>(behind.data()), length}, behind.subspan(length)};
}

// Reads the header by its grammar; each function takes one part of it.
class HeaderReader {
 public:
  HeaderReader(const Sections& sections, std::string_view source)
      : source_(source), data_(sections.data), cursor_(sections.header, source, kRemedy) {}

  SafetensorsContent read() {
    if (!cursor_.rest().starts_with('{')) cursor_.fail("the header must begin with '{'");
    for_each_key("a tensor's name", [&](std::string key) {
      if (key == kMetadataKey) {
        read_metadata();
      } else {
        read_tensor(std::move(key));
      }
    });
    if (cursor_.rest().find_first_not_of(' ') != std::string_view::npos) {
      cursor_.fail("only spaces may follow the header's closing '}'");
    }
    return std::move(content_);
  }

 private:
  // { "key": <value>, ... }: `value` is called with each key and takes what follows the colon.
  template <class Value>
  void for_each_key(std::string_view what, Value value) {
    cursor_.expect("{", "':', since an object belongs here");
    if (cursor_.take("}")) return;
    do {
      std::string key = read_json_string(cursor_, what);
      cursor_.expect(":", what);
      value(std::move(key));
    } while (cursor_.take(","));
    cursor_.expect("}", "the last value of an object (or ',' and another one)");
  }

  void read_metadata() {
    if (std::exchange(has_metadata_, true)) reject_duplicate(kMetadataKey);
    for_each_key("a key of __metadata__", [&](std::string key) {
      std::string value = read_json_string(cursor_, "a value of __metadata__");
      const auto [entry, is_new] = content_.metadata.try_emplace(std::move(key), std::move(value));
      if (!is_new) reject_duplicate(entry->first);
      if (content_.metadata.size() > kMaxSafetensorsMetadataEntries) {
        cursor_.fail("__metadata__ has at most " + std::to_string(kMaxSafetensorsMetadataEntries) + " entries");
      }
    });
  }

  void read_tensor(std::string key) {
    std::optional<ElementType> type;
    std::optional<std::vector<std::int64_t>> shape;
    std::optional<std::array<std::int64_t, 2>> offsets;
    for_each_key("a key of a tensor", [&](const std::string& field) {
      if (field == "dtype" && !type) {
        type = read_type();
      } else if (field == "shape" && !shape) {
        shape = read_shape();
      } else if (field == "data_offsets" && !offsets) {
        offsets = read_offsets();
      } else {
        cursor_.fail("a tensor has the keys dtype, shape and data_offsets, each once, and not " + printable(field));
      }
    });
    if (!type || !shape || !offsets) {
      cursor_.fail("tensor " + printable(key) + " must have all of dtype, shape and data_offsets");
    }
    add_tensor({.name = std::move(key), .type = *type, .shape = *std::move(shape), .bytes = {}}, *offsets);
  }

  ElementType read_type() {
    const std::string text = read_json_string(cursor_, "a dtype");
    const std::optional<ElementType> type = find_element_type(text);
    if (!type) {
      reject_file(source_, "dtype must be one of " + element_type_names(), printable(text),
                  "convert the tensor to one of these types");
    }
    return *type;
  }

  std::vector<std::int64_t> read_shape() {
    std::vector<std::int64_t> shape;
    cursor_.expect("[", "\"shape\":");
    if (cursor_.take("]")) return shape;
    do {
      if (shape.size() == kMaxDimensions) {
        cursor_.fail("a shape has at most " + std::to_string(kMaxDimensions) + " dimensions");
      }
      shape.push_back(cursor_.integer("a size in a shape"));
    } while (cursor_.take(","));
    cursor_.expect("]", "the last size of a shape (or ',' and another one)");
    return shape;
  }

  std::array<std::int64_t, 2> read_offsets() {
    cursor_.expect("[", "\"data_offsets\":");
    const std::int64_t begin = cursor_.integer("an offset");
    cursor_.expect(",", "the first offset");
    const std::int64_t end = cursor_.integer("an offset");
    cursor_.expect("]", "the second offset");
    return {begin, end};
  }

  void add_tensor(FileTensor tensor, const std::array<std::int64_t, 2>& offsets) {
    const auto [begin, end] = offsets;
    if (begin > end || std::cmp_greater(end, data_.size())) {
      reject_file(source_,
                  "tensor " + printable(tensor.name) + " must lie inside the data section of " +
                      std::to_string(data_.size()) + " bytes",
                  "data_offsets " + shape_text(offsets), kRemedy);
    }
    tensor.bytes = data_.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    check_consistent(tensor, source_);
    content_.tensors.push_back(std::move(tensor));
  }

  [[noreturn]] void reject_duplicate(std::string_view key) const {
    reject_file(source_, "keys must be unique", printable(key) + " twice", kRemedy);
  }

  std::string_view source_;
  std::span<const std::byte> data_;
  HeaderCursor cursor_;
  SafetensorsContent content_;
  bool has_metadata_ = false;
};

// By sorting pointers: no second copy of the names.
void check_names_unique(const std::vector<FileTensor>& tensors, std::string_view source) {
  std::vector<const FileTensor*> by_name;
  by_name.reserve(tensors.size());
  for (const FileTensor& tensor : tensors) by_name.push_back(&tensor);
  const auto name_of = [](const FileTensor* tensor) -> const std::string& { return tensor->name; };
  std::ranges::sort(by_name, std::less<>{}, name_of);
  const auto twice = std::ranges::adjacent_find(by_name, std::equal_to<>{}, name_of);
  if (twice != by_name.end()) {
    reject_file(source, "keys must be unique", printable((*twice)->name) + " twice", kRemedy);
  }
}

// Sorts by place; then each tensor must begin where the one before it ends, and the last must end with the file.
void check_coverage(std::vector<FileTensor>& tensors, std::span<const std::byte> data, std::string_view source) {
  std::ranges::sort(tensors, std::less<>{}, [](const FileTensor& tensor) {
    return std::tuple(tensor.bytes.data(), tensor.bytes.size(), std::string_view(tensor.name));
  });
  std::size_t covered = 0;
  for (const FileTensor& tensor : tensors) {
    const auto begin = static_cast<std::size_t>(tensor.bytes.data() - data.data());
    if (begin != covered) {
      reject_file(source, begin < covered ? "tensors must not overlap" : "tensors must leave no holes between them",
                  "tensor " + printable(tensor.name) + " at offset " + std::to_string(begin) + ", expected at " +
                      std::to_string(covered),
                  kRemedy);
    }
    covered += tensor.bytes.size();
  }
  if (covered != data.size()) {
    reject_file(source, "tensors must cover the data section",
                std::to_string(covered) + " bytes of tensors in " + std::to_string(data.size()) + " bytes of data",
                kRemedy);
  }
}

}  // namespace

SafetensorsContent parse_safetensors(std::span<const std::byte> file, std::string_view source) {
  const Sections sections = split(file, source);
  SafetensorsContent content = HeaderReader(sections, source).read();
  check_names_unique(content.tensors, source);
  check_coverage(content.tensors, sections.data, source);
  return content;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : source_(path.string()), file_(path), content_(parse_safetensors(file_.bytes(), source_)) {}

const FileTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::find(content_.tensors, name, &FileTensor::name);
  return found == content_.tensors.end() ? nullptr : &*found;
}

const FileTensor& SafetensorsFile::at(std::string_view name) const {
  if (const FileTensor* tensor = find(name)) return *tensor;
  constexpr std::size_t kListed = 16;
  std::string names;
  for (const FileTensor& tensor : std::span(content_.tensors).first(std::min(kListed, content_.tensors.size()))) {
    if (!names.empty()) names += ", ";
    names += printable(tensor.name);
  }
  if (content_.tensors.size() > kListed) names += ", ...";
  reject_file(source_, "the file must have a tensor " + printable(name), names.empty() ? "no tensors at all" : names,
              "add the tensor or give another file");
}

}  // namespace annulus
