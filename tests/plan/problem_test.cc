// resolve(): the defaults, and every bad problem of section 9 refused with the rule, the value received and the remedy.
#include "annulus/problem.h"

#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "support/refusal.h"

namespace annulus {
namespace {

using support::expect_refused;

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();

Problem good_problem() {
  Problem problem;
  problem.tokens = 100;
  problem.heads = 6;
  problem.kv_heads = 3;
  problem.pattern = make_pattern(Preset::longnet, {16, 64}, {1, 2}, 6);
  return problem;
}

// The good problem with one thing changed.
void expect_bad(const std::function<void(Problem&)>& spoil, const std::vector<std::string>& parts) {
  Problem problem = good_problem();
  spoil(problem);
  expect_refused([&] { resolve(problem); }, parts);
}

TEST(Resolve, FillsInTheDefaults) {
  Problem problem = good_problem();
  problem.kv_heads = 0;
  problem.pattern.branches[1].first_head = 2;
  const Problem resolved = resolve(problem);
  EXPECT_EQ(resolved.kv_heads, 6);
  EXPECT_DOUBLE_EQ(*resolved.scale, 1 / std::sqrt(64.0));
  EXPECT_EQ(resolved.documents, (std::vector<std::int64_t>{0, 100}));
  EXPECT_EQ(resolved.pattern.branches[0].head_count, 6);
  EXPECT_EQ(resolved.pattern.branches[1].head_count, 4);
}

TEST(Resolve, KeepsWhatIsGivenAndIsIdempotent) {
  Problem problem = good_problem();
  problem.scale = -0.5;
  problem.documents = {0, 0, 17, 17, 100};
  problem.pattern.branches[0].first_head = 1;
  problem.pattern.branches[0].head_count = 0;
  const Problem resolved = resolve(problem);
  EXPECT_EQ(*resolved.scale, -0.5);
  EXPECT_EQ(resolved.documents, problem.documents);
  EXPECT_EQ(resolved.pattern.branches[0].head_count, 0);
  EXPECT_EQ(resolve(resolved), resolved);
}

TEST(Resolve, AcceptsWhatSection8Calls) {
  for (const std::function<void(Problem&)>& change : std::vector<std::function<void(Problem&)>>{
           [](Problem& p) { p.tokens = 0; },
           [](Problem& p) { p.batch = 0; },
           [](Problem& p) { p.tokens = 1; },
           [](Problem& p) { p.pattern.branches[0].segment = kMost; },
           [](Problem& p) { p.pattern.branches[0].dilation = kMost; },
           [](Problem& p) { p.pattern.branches[0].segment = 10, p.pattern.branches[0].dilation = 16; },
           [](Problem& p) {
             p.documents = {0, 1, 1, 18, 100};
           },
           [](Problem& p) { p.scale = 0.0; },
           [](Problem& p) { p.pattern.branches[0].first_head = 6, p.pattern.branches[0].head_count = 0; },
           [](Problem& p) { p.tokens = std::int64_t{1} << 40; },
       }) {
    Problem problem = good_problem();
    change(problem);
    EXPECT_NO_THROW(resolve(problem));
  }
}

TEST(Resolve, RefusesBadSizes) {
  expect_bad([](Problem& p) { p.batch = -1; }, {"batch", "at least 0", "-1", "give a larger"});
  expect_bad([](Problem& p) { p.tokens = -5; }, {"tokens", "at least 0", "-5", "give a larger"});
  expect_bad([](Problem& p) { p.heads = 0; }, {"heads", "at least 1", "0", "give a larger"});
  expect_bad([](Problem& p) { p.heads = -2; }, {"heads", "at least 1", "-2", "give a larger"});
  expect_bad([](Problem& p) { p.heads = -2, p.kv_heads = 0; }, {"heads", "at least 1", "-2", "give a larger"});
  expect_bad([](Problem& p) { p.kv_heads = -3; }, {"kv_heads", "at least 1", "-3", "give a larger"});
  expect_bad([](Problem& p) { p.head_dim = 0; }, {"head_dim", "at least 1", "0", "give a larger"});
  expect_bad([](Problem& p) { p.head_dim = -64; }, {"head_dim", "at least 1", "-64", "give a larger"});
  expect_bad([](Problem& p) { p.tokens = kLeast; }, {"tokens", "at least 0", std::to_string(kLeast)});
}

TEST(Resolve, RefusesHeadsThatKvHeadsDoNotDivide) {
  expect_bad([](Problem& p) { p.kv_heads = 4; }, {"multiple of kv_heads", "6 heads", "4 kv_heads", "divides heads"});
  expect_bad([](Problem& p) { p.kv_heads = 12; }, {"multiple of kv_heads", "6 heads", "12 kv_heads", "divides heads"});
}

TEST(Resolve, RefusesSizesWhoseOffsetsDoNotFit) {
  for (const auto& spoil : std::vector<std::function<void(Problem&)>>{
           [](Problem& p) { p.tokens = kMost; }, [](Problem& p) { p.batch = kMost; },
           [](Problem& p) { p.head_dim = kMost; }, [](Problem& p) { p.heads = p.kv_heads = kMost; },
           [](Problem& p) { p.tokens = p.batch = std::int64_t{1} << 30; }})
    expect_bad(spoil, {"2^58", "smaller"});
  // No bytes at all, but positions that do not fit.
  expect_bad([](Problem& p) { p.batch = 0, p.tokens = kMost; }, {"tokens", "2^60", std::to_string(kMost), "fewer"});
}

TEST(Resolve, RefusesScalesThatAreNotNumbers) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(), std::nan("")}) {
    expect_bad([&](Problem& p) { p.scale = bad; }, {"scale must be finite", std::to_string(bad), "leave it out"});
    expect_bad([&](Problem& p) { p.pattern.output_scale = bad; },
               {"output_scale must be finite", std::to_string(bad), "use 1"});
  }
}

TEST(Resolve, RefusesBadBranches) {
  expect_bad([](Problem& p) { p.pattern.branches.clear(); }, {"at least one branch", "none", "give segment lengths"});
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-7}, kLeast}) {
    expect_bad([&](Problem& p) { p.pattern.branches[1].segment = bad; },
               {"segment length of branch 1", "at least 1", std::to_string(bad), "larger"});
    expect_bad([&](Problem& p) { p.pattern.branches[1].dilation = bad; },
               {"dilation of branch 1", "at least 1", std::to_string(bad), "larger"});
  }
}

TEST(Resolve, RefusesHeadRangesOutsideTheHeads) {
  const auto expect_bad_range = [](std::int64_t first, std::int64_t count) {
    expect_bad([&](Problem& p) { p.pattern.branches[1].first_head = first, p.pattern.branches[1].head_count = count; },
               {"heads of branch 1", "[0, 6)", "first_head " + std::to_string(first), "head_count", "shorten"});
  };
  expect_bad_range(-1, 2);
  expect_bad_range(0, 7);
  expect_bad_range(4, 3);
  expect_bad_range(7, 0);
  expect_bad_range(7, kAllHeads);
  expect_bad_range(0, -2);
  expect_bad_range(1, kMost);
  expect_bad_range(kMost, 1);
  expect_bad_range(kLeast, kAllHeads);
}

TEST(Resolve, RefusesTablesThatDoNotFit) {
  const auto table = [](Problem& p, std::vector<std::int64_t> classes) {
    p.pattern.phase = Phase::table;
    p.pattern.branches.pop_back();
    p.pattern.branches[0].dilation = 3;
    p.pattern.branches[0].classes = std::move(classes);
  };
  Problem good = good_problem();
  table(good, {0, 1, 2, 0, 1, 2});
  EXPECT_NO_THROW(resolve(good));
  expect_bad([&](Problem& p) { table(p, {0, 1}); }, {"one class a head", "2 classes for 6 heads", "as many classes"});
  expect_bad([&](Problem& p) { table(p, {}); }, {"one class a head", "0 classes for 6 heads", "as many classes"});
  expect_bad(
      [&](Problem& p) {
        table(p, {0, 1, 2, 3, 0, 0});
      },
      {"a class of branch 0", "[0, 3)", "got 3", "below the dilation"});
  expect_bad(
      [&](Problem& p) {
        table(p, {0, 1, 2, -1, 0, 0});
      },
      {"a class of branch 0", "[0, 3)", "got -1", "below the dilation"});
  expect_bad([](Problem& p) { p.pattern.branches[0].classes = {0}; },
             {"phase rule table alone", "branch 0", "by_head", "leave them out"});
}

TEST(Resolve, RefusesBadDocuments) {
  const std::string remedy = "0, end of document 0, ..., tokens";
  expect_bad([](Problem& p) { p.documents = {1, 100}; }, {"begin with 0", "got 1", remedy});
  expect_bad([](Problem& p) { p.documents = {0, 50, 49, 100}; }, {"must not fall", "50 before 49 at index 2", remedy});
  expect_bad([](Problem& p) { p.documents = {0, 50}; }, {"end with tokens = 100", "got 50", remedy});
  expect_bad([](Problem& p) { p.documents = {0, 101}; }, {"end with tokens = 100", "got 101", remedy});
  expect_bad([](Problem& p) { p.documents = {0}; }, {"end with tokens = 100", "got 0", remedy});
  expect_bad([](Problem& p) { p.documents = {0, -4, 100}; }, {"must not fall", "0 before -4", remedy});
}

TEST(Resolve, RefusesEnumeratorsThatDoNotExist) {
  expect_bad([](Problem& p) { p.dtype = static_cast<DType>(17); }, {"enumerator", "17"});
  expect_bad([](Problem& p) { p.pattern.phase = static_cast<Phase>(17); }, {"enumerator", "17"});
  expect_bad([](Problem& p) { p.pattern.gradient = static_cast<Gradient>(17); }, {"enumerator", "17"});
}

}  // namespace
}  // namespace annulus
