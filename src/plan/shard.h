// Shards: which positions a rank owns (docs/semantics.md, section 6), as few Rows.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/rows.h"

namespace annulus {

enum class Layout {
  contiguous,  // one block a rank, any boundaries
  zigzag,      // 2p blocks, rank g has blocks g and 2p - 1 - g: a causal load that is even
  striped,     // rank g has the positions that are g modulo p
};

std::string_view name(Layout layout);
Layout parse_layout(std::string_view text);  // throws InvalidArgument

struct Sharding {
  int ranks = 1;
  Layout layout = Layout::contiguous;
  // Contiguous alone: rank g has [boundaries[g], boundaries[g + 1]). Empty: as even as whole positions allow.
  std::vector<std::int64_t> boundaries;

  bool operator==(const Sharding&) const = default;
};

// Fills in the boundaries, or throws InvalidArgument.
Sharding resolve(Sharding sharding, std::int64_t tokens);

// What rank g owns, in the order of its memory: the rows of the first piece, then those of the second. No piece is
// empty. Takes a resolved sharding.
std::vector<Rows> pieces_of(const Sharding& sharding, std::int64_t tokens, int rank);

std::int64_t count_rows(const std::vector<Rows>& pieces);

}  // namespace annulus
