#include "cli/picture.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <vector>

#include "annulus/errors.h"
#include "plan/phase.h"
#include "plan/plan.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kMaxCells = 39;  // two characters each, within 80 columns
constexpr std::array<const char*, 6> kShades{"█", "▓", "▒", "░", "▪", "▫"};
constexpr const char* kNothing = "·";

const char* shade(int branch) { return kShades[std::min(static_cast<std::size_t>(branch), kShades.size() - 1)]; }

// Powers of two, as segments mostly are, so that cells rarely straddle two segments.
std::int64_t block_for(std::int64_t positions, std::int64_t most_cells) {
  std::int64_t block = 1;
  while ((positions + block - 1) / block > most_cells) block *= 2;
  return block;
}

// Marks the pairs of one group; returns false when it lies behind the picture.
bool mark(const Rows& all_queries, const Rows& all_keys, int branch, bool causal, PatternMatrix& matrix) {
  const std::int64_t block = matrix.block;
  const Rows queries = cut(all_queries, 0, matrix.positions);
  const Rows keys = cut(all_keys, 0, matrix.positions);
  if (queries.empty() || keys.empty()) return false;
  for (std::int64_t row = queries.first / block; row <= queries.last() / block; ++row) {
    const Rows inside = cut(queries, row * block, (row + 1) * block);
    if (inside.empty()) continue;
    for (std::int64_t column = keys.first / block; column <= keys.last() / block; ++column) {
      const Rows seen =
          cut(keys, column * block, std::min((column + 1) * block, causal ? inside.last() + 1 : matrix.positions));
      int& cell = matrix.branch[static_cast<std::size_t>(row * matrix.cells + column)];
      if (!seen.empty() && (cell == kNoBranch || branch < cell)) cell = branch;
    }
  }
  return true;
}

void mark(const Task& task, std::int64_t dilation, const Classes& classes, bool causal, PatternMatrix& matrix) {
  for (std::int64_t segment = 0; segment < task.count; ++segment) {
    bool inside = false;
    for (std::int64_t c = classes.first; c < std::min(classes.first + classes.count, task.length); ++c) {
      const Rows rows = task.rows(segment, c, dilation);
      inside |= mark(rows, rows, task.branch, causal, matrix);
    }
    if (!inside) return;  // segments only go further away
  }
}

std::string legend(const Problem& problem) {
  std::ostringstream out;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const Branch& branch = problem.pattern.branches[i];
    const char* mark = shade(static_cast<int>(i));
    out << "  " << mark << mark << " branch " << i << ": segment " << branch.segment << ", dilation " << branch.dilation
        << "\n";
  }
  return out.str();
}

}  // namespace

PatternMatrix pattern_matrix(const Problem& problem, std::int64_t head, std::int64_t most_cells) {
  std::int64_t longest = 1;
  for (const Branch& branch : problem.pattern.branches) longest = std::max(longest, branch.segment);
  PatternMatrix matrix;
  matrix.positions = longest > problem.tokens / 2 ? problem.tokens : 2 * longest;
  matrix.block = block_for(matrix.positions, most_cells);
  matrix.cells = (matrix.positions + matrix.block - 1) / matrix.block;
  matrix.branch.assign(static_cast<std::size_t>(matrix.cells * matrix.cells), kNoBranch);
  for (const Task& task : make_plan(problem).tasks)
    mark(task, problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation,
         classes_of(problem, task.branch, head), problem.causal, matrix);
  return matrix;
}

std::string pattern_picture(const Problem& problem, std::int64_t head) {
  if (head < 0 || head >= problem.heads)
    throw InvalidArgument("--picture needs a head in [0, " + std::to_string(problem.heads) + "); got " +
                          std::to_string(head) + ": choose one of them");
  if (problem.tokens == 0) return "no tokens, nothing to draw\n";
  const PatternMatrix matrix = pattern_matrix(problem, head, kMaxCells);

  std::ostringstream out;
  out << "head " << head << ", queries 0 to " << matrix.positions - 1 << " downwards, keys 0 to "
      << matrix.positions - 1 << " to the right";
  if (matrix.block > 1) out << ", " << matrix.block << " x " << matrix.block << " pairs a cell";
  out << "\n";
  for (std::int64_t row = 0; row < matrix.cells; ++row) {
    std::string line = "  ";
    for (std::int64_t column = 0; column < matrix.cells; ++column) {
      const int branch = matrix.at(row, column);
      const char* mark = branch == kNoBranch ? kNothing : shade(branch);
      line += std::string(mark) + (branch == kNoBranch ? " " : mark);  // two characters are about square
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  }
  out << legend(problem);
  return out.str();
}

}  // namespace annulus::cli
