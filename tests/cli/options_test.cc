// Options: from words to a problem, and what is refused with which words.
#include "cli/options.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "annulus/errors.h"

namespace annulus::cli {
namespace {

CommandOptions parse(std::vector<std::string> words) {
  CLI::App app;
  CommandOptions options;
  add_options(app, options, {.tokens = "100", .segments = "16,32", .dilations = "1,2"});
  std::reverse(words.begin(), words.end());  // CLI11 takes them last first
  app.parse(words);
  return options;
}

Problem problem_of(const std::vector<std::string>& words) {
  const CommandOptions options = parse(words);
  return make_problem(options.problem, typed_sizes(options));
}

// The message of the InvalidArgument that these words lead to.
std::string refusal(const std::vector<std::string>& words) {
  try {
    (void)problem_of(words);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

#define EXPECT_REFUSED(words, ...)                                                 \
  for (const std::string& part : std::vector<std::string> __VA_ARGS__)             \
  EXPECT_NE(refusal(std::vector<std::string> words).find(part), std::string::npos) \
      << "wanted '" << part << "' in: " << refusal(std::vector<std::string> words)

TEST(Options, DefaultsAreOneSmallLongnetProblem) {
  const Problem problem = problem_of({});
  Problem expected;
  expected.tokens = 100;
  expected.heads = 12;
  expected.pattern = make_pattern(Preset::longnet, {16, 32}, {1, 2}, 12);
  EXPECT_EQ(problem, resolve(expected));
}

TEST(Options, EveryOptionReachesTheProblem) {
  const Problem problem = problem_of({"--tokens",     "1.5k",
                                      "--batch",      "3",
                                      "--heads",      "6",
                                      "--kv-heads",   "2",
                                      "--head-dim",   "40",
                                      "--dtype",      "bf16",
                                      "--segments",   "1k,7",
                                      "--dilations",  "3,1",
                                      "--phase",      "every",
                                      "--gradient",   "detached",
                                      "--causal",     "--cu-seqlens",
                                      "0,10,10,1536", "--scale",
                                      "0.25",         "--pad-like-torchscale"});
  EXPECT_EQ(problem.tokens, 1536);
  EXPECT_EQ(problem.batch, 3);
  EXPECT_EQ(problem.heads, 6);
  EXPECT_EQ(problem.kv_heads, 2);
  EXPECT_EQ(problem.head_dim, 40);
  EXPECT_EQ(problem.dtype, DType::bf16);
  EXPECT_EQ(problem.pattern.branches[0].segment, 1024);
  EXPECT_EQ(problem.pattern.branches[1].segment, 7);
  EXPECT_EQ(problem.pattern.branches[0].dilation, 3);
  EXPECT_EQ(problem.pattern.phase, Phase::every);
  EXPECT_EQ(problem.pattern.gradient, Gradient::detached);
  EXPECT_TRUE(problem.causal);
  EXPECT_EQ(problem.documents, (std::vector<std::int64_t>{0, 10, 10, 1536}));
  EXPECT_EQ(problem.scale, 0.25);
  EXPECT_TRUE(problem.pattern.pad_like_torchscale);
}

TEST(Options, PresetsAndWhatOverridesThem) {
  EXPECT_EQ(problem_of({"--preset", "torchscale"}).pattern.phase, Phase::by_head_block);
  EXPECT_EQ(problem_of({"--preset", "torchscale"}).pattern.gradient, Gradient::detached);
  EXPECT_EQ(problem_of({"--preset", "torchscale", "--gradient", "exact"}).pattern.gradient, Gradient::exact);
  EXPECT_EQ(problem_of({"--preset", "residue"}).pattern.phase, Phase::every);
  EXPECT_EQ(problem_of({"--preset", "residue", "--phase", "by_head"}).pattern.phase, Phase::by_head);
  const Pattern groups = problem_of({"--preset", "head_groups", "--heads", "5"}).pattern;
  EXPECT_EQ(groups.branches[0].head_count, 3);
  EXPECT_EQ(groups.branches[1].head_count, 2);
  EXPECT_EQ(groups.output_scale, 0.5);
  EXPECT_REFUSED(({"--preset", "head_groups", "--phase", "every"}), {"head_groups", "--phase", "leave them out"});
}

TEST(Options, TablesAndHeadRanges) {
  const Pattern table = problem_of({"--heads", "3", "--phase", "table", "--classes", "0,0,0;1,0,1"}).pattern;
  EXPECT_EQ(table.phase, Phase::table);
  EXPECT_EQ(table.branches[1].classes, (std::vector<std::int64_t>{1, 0, 1}));
  const Pattern ranges = problem_of({"--heads", "3", "--head-ranges", "0:2;2:3"}).pattern;
  EXPECT_EQ(ranges.branches[0].head_count, 2);
  EXPECT_EQ(ranges.branches[1].first_head, 2);
  EXPECT_EQ(ranges.branches[1].head_count, 1);
  const Pattern both =
      problem_of({"--heads", "3", "--head-ranges", "0:2;2:2", "--phase", "table", "--classes", "0,0;"}).pattern;
  EXPECT_EQ(both.branches[1].head_count, 0);
  EXPECT_TRUE(both.branches[1].classes.empty());

  EXPECT_REFUSED(({"--phase", "table"}), {"--classes", "got none"});
  EXPECT_REFUSED(({"--classes", "0;0"}), {"--phase table", "by_head"});
  EXPECT_REFUSED(({"--phase", "table", "--classes", "0,0"}), {"1 lists for 2 branches"});
  EXPECT_REFUSED(({"--heads", "2", "--phase", "table", "--classes", "0,0;0,2"}), {"[0, 2)", "got 2"});
  EXPECT_REFUSED(({"--heads", "2", "--phase", "table", "--classes", "0;0"}), {"1 classes for 2 heads"});
  EXPECT_REFUSED(({"--head-ranges", "0:2"}), {"1 ranges for 2 branches"});
  EXPECT_REFUSED(({"--head-ranges", "0:2;0:13"}), {"[0, 12)", "13"});
  EXPECT_REFUSED(({"--head-ranges", "2:0;0:2"}), {"2:0"});
  EXPECT_REFUSED(({"--head-ranges", "3;0:2"}), {"--head-ranges", "first:last", "'3'"});
}

TEST(Options, WrongValuesAreRefusedWithTheOptionAndTheValue) {
  EXPECT_REFUSED(({"--tokens", "-1"}), {"--tokens", "-1"});
  EXPECT_REFUSED(({"--tokens", "many"}), {"--tokens", "'many'"});
  EXPECT_REFUSED(({"--segments", "16"}), {"1 segment lengths", "2 dilations"});
  EXPECT_REFUSED(({"--segments", "16,0"}), {"segment", "branch 1", "0"});
  EXPECT_REFUSED(({"--dilations", "1,0"}), {"dilation", "branch 1", "0"});
  EXPECT_REFUSED(({"--segments", "16,,2"}), {"--segments", "element 2"});
  EXPECT_REFUSED(({"--heads", "12", "--kv-heads", "5"}), {"12 heads and 5 kv_heads"});
  EXPECT_REFUSED(({"--kv-heads", "0"}), {"--kv-heads", "got 0"});
  EXPECT_REFUSED(({"--dtype", "fp64"}), {"fp32, bf16, fp16", "'fp64'"});
  EXPECT_REFUSED(({"--phase", "random"}), {"by_head", "'random'"});
  EXPECT_REFUSED(({"--preset", "gpt"}), {"longnet", "'gpt'"});
  EXPECT_REFUSED(({"--gradient", "none"}), {"exact, detached", "'none'"});
  EXPECT_REFUSED(({"--cu-seqlens", "0,50,40,100"}), {"50 before 40"});
  EXPECT_REFUSED(({"--cu-seqlens", "0,50"}), {"tokens = 100", "50"});
  EXPECT_REFUSED(({"--scale", "big"}), {"--scale", "'big'"});
  EXPECT_REFUSED(({"--scale", "inf"}), {"--scale", "'inf'"});
}

TEST(Options, ExplicitSizesMustAgreeWithAFile) {
  const Sizes file{.batch = 1, .tokens = 50, .heads = 4, .kv_heads = 2, .head_dim = 8, .dtype = DType::fp32};
  check_typed_sizes(parse({}).problem, file, "x");
  check_typed_sizes(parse({"--tokens", "50", "--kv-heads", "2"}).problem, file, "x");
  for (const auto& [option, value] : std::vector<std::pair<std::string, std::string>>{
           {"--batch", "2"}, {"--tokens", "51"}, {"--heads", "5"}, {"--kv-heads", "4"}, {"--head-dim", "64"}}) {
    try {
      check_typed_sizes(parse({option, value}).problem, file, "x.safetensors");
      ADD_FAILURE() << option << " was accepted";
    } catch (const InvalidArgument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(option), std::string::npos) << message;
      EXPECT_NE(message.find("got " + value), std::string::npos) << message;
      EXPECT_NE(message.find("x.safetensors has"), std::string::npos) << message;
    }
  }
}

TEST(Options, TheTypeThatTheDeviceDoesBest) {
  const bool dot = instruction_sets().front() == "avx512_bf16";
  EXPECT_EQ(problem_of({"--dtype", "auto", "--device", "cuda"}).dtype, DType::bf16);
  EXPECT_EQ(problem_of({"--dtype", "auto"}).dtype, dot ? DType::bf16 : DType::fp32);
  EXPECT_EQ(problem_of({"--dtype", "auto", "--backward"}).dtype, DType::fp32);
  EXPECT_EQ(problem_of({"--dtype", "auto", "--instruction-set", "portable"}).dtype, DType::fp32);
}

TEST(Options, TheMachine) {
  EXPECT_EQ(make_machine(parse({}).machine).threads, 0);
  EXPECT_EQ(make_machine(parse({"--threads", "3"}).machine).threads, 3);
  EXPECT_EQ(make_machine(parse({"--instruction-set", "portable"}).machine).instruction_set, "portable");
  EXPECT_THROW(make_machine(parse({"--threads", "0"}).machine), InvalidArgument);
  EXPECT_THROW(make_machine(parse({"--threads", "1M"}).machine), InvalidArgument);
  EXPECT_NO_THROW(make_machine(parse({"--device", "cuda"}).machine));  // whether there is one shows later
  EXPECT_TRUE(uses_gpu(parse({"--device", "cuda:1"}).machine));
  EXPECT_FALSE(uses_gpu(parse({}).machine));
  EXPECT_THROW(make_machine(parse({"--device", "tpu"}).machine), InvalidArgument);
}

TEST(Options, Seeds) {
  EXPECT_EQ(make_seed(parse({}).problem), 0u);
  EXPECT_EQ(make_seed(parse({"--seed", "18446744073709551615"}).problem), 0xffffffffffffffffu);
  for (const char* text : {"-1", "1.5", "0x10", "18446744073709551616", ""})
    EXPECT_THROW(make_seed(parse({"--seed", text}).problem), InvalidArgument) << text;
}

}  // namespace
}  // namespace annulus::cli
