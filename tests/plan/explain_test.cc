// A plan for people has to say what it is about, and must not fill the screen.
#include <algorithm>

#include <gtest/gtest.h>

#include "plan/plan.h"

namespace annulus {
namespace {

std::string explain_of(const Problem& problem) { return explain(make_plan(problem), problem); }

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in\n" << text;
}

TEST(Explain, NamesTheProblemItsBranchesAndTasks) {
  Problem problem;
  problem.batch = 3;
  problem.tokens = 1000;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 80;
  problem.dtype = DType::bf16;
  problem.causal = true;
  problem.documents = {0, 300, 1000};
  problem.pattern = make_pattern(Preset::torchscale, {64, 256}, {1, 4}, 4);
  problem.pattern.branches[1].first_head = 1;
  problem = resolve(problem);
  expect_parts(
      explain_of(problem),
      {"1000 tokens", "4 heads (2 for keys and values) of 80", "batch 3", "bf16", "causal", "by_head_block", "detached",
       "branch 0: segment 64, dilation 1, heads [0, 4)", "branch 1: segment 256, dilation 4, heads [1, 4)",
       "2 documents", "branch 0: [0, 256) in 4 segments of 64", "branch 0: [256, 300) in one segment"});
}

TEST(Explain, SaysWhatIsSpecialAboutATask) {
  Problem problem;
  problem.tokens = 10;
  problem.pattern = make_pattern(Preset::residue, {8}, {4}, 1);
  problem.pattern.pad_like_torchscale = true;
  const std::string text = explain_of(resolve(problem));
  expect_parts(text, {"1 document,", "[8, 10) in one segment, filled up to 2 rows a class by zero keys"});
  EXPECT_EQ(text.find("causal"), std::string::npos);
}

TEST(Explain, CutsLongPlans) {
  Problem problem;
  problem.tokens = 500;
  for (std::int64_t t = 0; t <= 500; ++t) problem.documents.push_back(t);
  problem.pattern = make_pattern(Preset::longnet, {4}, {1}, 1);
  const std::string text = explain_of(resolve(problem));
  expect_parts(text, {"500 documents", "500 tasks", "468 more"});
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 50);
}

TEST(Explain, AnEmptyProblemIsStillAPlan) {
  Problem problem;
  problem.pattern = make_pattern(Preset::longnet, {4}, {1}, 1);
  expect_parts(explain_of(resolve(problem)), {"0 tokens", "0 documents, 0 tasks, 0 pairs"});
}

}  // namespace
}  // namespace annulus
