// Random shardings: any number of ranks and layout, contiguous ones uneven, some shards empty.
#pragma once

#include <algorithm>

#include <rapidcheck.h>

#include "plan/shard.h"
#include "support/draw_case.h"

namespace annulus::support {

inline Sharding draw_sharding(std::int64_t tokens, std::int64_t max_ranks) {
  Sharding sharding;
  sharding.ranks = static_cast<int>(draw_between(1, max_ranks));
  sharding.layout = *rc::gen::element(annulus::Layout::contiguous, annulus::Layout::zigzag, annulus::Layout::striped);
  if (sharding.layout == annulus::Layout::contiguous && draw_bool()) {
    sharding.boundaries = {0, tokens};
    for (int i = 1; i < sharding.ranks; ++i) sharding.boundaries.push_back(draw_between(0, tokens));
    std::sort(sharding.boundaries.begin(), sharding.boundaries.end());
  }
  return resolve(sharding, tokens);
}

}  // namespace annulus::support
