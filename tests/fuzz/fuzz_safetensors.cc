// Any bytes: a clear error, or tensors that fill the data section and come back unchanged when written and read again.
//
// The input is tried twice: as a whole file, and, so that mutations need not get the length in front right, as
// [bytes of data][header], from which a file with the right length is made.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "annulus/errors.h"
#include "fuzz/require.h"
#include "io/safetensors.h"

namespace {

using annulus::FileTensor;
using annulus::SafetensorsContent;

void require_same(const SafetensorsContent& a, const SafetensorsContent& b) {
  ANNULUS_REQUIRE(a.metadata == b.metadata);
  ANNULUS_REQUIRE(a.tensors.size() == b.tensors.size());
  for (const FileTensor& tensor : a.tensors) {
    const auto other = std::ranges::find(b.tensors, tensor.name, &FileTensor::name);
    ANNULUS_REQUIRE(other != b.tensors.end());
    ANNULUS_REQUIRE(other->type == tensor.type && other->shape == tensor.shape);
    ANNULUS_REQUIRE(std::ranges::equal(other->bytes, tensor.bytes));
  }
}

void require_round_trip(const SafetensorsContent& content) {
  const annulus::SafetensorsLayout layout = annulus::lay_out_safetensors(content.tensors, content.metadata, "again");
  ANNULUS_REQUIRE(layout.header.size() % 64 == 0);
  std::vector<std::byte> file(layout.header.size());
  std::memcpy(file.data(), layout.header.data(), file.size());
  for (const std::size_t i : layout.order) {
    file.insert(file.end(), content.tensors[i].bytes.begin(), content.tensors[i].bytes.end());
  }
  require_same(content, annulus::parse_safetensors(file, "again"));
}

void try_file(const std::vector<std::byte>& file) {
  SafetensorsContent content;
  try {
    content = annulus::parse_safetensors(file, "fuzz");
  } catch (const annulus::InvalidArgument& error) {
    ANNULUS_REQUIRE(std::strlen(error.what()) < 1000);
    return;
  }
  std::size_t covered = 0;
  for (const FileTensor& tensor : content.tensors) {
    annulus::check_consistent(tensor, "fuzz");
    ANNULUS_REQUIRE(tensor.bytes.data() >= file.data());
    covered += tensor.bytes.size();
    ANNULUS_REQUIRE(covered <= file.size());
  }
  require_round_trip(content);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the name that libFuzzer calls
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> file(size);
  std::copy_n(reinterpret_cast<const std::byte*>(data), size, file.begin());
  try_file(file);
  if (size == 0) return 0;

  const std::uint64_t header_bytes = size - 1;
  std::vector<std::byte> built(sizeof header_bytes + size - 1 + data[0]);
  std::memcpy(built.data(), &header_bytes, sizeof header_bytes);
  std::copy_n(reinterpret_cast<const std::byte*>(data + 1), size - 1, built.begin() + sizeof header_bytes);
  try_file(built);
  return 0;
}
