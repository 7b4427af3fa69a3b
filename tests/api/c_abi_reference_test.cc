// The fp64 reference through the C ABI gives the numbers of the reference.
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "annulus/annulus.h"
#include "reference/reference.h"

namespace annulus {
namespace {

constexpr std::int64_t kTokens = 37, kHeads = 2, kHeadDim = 8;

testing::AssertionResult is(int status, int expected, const std::vector<std::string>& parts = {}) {
  const std::string message = annulus_last_error();
  if (status != expected) return testing::AssertionFailure() << "status " << status << ": " << message;
  for (const std::string& part : parts)
    if (message.find(part) == std::string::npos)
      return testing::AssertionFailure() << "no '" << part << "' in: " << message;
  return testing::AssertionSuccess();
}

std::vector<double> draw(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = normal(random);
  return values;
}

TEST(CReference, IsTheReference) {
  const Problem resolved = resolve({.tokens = kTokens,
                                    .heads = kHeads,
                                    .head_dim = kHeadDim,
                                    .pattern = make_pattern(Preset::longnet, {8, 30}, {1, 3}, kHeads),
                                    .scale = {},
                                    .documents = {}});
  const std::size_t count = kTokens * kHeads * kHeadDim;
  const reference::Inputs inputs{.q = draw(count, 1), .k = draw(count, 2), .v = draw(count, 3), .dout = draw(count, 4)};
  const reference::Result expected = reference::exact(resolved, inputs);

  const annulus_branch branches[] = {
      {.segment = 8, .dilation = 1, .first_head = 0, .head_count = 0, .classes = nullptr, .class_count = 0},
      {.segment = 30, .dilation = 3, .first_head = 0, .head_count = 0, .classes = nullptr, .class_count = 0}};
  annulus_problem problem{};
  problem.struct_size = sizeof problem;
  problem.batch = 1;
  problem.tokens = kTokens;
  problem.heads = kHeads;
  problem.head_dim = kHeadDim;
  problem.branches = branches;
  problem.branch_count = 2;

  std::vector<double> out(count), lse(kTokens * kHeads), dq(count), dk(count), dv(count);
  annulus_reference_args args{};
  args.struct_size = sizeof args;
  args.q = inputs.q.data(), args.k = inputs.k.data(), args.v = inputs.v.data();
  args.out = out.data(), args.lse = lse.data();
  ASSERT_TRUE(is(annulus_reference(&problem, &args), ANNULUS_OK));
  EXPECT_EQ(out, expected.out);
  EXPECT_EQ(lse, expected.lse);
  args.dout = inputs.dout.data();
  EXPECT_TRUE(is(annulus_reference(&problem, &args), ANNULUS_INVALID_ARGUMENT, {"dq", "null"}));
  args.dq = dq.data(), args.dk = dk.data(), args.dv = dv.data();
  ASSERT_TRUE(is(annulus_reference(&problem, &args), ANNULUS_OK));
  EXPECT_EQ(dq, expected.dq);
  EXPECT_EQ(dk, expected.dk);
  EXPECT_EQ(dv, expected.dv);
  args.q = nullptr;
  EXPECT_TRUE(is(annulus_reference(&problem, &args), ANNULUS_INVALID_ARGUMENT, {"q", "null"}));
  EXPECT_TRUE(is(annulus_reference(&problem, nullptr), ANNULUS_INVALID_ARGUMENT, {"reference_args"}));
}

}  // namespace
}  // namespace annulus
