// The pattern as a picture: queries down, keys across, a shade a branch.
#pragma once

#include <string>

#include "annulus/problem.h"

namespace annulus::cli {

// Of head `head` of a resolved problem. Sequences longer than twice the longest segment are cut there, since the
// pattern repeats; where a position is narrower than a character, a cell stands for a block of positions and is marked
// when any pair in it is attended to.
std::string pattern_picture(const Problem& problem, std::int64_t head);

}  // namespace annulus::cli
