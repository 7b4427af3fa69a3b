// npy: one array a file, as numpy.save writes it: magic, version, header length, a Python dict literal, then the data.
//
//   {'descr': '<f4', 'fortran_order': False, 'shape': (1, 1024, 12, 64), }
//
// Versions 1.0, 2.0 and 3.0 are read, strictly: a header of at most 65,535 bytes with exactly these three keys, once
// each; row-major; at most 8 dimensions; exactly as many bytes behind it as type and shape say. Version 1.0 is written.
//
// bf16: numpy has no such type. Arrays of ml_dtypes.bfloat16 are saved as two opaque bytes an element, '<V2' or '|V2';
// that is read as BF16, and BF16 is written so (in numpy: load(...).view(ml_dtypes.bfloat16)). Bits stored as '<u2' are
// U16, which dtype_of() lets pass where bf16 is asked for.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "io/file_tensor.h"
#include "io/mapped_file.h"

namespace annulus {

// Throws InvalidArgument, with `source` (the path) in front, where `file` breaks a rule. The tensor's name is `source`.
FileTensor parse_npy(std::span<const std::byte> file, std::string_view source);

class NpyFile {
 public:
  explicit NpyFile(const std::filesystem::path& path);

  const FileTensor& tensor() const { return tensor_; }

 private:
  MappedFile file_;
  FileTensor tensor_;
};

// Everything in front of the data, padded to a multiple of 64 bytes.
std::string npy_header(const FileTensor& tensor, std::string_view source);

// The tensor's name is not stored. The file appears complete or not at all.
void write_npy(const std::filesystem::path& path, const FileTensor& tensor);

}  // namespace annulus
