// The pattern as a picture: queries down, keys across, a shade a branch.
#pragma once

#include <string>
#include <vector>

#include "annulus/problem.h"

namespace annulus::cli {

inline constexpr int kNoBranch = -1;

// Head `head` of a resolved problem, in at most `most_cells` rows and columns. Sequences longer than twice the longest
// segment are cut there, since the pattern repeats; where there are more positions than cells, a cell stands for a
// block of positions and is marked when any pair in it is attended to.
struct PatternMatrix {
  std::int64_t positions = 0;
  std::int64_t block = 1;  // positions of a cell
  std::int64_t cells = 0;
  std::vector<int> branch;  // [cells, cells]: the first one that reaches into the cell, or kNoBranch

  int at(std::int64_t row, std::int64_t column) const { return branch[static_cast<std::size_t>(row * cells + column)]; }
};
PatternMatrix pattern_matrix(const Problem& problem, std::int64_t head, std::int64_t most_cells);

// The same in characters.
std::string pattern_picture(const Problem& problem, std::int64_t head);

}  // namespace annulus::cli
