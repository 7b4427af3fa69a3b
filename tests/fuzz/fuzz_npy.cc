// Any bytes: a clear error, or a tensor that comes back unchanged when written and read again.
//
// The input is tried twice: as a whole file, and, so that mutations need not get the length in front right, as
// [bytes of data][header], from which a file of version 2.0 is made.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/errors.h"
#include "fuzz/require.h"
#include "io/npy.h"

namespace {

void require_round_trip(const annulus::FileTensor& tensor) {
  const std::string header = annulus::npy_header(tensor, "again");
  ANNULUS_REQUIRE(header.size() % 64 == 0);
  std::vector<std::byte> file(header.size());
  std::memcpy(file.data(), header.data(), file.size());
  file.insert(file.end(), tensor.bytes.begin(), tensor.bytes.end());
  const annulus::FileTensor again = annulus::parse_npy(file, "again");
  ANNULUS_REQUIRE(again.type == tensor.type && again.shape == tensor.shape);
  ANNULUS_REQUIRE(std::ranges::equal(again.bytes, tensor.bytes));
}

void try_file(const std::vector<std::byte>& file) {
  annulus::FileTensor tensor;
  try {
    tensor = annulus::parse_npy(file, "fuzz");
  } catch (const annulus::InvalidArgument& error) {
    ANNULUS_REQUIRE(std::strlen(error.what()) < 1000);
    return;
  }
  annulus::check_consistent(tensor, "fuzz");
  ANNULUS_REQUIRE(tensor.bytes.data() + tensor.bytes.size() == file.data() + file.size());
  require_round_trip(tensor);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the name that libFuzzer calls
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> file(size);
  std::copy_n(reinterpret_cast<const std::byte*>(data), size, file.begin());
  try_file(file);
  if (size == 0) return 0;

  std::string built("\x93NUMPY\x02\x00", 8);
  const auto header_bytes = static_cast<std::uint32_t>(size - 1);
  built.append(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
  built.append(reinterpret_cast<const char*>(data + 1), size - 1);
  built.append(data[0], '\x5a');
  file.resize(built.size());
  std::memcpy(file.data(), built.data(), built.size());
  try_file(file);
  return 0;
}
