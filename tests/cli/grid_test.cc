// The grid: what it must contain, and that a choice of it is a choice of it.
#include "cli/grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

namespace annulus::cli {
namespace {

std::string value_of(const Words& words, const std::string& option) {
  const auto found = std::ranges::find(words, option);
  return found == words.end() ? "" : *(found + 1);
}

TEST(Grid, HasEveryValueOfEveryAxisTogether) {
  const std::vector<Words> cases = grid_cases({}, {}, 0);
  EXPECT_EQ(cases.size(), 6u * 5 * 3 * 6 * 4 * 3 * 2 * 2);
  EXPECT_EQ(std::set<Words>(cases.begin(), cases.end()).size(), cases.size());
  const std::map<std::string, std::set<std::string>> axes = {
      {"--tokens", {"1", "2", "127", "351", "1000", "4099"}},
      {"--heads", {"1", "5", "12"}},
      {"--kv-heads", {"1", "4"}},
      {"--head-dim", {"8", "40", "64", "80", "128", "256"}},
      {"--dtype", {"fp32", "bf16", "fp16"}},
      {"--segments", {"16", "16,64,100", "2048,4096", "64,128,256,512,1024", "10"}},
      {"--dilations", {"1", "1,3,7", "1,2", "1,2,4,8,16", "16"}},
      {"--phase", {"by_head", "by_head_block", "every", "table"}},
      {"--gradient", {"exact", "detached"}},
      {"--cu-seqlens", {"", "0,1,1,18,351"}},
  };
  for (const auto& [option, wanted] : axes) {
    std::set<std::string> seen;
    for (const Words& words : cases) seen.insert(value_of(words, option));
    EXPECT_EQ(seen, wanted) << option;
  }
  EXPECT_EQ(std::ranges::count_if(
                cases, [](const Words& words) { return std::ranges::find(words, "--causal") != words.end(); }),
            static_cast<std::ptrdiff_t>(cases.size() / 2));
}

TEST(Grid, TablesHaveAClassForEveryHeadBelowTheDilation) {
  int tables = 0;
  for (const Words& words : grid_cases({}, 500, 3)) {
    if (value_of(words, "--phase") != "table") {
      EXPECT_EQ(value_of(words, "--classes"), "");
      continue;
    }
    ++tables;
    const std::string classes = value_of(words, "--classes");
    const auto branches = 1 + std::ranges::count(value_of(words, "--segments"), ',');
    EXPECT_EQ(1 + std::ranges::count(classes, ';'), branches) << classes;
    EXPECT_EQ(branches + std::ranges::count(classes, ','), branches * std::stoi(value_of(words, "--heads"))) << classes;
  }
  EXPECT_GT(tables, 50);
}

TEST(Grid, AChoiceIsASubsetThatTheSeedDecides) {
  const std::vector<Words> all = grid_cases({}, {}, 0);
  const std::set<Words> known(all.begin(), all.end());
  const std::vector<Words> chosen = grid_cases({}, 200, 1);
  EXPECT_EQ(chosen.size(), 200u);
  EXPECT_EQ(std::set<Words>(chosen.begin(), chosen.end()).size(), 200u);
  for (const Words& words : chosen) EXPECT_TRUE(known.contains(words));
  EXPECT_EQ(grid_cases({}, 200, 1), chosen);
  EXPECT_NE(grid_cases({}, 200, 2), chosen);
  EXPECT_EQ(grid_cases({}, 1'000'000, 1).size(), all.size());
  EXPECT_TRUE(grid_cases({}, 0, 1).empty());
}

TEST(Grid, WantedWordsPickProblems) {
  const std::vector<Words> wanted = {{"--tokens", "1000"}, {"--causal"}};
  const std::vector<Words> cases = grid_cases(wanted, {}, 0);
  EXPECT_EQ(cases.size(), 5u * 3 * 6 * 4 * 3 * 2);
  for (const Words& words : cases) {
    EXPECT_EQ(value_of(words, "--tokens"), "1000");
    EXPECT_TRUE(std::ranges::find(words, "--causal") != words.end());
  }
  const std::vector<Words> some = grid_cases(wanted, 7, 1);
  EXPECT_EQ(some.size(), 7u);
  for (const Words& words : some) EXPECT_TRUE(std::ranges::find(cases, words) != cases.end());
  EXPECT_TRUE(grid_cases({{"--tokens", "40"}}, {}, 0).empty());
}

TEST(Grid, CommandLinesAreQuotedForAShell) {
  EXPECT_EQ(command_line({"--tokens", "5", "--classes", "0,1;0,0"}), "annulus verify --tokens 5 --classes '0,1;0,0'");
}

}  // namespace
}  // namespace annulus::cli
