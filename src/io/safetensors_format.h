// What the reading and the writing half of safetensors agree on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace annulus {

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;  // the format's own limit
// Ours: an entry of 10 bytes in the file takes over 100 in memory, and real files have a handful.
inline constexpr std::size_t kMaxSafetensorsMetadataEntries = 65'536;

}  // namespace annulus
