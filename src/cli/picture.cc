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
constexpr int kNoBranch = -1;
constexpr std::array<const char*, 6> kShades{"█", "▓", "▒", "░", "▪", "▫"};
constexpr const char* kNothing = "·";

const char* shade(int branch) { return kShades[std::min(static_cast<std::size_t>(branch), kShades.size() - 1)]; }

// Powers of two, as segments mostly are, so that cells rarely straddle two segments.
std::int64_t block_for(std::int64_t positions) {
  std::int64_t block = 1;
  while ((positions + block - 1) / block > kMaxCells) block *= 2;
  return block;
}

// The square of the first `positions` queries and keys, in blocks of `block`; a cell has the first branch that reaches
// into it.
class Matrix {
 public:
  Matrix(std::int64_t positions, bool causal)
      : positions_(positions),
        block_(block_for(positions)),
        cells_((positions + block_ - 1) / block_),
        causal_(causal),
        branch_(static_cast<std::size_t>(cells_ * cells_), kNoBranch) {}

  std::int64_t block() const { return block_; }
  std::int64_t cells() const { return cells_; }
  int at(std::int64_t row, std::int64_t column) const {
    return branch_[static_cast<std::size_t>(row * cells_ + column)];
  }

  // Marks the pairs of one group; returns false when it lies behind the picture.
  bool mark(const Rows& all_queries, const Rows& all_keys, int branch) {
    const Rows queries = cut(all_queries, 0, positions_);
    const Rows keys = cut(all_keys, 0, positions_);
    if (queries.empty() || keys.empty()) return false;
    for (std::int64_t row = queries.first / block_; row <= queries.last() / block_; ++row) {
      const Rows inside = cut(queries, row * block_, (row + 1) * block_);
      if (inside.empty()) continue;
      for (std::int64_t column = keys.first / block_; column <= keys.last() / block_; ++column) {
        const Rows seen =
            cut(keys, column * block_, std::min((column + 1) * block_, causal_ ? inside.last() + 1 : positions_));
        int& cell = branch_[static_cast<std::size_t>(row * cells_ + column)];
        if (!seen.empty() && (cell == kNoBranch || branch < cell)) cell = branch;
      }
    }
    return true;
  }

 private:
  std::int64_t positions_;
  std::int64_t block_;
  std::int64_t cells_;
  bool causal_;
  std::vector<int> branch_;
};

void mark(const Task& task, std::int64_t dilation, const Classes& classes, Matrix& matrix) {
  for (std::int64_t segment = 0; segment < task.count; ++segment) {
    bool inside = false;
    for (std::int64_t c = classes.first; c < std::min(classes.first + classes.count, task.length); ++c) {
      const Rows rows = task.rows(segment, c, dilation);
      inside |= matrix.mark(rows, rows, task.branch);
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

std::string pattern_picture(const Problem& problem, std::int64_t head) {
  if (head < 0 || head >= problem.heads)
    throw InvalidArgument("--picture needs a head in [0, " + std::to_string(problem.heads) + "); got " +
                          std::to_string(head) + ": choose one of them");
  if (problem.tokens == 0) return "no tokens, nothing to draw\n";
  std::int64_t longest = 1;
  for (const Branch& branch : problem.pattern.branches) longest = std::max(longest, branch.segment);
  const std::int64_t positions = longest > problem.tokens / 2 ? problem.tokens : 2 * longest;
  Matrix matrix(positions, problem.causal);
  for (const Task& task : make_plan(problem).tasks)
    mark(task, problem.pattern.branches[static_cast<std::size_t>(task.branch)].dilation,
         classes_of(problem, task.branch, head), matrix);

  std::ostringstream out;
  out << "head " << head << ", queries 0 to " << positions - 1 << " downwards, keys 0 to " << positions - 1
      << " to the right";
  if (matrix.block() > 1) out << ", " << matrix.block() << " x " << matrix.block() << " pairs a cell";
  out << "\n";
  for (std::int64_t row = 0; row < matrix.cells(); ++row) {
    std::string line = "  ";
    for (std::int64_t column = 0; column < matrix.cells(); ++column) {
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
