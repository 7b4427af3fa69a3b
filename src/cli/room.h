// Whether what ranks are about to allocate is there, before any of them allocates: on hosts, and on GPUs.
#pragma once

#include <cstdint>
#include <string>

#include "annulus/ranks.h"
#include "cli/group.h"

namespace annulus::cli {

// What a rank is about to allocate.
struct Needs {
  std::int64_t host_bytes = 0;
  std::int64_t gpu_bytes = 0;
};

// For the larger pass. Of a rank on a GPU the host has every tensor as well: there inputs are drawn, and results
// judged.
Needs needs_of(const RankAttention& attention, bool backward, const Rank& rank);

// All ranks throw OutOfMemory where those of one host or of one GPU need more than it has left. A collective.
void check_room(Rank& rank, const Needs& needs, const std::string& what);

}  // namespace annulus::cli
