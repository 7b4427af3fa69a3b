// The forward pass of the reference against independent facts: a softmax written out here, the merge of branches (eq. 4
// and 5), padding with real zeros, and where a NaN may and may not go.
#include "reference/reference.h"

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "annulus/errors.h"
#include "reference/draw_inputs.h"
#include "reference/draw_problem.h"
#include "reference/keys.h"

namespace annulus::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Problem make_problem(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, Pattern pattern) {
  Problem problem;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.head_dim = head_dim;
  problem.pattern = std::move(pattern);
  return problem;
}

struct Softmax {
  std::vector<double> out;
  double lse;
};

// Attention of one query to a list of rows of k and v, straight from the textbook.
Softmax attend(const double* q, const std::vector<const double*>& k, const std::vector<const double*>& v,
               const Problem& problem) {
  const auto size = static_cast<std::size_t>(problem.head_dim);
  double denominator = 0;
  std::vector<double> out(size);
  for (std::size_t i = 0; i < k.size(); ++i) {
    double logit = 0;
    for (std::size_t d = 0; d < size; ++d) logit += q[d] * k[i][d];
    const double weight = std::exp(*problem.scale * logit);
    denominator += weight;
    for (std::size_t d = 0; d < size; ++d) out[d] += weight * v[i][d];
  }
  for (double& x : out) x *= problem.pattern.output_scale / denominator;
  return {out, std::log(denominator)};
}

void expect_row(const Problem& problem, const Result& result, std::int64_t batch, std::int64_t t, std::int64_t head,
                const Softmax& want) {
  EXPECT_NEAR(result.lse[lse_element(problem, batch, head, t)], want.lse, 1e-12);
  const std::size_t at = element(problem, problem.heads, batch, t, head);
  for (std::size_t d = 0; d < want.out.size(); ++d)
    EXPECT_NEAR(result.out[at + d], want.out[d], 1e-12) << t << " " << head;
}

TEST(Reference, OneSegmentIsDenseAttention) {
  for (const bool causal : {false, true}) {
    Problem problem = make_problem(37, 4, 5, make_pattern(Preset::longnet, {1000}, {1}, 4));
    problem.batch = 2;
    problem.kv_heads = 2;
    problem.causal = causal;
    problem.scale = 0.7;
    problem = resolve(problem);
    const Inputs inputs = draw_inputs(problem, 1, false);
    const Result result = exact(problem, inputs);
    EXPECT_TRUE(result.dq.empty() && result.dk.empty() && result.dv.empty());
    for (std::int64_t b = 0; b < 2; ++b)
      for (std::int64_t j = 0; j < 4; ++j)
        for (std::int64_t t = 0; t < 37; ++t) {
          std::vector<const double*> k, v;
          for (std::int64_t key = 0; key < (causal ? t + 1 : 37); ++key) {
            k.push_back(&inputs.k[element(problem, 2, b, key, j / 2)]);
            v.push_back(&inputs.v[element(problem, 2, b, key, j / 2)]);
          }
          expect_row(problem, result, b, t, j, attend(&inputs.q[element(problem, 4, b, t, j)], k, v, problem));
        }
  }
}

TEST(Reference, UncoveredRowsAreZeroAndAddNothing) {
  const Problem problem = resolve(make_problem(9, 1, 4, make_pattern(Preset::longnet, {4}, {16}, 1)));
  const Result result = exact(problem, draw_inputs(problem, 2));
  for (std::int64_t t = 0; t < 9; ++t) {
    const bool covered = t % 4 == 0;
    EXPECT_EQ(std::isinf(result.lse[lse_element(problem, 0, 0, t)]), !covered);
    const std::size_t at = element(problem, 1, 0, t, 0);
    for (std::size_t d = 0; d < 4; ++d) {
      if (covered) {
        EXPECT_NE(result.dv[at + d], 0);
      } else {
        EXPECT_EQ(result.out[at + d], 0);
        EXPECT_EQ(result.dq[at + d], 0);
        EXPECT_EQ(result.dk[at + d], 0);
        EXPECT_EQ(result.dv[at + d], 0);
      }
    }
  }
}

TEST(Reference, ARowAloneReturnsItsValue) {
  const Problem problem = resolve(make_problem(5, 2, 3, make_pattern(Preset::residue, {4}, {7}, 2)));
  const Inputs inputs = draw_inputs(problem, 3);
  const Result result = exact(problem, inputs);
  EXPECT_EQ(result.out, inputs.v);
  EXPECT_EQ(result.dv, inputs.dout);
  for (const double x : result.dq) EXPECT_EQ(x, 0);
  for (const double x : result.dk) EXPECT_EQ(x, 0);
}

// A branch that is given twice is the same attention, and as far off: both entries of a key share its error.
TEST(Reference, TermsOfABranchGivenTwice) {
  const Branch branch{.segment = 5, .dilation = 2, .classes = {}};
  const Problem once = resolve(make_problem(13, 2, 8, {.branches = {branch}}));
  const Problem twice = resolve(make_problem(13, 2, 8, {.branches = {branch, branch}}));
  const Inputs inputs = draw_inputs(once, 3);
  const TermSizes one = exact(once, inputs).terms, two = exact(twice, inputs).terms;
  EXPECT_GT(one.out, 0);
  EXPECT_NEAR(two.out, one.out, 1e-12);
  EXPECT_GT(one.dk_stored, 0);
  EXPECT_NEAR(two.dk_stored, one.dk_stored, 1e-12);
}

TEST(Reference, EmptyProblems) {
  for (const auto& [batch, tokens] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {2, 0}, {0, 0}}) {
    Problem problem = make_problem(tokens, 2, 3, make_pattern(Preset::longnet, {4}, {2}, 2));
    problem.batch = batch;
    problem = resolve(problem);
    const Result result = exact(problem, Inputs{});
    EXPECT_TRUE(result.out.empty() && result.lse.empty());
    for (const Check& check : compare(problem, textbook(problem, Inputs{}), result, result)) EXPECT_TRUE(check.passed);
  }
}

TEST(Reference, WrongSizesAreRefused) {
  const Problem problem = resolve(make_problem(4, 2, 3, make_pattern(Preset::longnet, {4}, {2}, 2)));
  Inputs inputs = draw_inputs(problem, 4);
  inputs.v.pop_back();
  EXPECT_THROW(exact(problem, inputs), InvalidArgument);
  EXPECT_THROW(textbook(problem, inputs), InvalidArgument);
}

TEST(Reference, TheNumberOfThreadsDoesNotMatter) {
  Problem problem = make_problem(70, 6, 8, make_pattern(Preset::torchscale, {16, 64}, {2, 3}, 6));
  problem.batch = 2;
  problem.kv_heads = 3;
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, 5);
  const Result one = exact(problem, inputs, 1);
  for (const int threads : {2, 5, 24, 0}) {  // 24: four for each key/value head
    const Result many = exact(problem, inputs, threads);
    EXPECT_EQ(many.out, one.out);
    EXPECT_EQ(many.lse, one.lse);
    EXPECT_EQ(many.dq, one.dq);
    EXPECT_EQ(many.dk, one.dk);
    EXPECT_EQ(many.dv, one.dv);
    EXPECT_EQ(many.terms.dk, one.terms.dk);
  }
}

TEST(Reference, HeadGroupsScalesItsOutput) {
  Problem problem = resolve(make_problem(20, 4, 3, make_pattern(Preset::head_groups, {5, 20}, {1, 1}, 4)));
  const Inputs inputs = draw_inputs(problem, 6);
  const Result result = exact(problem, inputs);
  problem.pattern.output_scale = 1;
  const Result unscaled = exact(problem, inputs);
  EXPECT_EQ(result.lse, unscaled.lse);
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    EXPECT_DOUBLE_EQ(result.out[i], unscaled.out[i] / 2);
    EXPECT_NEAR(result.dq[i], unscaled.dq[i] / 2, 1e-15);
    EXPECT_NEAR(result.dk[i], unscaled.dk[i] / 2, 1e-15);
    EXPECT_DOUBLE_EQ(result.dv[i], unscaled.dv[i] / 2);
  }
}

TEST(Reference, HugeLogitsStayFinite) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    Problem problem = make_problem(12, 1, 4, make_pattern(Preset::longnet, {12}, {1}, 1));
    problem.dtype = dtype;
    problem.scale = 1e5;
    problem = resolve(problem);
    const Inputs inputs = draw_inputs(problem, 7);
    for (const Result& result : {exact(problem, inputs), textbook(problem, inputs)})
      for (const auto* tensor : {&result.out, &result.lse, &result.dq, &result.dk, &result.dv})
        for (const double x : *tensor) ASSERT_TRUE(std::isfinite(x)) << name(dtype);
  }
}

// torchscale's own way: zero rows up to whole segments, zero rows up to whole dilations, and a dense softmax over all
// of it.
TEST(Reference, PaddingMeansRealZeroKeys) {
  struct Case {
    std::int64_t tokens, segment, dilation;
  };
  for (const Case& c : {Case{21, 8, 2}, {21, 8, 4}, {21, 100, 4}, {5, 8, 1}, {17, 16, 8}, {16, 8, 4}, {3, 8, 8}}) {
    Pattern pattern = make_pattern(Preset::residue, {c.segment}, {c.dilation}, 2);
    pattern.pad_like_torchscale = true;
    const Problem problem = resolve(make_problem(c.tokens, 2, 3, pattern));
    const Inputs inputs = draw_inputs(problem, 8, false);
    const Result result = exact(problem, inputs);
    const std::int64_t w = std::min(c.segment, c.tokens);
    const std::int64_t padded_segment = (w + c.dilation - 1) / c.dilation * c.dilation;
    const std::vector<double> zero(3);
    for (std::int64_t j = 0; j < 2; ++j)
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        std::vector<const double*> k, v;
        for (std::int64_t i = (t % w) % c.dilation; i < padded_segment; i += c.dilation) {
          const std::int64_t key = t / w * w + i;
          const bool real = i < w && key < c.tokens;
          k.push_back(real ? &inputs.k[element(problem, 2, 0, key, j)] : zero.data());
          v.push_back(real ? &inputs.v[element(problem, 2, 0, key, j)] : zero.data());
        }
        expect_row(problem, result, 0, t, j, attend(&inputs.q[element(problem, 2, 0, t, j)], k, v, problem));
      }
  }
}

// Equations 4 and 5: branches merged by their denominators are the softmax over the union.
RC_GTEST_PROP(Reference, MergedBranchesAreTheUnion, ()) {
  const Problem problem = draw_problem(25);
  const Inputs inputs = draw_inputs(problem, 9, false);
  const Result together = exact(problem, inputs, 1);
  std::vector<Result> alone;
  for (const Branch& branch : problem.pattern.branches) {
    Problem single = problem;
    single.pattern.branches = {branch};
    alone.push_back(exact(single, inputs, 1));
  }
  for (std::int64_t b = 0; b < problem.batch; ++b)
    for (std::int64_t j = 0; j < problem.heads; ++j)
      for (std::int64_t t = 0; t < problem.tokens; ++t) {
        const std::size_t row = lse_element(problem, b, j, t);
        double total = 0;
        for (const Result& result : alone) total += std::exp(result.lse[row]);
        if (total == 0) {
          RC_ASSERT(together.lse[row] == -kInfinity);
        } else {
          RC_ASSERT(std::abs(together.lse[row] - std::log(total)) < 1e-12);
        }
        const std::size_t at = element(problem, problem.heads, b, t, j);
        for (std::size_t d = 0; d < static_cast<std::size_t>(problem.head_dim); ++d) {
          double merged = 0;
          for (const Result& result : alone)
            if (total > 0) merged += std::exp(result.lse[row]) / total * result.out[at + d];
          RC_ASSERT(std::abs(together.out[at + d] - merged) < 1e-12);
        }
      }
}

bool same_bits(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }

// A NaN in row `bad` of k reaches the rows that see `bad`, the gradients of the keys that those rows see, and nothing
// else. With detached merge weights a NaN in v stays within the branches that carry it.
RC_GTEST_PROP(Reference, ANaNReachesExactlyWhoMaySeeIt, ()) {
  Problem problem = draw_problem(25);
  problem.kv_heads = problem.heads;
  const Inputs clean = draw_inputs(problem, 10);
  const std::int64_t bad = draw_between(0, problem.tokens - 1);
  const std::int64_t head = draw_between(0, problem.heads - 1);
  Inputs dirty = clean;
  const std::size_t poisoned = element(problem, problem.heads, 0, bad, head);
  const int where = *rc::gen::element(0, 1, 2, 3);  // k, v, q, dout
  (where == 0 ? dirty.k : where == 1 ? dirty.v : where == 2 ? dirty.q : dirty.dout)[poisoned] = kNaN;

  const KeySets key_sets(problem);
  const auto size = static_cast<std::size_t>(problem.tokens);
  std::vector<bool> hit_row(size), hit_key(size);
  for (std::int64_t t = 0; t < problem.tokens; ++t) {
    RowKeys row;
    key_sets.collect(t, head, row);
    std::set<int> branches;  // that let t see `bad`
    for (std::size_t e = 0; e < row.key.size(); ++e)
      if (row.key[e] == bad) branches.insert(row.branch[e]);
    const bool hit = where <= 1 ? !branches.empty() : t == bad && row.covered();
    const bool all_branches = where != 1 || problem.pattern.gradient == Gradient::exact;
    hit_row[static_cast<std::size_t>(t)] = hit;
    for (std::size_t e = 0; e < row.key.size(); ++e)
      if (hit && (all_branches || branches.contains(row.branch[e])))
        hit_key[static_cast<std::size_t>(row.key[e])] = true;
  }
  const Result before = exact(problem, clean, 1);
  const Result after = exact(problem, dirty, 1);
  const auto check = [&](const std::vector<double>& x, const std::vector<double>& y, const std::vector<bool>& hit,
                         bool all_of_row) {
    for (std::int64_t b = 0; b < problem.batch; ++b)
      for (std::int64_t t = 0; t < problem.tokens; ++t)
        for (std::int64_t j = 0; j < problem.heads; ++j)
          for (std::size_t d = 0; d < static_cast<std::size_t>(problem.head_dim); ++d) {
            const std::size_t at = element(problem, problem.heads, b, t, j) + d;
            const bool may_change = b == 0 && j == head && hit[static_cast<std::size_t>(t)];
            if (may_change && (all_of_row || d == 0)) {
              RC_ASSERT(std::isnan(y[at]));
            } else if (!may_change) {
              RC_ASSERT(same_bits(x[at], y[at]));
            }
          }
  };
  const bool through_logits = where == 0 || where == 2;
  if (where != 3) check(before.out, after.out, hit_row, through_logits);
  check(before.dq, after.dq, hit_row, true);
  check(before.dk, after.dk, hit_key, true);
  if (where != 1) check(before.dv, after.dv, hit_key, through_logits);
  for (std::int64_t t = 0; t < problem.tokens; ++t) {
    const std::size_t at = lse_element(problem, 0, head, t);
    const bool nan = through_logits && hit_row[static_cast<std::size_t>(t)];
    RC_ASSERT((nan ? std::isnan(after.lse[at]) : same_bits(before.lse[at], after.lse[at])));
  }
}

TEST(Reference, InfiniteLogits) {
  const Problem problem = resolve(make_problem(2, 1, 1, make_pattern(Preset::longnet, {1}, {1}, 1)));
  const Result result = exact(problem, {.q = {1, -1}, .k = {kInfinity, kInfinity}, .v = {1, 1}, .dout = {}});
  EXPECT_TRUE(std::isnan(result.lse[0]));
  EXPECT_TRUE(std::isnan(result.out[0]));
  EXPECT_EQ(result.lse[1], -kInfinity);
  EXPECT_TRUE(std::isnan(result.out[1]));
}

// The yardstick must be near the truth, or every error would pass.
RC_GTEST_PROP(Reference, TextbookIsNearExact, ()) {
  Problem problem = draw_problem(25);
  problem.dtype = *rc::gen::element(DType::fp32, DType::bf16, DType::fp16);
  const Inputs inputs = draw_inputs(problem, 11);
  const Result truth = exact(problem, inputs, 1);
  const Result typed = textbook(problem, inputs, 1);
  const double epsilon = ulp(problem.dtype, 1.0);
  const auto check = [&](const std::vector<double>& x, const std::vector<double>& y, double terms) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::isinf(x[i])) {
        RC_ASSERT(x[i] == y[i]);
      } else {
        RC_ASSERT(std::abs(x[i] - y[i]) <= 2 * epsilon * (1 + terms));
      }
    }
  };
  check(truth.out, typed.out, truth.terms.out);
  check(truth.lse, typed.lse, truth.terms.lse);
  check(truth.dq, typed.dq, truth.terms.dq);
  check(truth.dk, typed.dk, truth.terms.dk);
  check(truth.dv, typed.dv, truth.terms.dv);
}

TEST(Reference, TextbookResultsAreOfTheInputType) {
  Problem problem = make_problem(33, 2, 8, make_pattern(Preset::torchscale, {16, 32}, {1, 2}, 2));
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    problem.dtype = dtype;
    const Problem resolved = resolve(problem);
    const Result result = textbook(resolved, draw_inputs(resolved, 12));
    for (const auto* tensor : {&result.out, &result.dq, &result.dk, &result.dv})
      for (const double x : *tensor) ASSERT_EQ(x, round_to(dtype, x));
    for (const double x : result.lse) ASSERT_EQ(x, round_to(DType::fp32, x));
  }
}

}  // namespace
}  // namespace annulus::reference
