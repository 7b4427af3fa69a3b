// Agreement: before anything moves, ranks make sure that they are about to do the same.
#pragma once

#include <cstdint>
#include <string>

#include "annulus/transport.h"
#include "plan/rank_plan.h"

namespace annulus {

// Everything that all ranks must have in common, one "name = value" a line.
std::string describe(const Problem& problem, const Sharding& sharding, const RankOptions& options);

// A collective. Throws TransportError on all ranks if one of them has another text, and says who and what. Returns a
// hash of the text: the name of the plan in messages.
std::uint64_t agree(Transport& transport, const std::string& text);

}  // namespace annulus
