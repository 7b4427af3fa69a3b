// Shards: which positions a rank owns (docs/semantics.md, section 6), as few Rows.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/ranks.h"
#include "plan/rows.h"

namespace annulus {

// Fills in the boundaries, or throws InvalidArgument.
Sharding resolve(Sharding sharding, std::int64_t tokens);

// What rank g owns, in the order of its memory: the rows of the first piece, then those of the second. No piece is
// empty. Takes a resolved sharding.
std::vector<Rows> pieces_of(const Sharding& sharding, std::int64_t tokens, int rank);

// Where block i of `blocks` equal ones begins; the first tokens % blocks are one longer.
std::int64_t block_begin(std::int64_t tokens, std::int64_t blocks, std::int64_t i);

std::int64_t count_rows(const std::vector<Rows>& pieces);

// Ranks that stand for all, in order: every one of up to 16; of more the ends, their neighbours, the middle and the
// largest shard. (Who looks ahead over 1,024 ranks must not make 1,024 plans.)
std::vector<int> sample_ranks(const Sharding& sharding, std::int64_t tokens);

}  // namespace annulus
