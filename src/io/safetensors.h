// safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes.
//
//   {"__metadata__": {"key": "text"}, "q": {"dtype": "F32", "shape": [1, 1024, 12, 64], "data_offsets": [0, 3145728]},
//   ...}
//
// Read strictly, since a file may come from anywhere. The header is at most 100,000,000 bytes, begins with '{' and may
// be padded with spaces behind its '}'; keys are unique, with none but the ones above; offsets are plain integers; the
// tensors cover the data section without overlap or hole, each with exactly the bytes that its dtype and shape say.
// Data need not be aligned: see AlignedElements. Reading costs memory in proportion to the header alone, never to what
// it claims.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file_tensor.h"
#include "io/mapped_file.h"

namespace annulus {

using FileMetadata = std::map<std::string, std::string>;

struct SafetensorsContent {
  std::vector<FileTensor> tensors;  // in the order of their data; views of the file's bytes
  FileMetadata metadata;
};

// Throws InvalidArgument, with `source` (the path) in front, where `file` breaks a rule.
SafetensorsContent parse_safetensors(std::span<const std::byte> file, std::string_view source);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::vector<FileTensor>& tensors() const { return content_.tensors; }
  const FileMetadata& metadata() const { return content_.metadata; }
  const FileTensor* find(std::string_view name) const;  // nullptr: no such tensor
  const FileTensor& at(std::string_view name) const;    // throws InvalidArgument that lists what there is

 private:
  std::string source_;
  MappedFile file_;
  SafetensorsContent content_;
};

// A file to be: the header, then the bytes of tensors[order[0]], tensors[order[1]], ...
//
// The header is padded so that data begins at a multiple of 64, and large elements come first (then by name), so that
// every tensor is aligned to its element size. The same tensors give the same bytes, in whatever order they are given.
struct SafetensorsLayout {
  std::string header;  // with the 8 bytes of its length
  std::vector<std::size_t> order;
};

// Throws InvalidArgument on a tensor whose bytes do not fit its shape, a name given twice, or text that is not UTF-8.
SafetensorsLayout lay_out_safetensors(std::span<const FileTensor> tensors, const FileMetadata& metadata,
                                      std::string_view source);

// The file appears complete or not at all.
void write_safetensors(const std::filesystem::path& path, std::span<const FileTensor> tensors,
                       const FileMetadata& metadata = {});

}  // namespace annulus
