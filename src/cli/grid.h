// The grid: many small and awkward problems, each as the command line that makes it.
//
// Cases are words for the parser, not structs: what fails is printed just as it was run, and running it again is
// running the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus::cli {

using Words = std::vector<std::string>;  // "--tokens", "127", ...

// Cases with all of the `wanted` words, in order, or `samples` different ones of them chosen by `seed`, in random
// order. Cost varies by a factor of 10^6, so a choice prefers the cheap: beyond some milliseconds, the chance of a
// problem falls with the square root of what it costs to check.
std::vector<Words> grid_cases(const std::vector<Words>& wanted, std::optional<std::int64_t> samples,
                              std::uint64_t seed);

// With quotes where a shell needs them.
std::string command_line(const Words& words);

}  // namespace annulus::cli
