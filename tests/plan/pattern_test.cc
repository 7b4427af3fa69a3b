// Presets (docs/semantics.md, section 5) and the names of phases, gradients, presets and types.
#include "annulus/pattern.h"

#include <gtest/gtest.h>

#include "annulus/problem.h"
#include "support/refusal.h"

namespace annulus {
namespace {

using support::expect_refused;

TEST(Pattern, LongnetIsTheDefault) {
  const Pattern pattern = make_pattern(Preset::longnet, {2048, 4096}, {1, 2}, 12);
  ASSERT_EQ(pattern.branches.size(), 2u);
  EXPECT_EQ(pattern.branches[0].segment, 2048);
  EXPECT_EQ(pattern.branches[0].dilation, 1);
  EXPECT_EQ(pattern.branches[1].segment, 4096);
  EXPECT_EQ(pattern.branches[1].dilation, 2);
  for (const Branch& branch : pattern.branches) {
    EXPECT_EQ(branch.first_head, 0);
    EXPECT_EQ(branch.head_count, kAllHeads);
    EXPECT_TRUE(branch.classes.empty());
  }
  EXPECT_EQ(pattern.phase, Phase::by_head);
  EXPECT_EQ(pattern.gradient, Gradient::exact);
  EXPECT_EQ(pattern.output_scale, 1.0);
  EXPECT_FALSE(pattern.pad_like_torchscale);
}

TEST(Pattern, TorchscaleAndResidueDifferInPhaseAndGradientAlone) {
  const Pattern longnet = make_pattern(Preset::longnet, {16, 64}, {1, 4}, 8);
  Pattern want = longnet;
  want.phase = Phase::by_head_block;
  want.gradient = Gradient::detached;
  EXPECT_EQ(make_pattern(Preset::torchscale, {16, 64}, {1, 4}, 8), want);
  want = longnet;
  want.phase = Phase::every;
  EXPECT_EQ(make_pattern(Preset::residue, {16, 64}, {1, 4}, 8), want);
}

TEST(Pattern, HeadGroupsDealEveryHeadToOneBranch) {
  for (std::int64_t branches = 1; branches <= 5; ++branches)
    for (std::int64_t heads = branches; heads <= 13; ++heads) {
      std::vector<std::int64_t> segments, dilations;
      for (std::int64_t i = 0; i < branches; ++i) segments.push_back(8 << i), dilations.push_back(1 + i % 3);
      const Pattern pattern = make_pattern(Preset::head_groups, segments, dilations, heads);
      EXPECT_EQ(pattern.phase, Phase::table);
      EXPECT_EQ(pattern.gradient, Gradient::exact);
      EXPECT_DOUBLE_EQ(pattern.output_scale, 1.0 / static_cast<double>(branches));
      std::int64_t next = 0;
      for (std::int64_t i = 0; i < branches; ++i) {
        const Branch& branch = pattern.branches[static_cast<std::size_t>(i)];
        EXPECT_EQ(branch.first_head, next);
        EXPECT_EQ(branch.head_count, heads / branches + (i < heads % branches ? 1 : 0));
        EXPECT_EQ(branch.classes,
                  std::vector<std::int64_t>(static_cast<std::size_t>(branch.head_count), i % branch.dilation));
        next += branch.head_count;
      }
      EXPECT_EQ(next, heads);
      EXPECT_NO_THROW(resolve({.tokens = 100, .heads = heads, .pattern = pattern, .scale = {}, .documents = {}}));
    }
}

TEST(Pattern, RefusesListsThatMakeNoBranches) {
  expect_refused(
      [] {
        make_pattern(Preset::longnet, {16, 32}, {1}, 4);
      },
      {"segment lengths and dilations", "2 segment", "1 dilations"});
  expect_refused([] { make_pattern(Preset::longnet, {}, {}, 4); },
                 {"at least one branch", "got none", "give segment lengths"});
  expect_refused(
      [] {
        make_pattern(Preset::head_groups, {16, 32, 64}, {1, 2, 4}, 2);
      },
      {"at least one head a branch", "3 branches", "2 heads", "use fewer branches"});
}

// A bad dilation must reach resolve() and its message, not a division by zero.
TEST(Pattern, HeadGroupsLeaveABadDilationToResolve) {
  for (const std::int64_t dilation : {std::int64_t{0}, std::int64_t{-3}}) {
    const Pattern pattern = make_pattern(Preset::head_groups, {16}, {dilation}, 4);
    expect_refused([&] { resolve({.tokens = 8, .heads = 4, .pattern = pattern, .scale = {}, .documents = {}}); },
                   {"dilation", "at least 1", std::to_string(dilation)});
  }
}

template <class Enum, class Parse>
void expect_names(const std::vector<std::pair<Enum, std::string>>& names, Parse parse) {
  std::vector<std::string> all{"no such thing"};
  for (const auto& [value, text] : names) {
    EXPECT_EQ(name(value), text);
    EXPECT_EQ(parse(text), value);
    all.push_back(text);
  }
  expect_refused([&] { parse("no such thing"); }, all);
  EXPECT_THROW(parse(""), InvalidArgument);
  EXPECT_THROW(parse(names.front().second + " "), InvalidArgument);
  EXPECT_THROW(name(static_cast<Enum>(99)), InvalidArgument);
}

TEST(Pattern, NamesGoBothWays) {
  expect_names<Phase>({{Phase::by_head, "by_head"},
                       {Phase::by_head_block, "by_head_block"},
                       {Phase::every, "every"},
                       {Phase::table, "table"}},
                      parse_phase);
  expect_names<Gradient>({{Gradient::exact, "exact"}, {Gradient::detached, "detached"}}, parse_gradient);
  expect_names<Preset>({{Preset::longnet, "longnet"},
                        {Preset::torchscale, "torchscale"},
                        {Preset::residue, "residue"},
                        {Preset::head_groups, "head_groups"}},
                       parse_preset);
  expect_names<DType>({{DType::fp32, "fp32"}, {DType::bf16, "bf16"}, {DType::fp16, "fp16"}}, parse_dtype);
}

}  // namespace
}  // namespace annulus
