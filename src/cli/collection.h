// Collectives that bring things together on rank 0: whole tensors out of shards, and texts of any length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "annulus/transport.h"
#include "cli/shard_map.h"

namespace annulus::cli {

// A tensor by rows, as one rank holds it.
struct LocalRows {
  const std::byte* data = nullptr;
  std::int64_t outer = 0;
  std::int64_t row_bytes = 0;
};

// Gives rank 0 the whole tensor in global order, a few megabytes at a time, and the other ranks nothing. `shards` are
// those of all ranks.
void collect(Transport& transport, const std::vector<ShardMap>& shards, const LocalRows& rows,
             const std::function<void(std::span<const std::byte>)>& sink);

// Every rank's text on rank 0, in order of rank; nothing elsewhere.
std::vector<std::string> collect_texts(Transport& transport, const std::string& text);

}  // namespace annulus::cli
