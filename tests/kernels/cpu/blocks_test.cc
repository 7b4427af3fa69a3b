// Blocks deal out every row of every head once; and the arithmetic of rows in memory holds for sizes that no memory
// has.
#include "kernels/cpu/blocks.h"

#include <map>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "support/describe.h"
#include "support/draw_case.h"

namespace annulus::cpu {
namespace {

using support::draw_between;

Context context_of(const Problem& problem, const Plan& plan, int threads) {
  return {problem, plan, find_tiles("auto"), threads, {{{0, 1, problem.tokens}}, false}};
}

RC_GTEST_PROP(BlocksProperty, CoverEveryRowOnce, ()) {
  Problem problem = support::draw_problem(2000, 512);
  problem.documents = support::draw_documents(problem.tokens);
  const Plan plan = make_plan(problem);
  const Context context = context_of(problem, plan, static_cast<int>(draw_between(1, 9)));
  for (const std::int64_t heads : {problem.heads, problem.kv_heads}) {
    const Blocks blocks(context, heads);
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::pair<std::int64_t, std::int64_t>>> ranges;
    for (std::int64_t i = 0; i < blocks.count(); ++i) {
      const Block block = blocks[i];
      RC_ASSERT(!block.positions.empty() && block.count() <= Blocks::max_rows(problem.head_dim));
      RC_ASSERT(block.span->begin <= block.positions.first && block.positions.last() < block.span->end);
      RC_ASSERT(block.first_row == block.positions.first);
      ranges[{block.batch, block.head}].emplace_back(block.positions.first, block.positions.last() + 1);
    }
    RC_ASSERT(static_cast<std::int64_t>(ranges.size()) == problem.batch * heads);
    for (auto& [key, list] : ranges) {
      RC_ASSERT(key.first < problem.batch && key.second < heads);
      std::sort(list.begin(), list.end());
      std::int64_t next = 0;
      for (const auto& [begin, end] : list) {
        RC_ASSERT(begin == next);
        next = end;
      }
      RC_ASSERT(next == problem.tokens);
    }
  }
}

TEST(Blocks, OfATrillionTokens) {
  Problem problem;
  problem.batch = 3;
  problem.tokens = (std::int64_t{1} << 40) + 5;
  problem.heads = 5;
  problem.head_dim = 64;
  problem.documents = {0, 7, std::int64_t{1} << 39, problem.tokens};
  problem.pattern = make_pattern(Preset::longnet, {1000}, {1}, 5);
  problem = resolve(problem);
  const Plan plan = make_plan(problem);
  const Context context = context_of(problem, plan, 2);
  const Blocks blocks(context, problem.heads);
  const Block first = blocks[0], last = blocks[blocks.count() - 1];
  EXPECT_EQ(first.positions, (Rows{0, 1, 7}));
  EXPECT_EQ(last.positions.last(), problem.tokens - 1);
  EXPECT_EQ(last.batch, 2);
  EXPECT_EQ(last.head, 4);
  EXPECT_EQ(context.row_index(2, 4, problem.tokens - 1), 3 * 5 * problem.tokens - 1);
}

TEST(Blocks, RowsOfATensorBeyondFourGibibytes) {
  const auto* base = reinterpret_cast<const char*>(std::uintptr_t{1} << 20);
  const std::int64_t far = std::int64_t{1} << 33;
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const ConstTensorView view(base, dtype, {4, 100, 3, 8}, {100 * far, far, 8, 1});
    const SourceRows rows = source_rows(view, 3, 2, {50, 7, 4});
    EXPECT_EQ(static_cast<const char*>(rows.data) - base, (300 * far + 50 * far + 16) * size_of(dtype));
    EXPECT_EQ(rows.stride, 7 * far);
    EXPECT_EQ(static_cast<const char*>(rows.part(3, 1).data) - base, (300 * far + 71 * far + 16) * size_of(dtype));
  }
}

}  // namespace
}  // namespace annulus::cpu
