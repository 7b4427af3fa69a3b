// Any text: a clear error, or sizes that the formatters write in a way that reads back the same.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/errors.h"
#include "fuzz/require.h"
#include "numeric/size.h"

namespace {

// What format_count writes, without its commas.
std::string digits_of(const std::string& text) {
  std::string digits;
  for (const char c : text) {
    if (c != ',') digits += c;
  }
  return digits;
}

void require_round_trip(std::int64_t size) {
  ANNULUS_REQUIRE(size >= 0);
  ANNULUS_REQUIRE(annulus::parse_size(annulus::format_size(size)) == size);
  ANNULUS_REQUIRE(digits_of(annulus::format_count(size)) == std::to_string(size));
  ANNULUS_REQUIRE(annulus::format_bytes(size).size() <= 10);
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming): the name that libFuzzer calls
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A copy of exactly the size: a step beyond the text is a step beyond the heap block.
  const std::vector<char> copy(data, data + size);
  const std::string_view text(copy.data(), copy.size());
  std::vector<std::int64_t> sizes;
  try {
    sizes = annulus::parse_sizes(text);
  } catch (const annulus::InvalidArgument& error) {
    ANNULUS_REQUIRE(std::strlen(error.what()) < 1000);
  }
  for (const std::int64_t value : sizes) require_round_trip(value);
  if (sizes.size() == 1) ANNULUS_REQUIRE(annulus::parse_size(text) == sizes[0]);
  return 0;
}
