// The picture, against the definition of the pattern (docs/semantics.md, eq. 1 to 3) asked pair by pair.
#include "cli/picture.h"

#include <gtest/gtest.h>

#include <sstream>

#include "annulus/errors.h"

namespace annulus::cli {
namespace {

Problem small_problem(bool causal) {
  Problem problem;
  problem.tokens = 37;
  problem.heads = 5;
  problem.causal = causal;
  problem.documents = {0, 9, 9, 37};
  problem.pattern = make_pattern(Preset::longnet, {4, 11, 64}, {1, 3, 4}, problem.heads);
  return resolve(problem);
}

// The first branch whose S_i(t, head) has k; -1: none.
int branch_of(const Problem& problem, std::int64_t t, std::int64_t k, std::int64_t head) {
  std::size_t document = 0;
  while (problem.documents[document + 1] <= t) ++document;
  const std::int64_t d0 = problem.documents[document];
  const std::int64_t d1 = problem.documents[document + 1];
  if (k < d0 || k >= d1 || (problem.causal && k > t)) return -1;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    const std::int64_t w = problem.pattern.branches[i].segment;
    const std::int64_t r = problem.pattern.branches[i].dilation;
    const auto phase_class = [&](std::int64_t x) { return (x - d0) % w % r; };
    if ((t - d0) / w == (k - d0) / w && phase_class(t) == phase_class(k) && phase_class(t) == head % r)
      return static_cast<int>(i);
  }
  return -1;
}

std::string expected_row(const Problem& problem, std::int64_t t, std::int64_t head) {
  const char* cells[] = {"· ", "██", "▓▓", "▒▒"};
  std::string row = "  ";
  for (std::int64_t k = 0; k < problem.tokens; ++k) row += cells[branch_of(problem, t, k, head) + 1];
  row.erase(row.find_last_not_of(' ') + 1);
  return row;
}

TEST(Picture, ShowsEveryPairOfASmallProblem) {
  for (const bool causal : {false, true}) {
    const Problem problem = small_problem(causal);
    for (std::int64_t head = 0; head < problem.heads; ++head) {
      std::istringstream lines(pattern_picture(problem, head));
      std::string line;
      std::getline(lines, line);
      EXPECT_EQ(line, "head " + std::to_string(head) + ", queries 0 to 36 downwards, keys 0 to 36 to the right");
      for (std::int64_t t = 0; t < problem.tokens; ++t) {
        std::getline(lines, line);
        EXPECT_EQ(line, expected_row(problem, t, head)) << "query " << t << ", head " << head << ", causal " << causal;
      }
      std::getline(lines, line);
      EXPECT_EQ(line, "  ██ branch 0: segment 4, dilation 1");
    }
  }
}

TEST(Picture, LongSequencesAreCutAndShrunk) {
  Problem problem;
  problem.tokens = 1 << 20;
  problem.pattern = make_pattern(Preset::longnet, {2048, 4096}, {1, 2}, 1);
  const std::string picture = pattern_picture(resolve(problem), 0);
  EXPECT_NE(picture.find("queries 0 to 8191"), std::string::npos) << picture;
  EXPECT_NE(picture.find("256 x 256 pairs a cell"), std::string::npos) << picture;
  std::istringstream lines(picture);
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);
  std::string expected = "  ";
  for (int i = 0; i < 8; ++i) expected += "██";
  for (int i = 0; i < 8; ++i) expected += "▓▓";
  for (int i = 0; i < 16; ++i) expected += "· ";
  expected.pop_back();
  EXPECT_EQ(line, expected);
}

TEST(Picture, NoTokensAndWrongHeads) {
  Problem problem = small_problem(false);
  EXPECT_THROW(pattern_picture(problem, 5), InvalidArgument);
  EXPECT_THROW(pattern_picture(problem, -1), InvalidArgument);
  problem.tokens = 0;
  problem.documents = {0, 0};
  EXPECT_EQ(pattern_picture(problem, 0), "no tokens, nothing to draw\n");
}

}  // namespace
}  // namespace annulus::cli
