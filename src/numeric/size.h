// Sizes as people type and read them.
//
// Suffixes are powers of two, as the field counts tokens (32K is 32,768): k = 2^10, M = 2^20, G or B = 2^30, in either
// case. A fraction is fine where the result is a whole number: 1.5k is 1536, 1.1k is an error, not 1126.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// digits [ '.' digits ] [ k | M | G | B ], nothing before, between or behind; 0 to 2^63 - 1. Else InvalidArgument.
std::int64_t parse_size(std::string_view text);

// A list such as 2048,4k,1M. An empty element, and so an empty list, is an error.
std::vector<std::int64_t> parse_sizes(std::string_view text);

// The shortest text that parse_size reads back as this size without a fraction: 65536 is 64k, 2^30 is 1B, 1000 is 1000.
std::string format_size(std::int64_t size);

// 1,048,576
std::string format_count(std::int64_t count);

// 0 B, 1023 B, 3.2 MiB: one decimal, rounded half up.
std::string format_bytes(std::int64_t bytes);

}  // namespace annulus
