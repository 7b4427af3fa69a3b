// Which of a rank's rows the kernels that take all branches at once may have, without a GPU.
#include "kernels/cuda/local_part.h"

#include <gtest/gtest.h>

namespace annulus::cuda {
namespace {

std::vector<LocalPart> parts_of(const std::vector<std::int64_t>& segments, const std::vector<std::int64_t>& dilations,
                                const Rows& piece, const std::vector<std::int64_t>& documents = {}) {
  Problem problem;
  problem.tokens = 1024;
  problem.heads = 4;
  problem.head_dim = 64;
  problem.documents = documents;
  problem.pattern = make_pattern(Preset::longnet, segments, dilations, 4);
  problem = resolve(problem);
  return find_local_parts(problem, make_plan(problem), {{piece}, /*stepwise=*/true});
}

void expect_part(const std::vector<LocalPart>& parts, std::int64_t begin, std::int64_t end,
                 const std::vector<int>& branches) {
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts.front().begin, begin);
  EXPECT_EQ(parts.front().end, end);
  EXPECT_EQ(parts.front().branches, branches);
  EXPECT_EQ(parts.front().problem.tokens, end - begin);
}

TEST(LocalPart, SegmentsThatFitAShard) { expect_part(parts_of({64, 256}, {1, 4}, {256, 1, 512}), 256, 768, {0, 1}); }

TEST(LocalPart, ASegmentThatSpansTheShardIsCutAtItsEnds) {
  expect_part(parts_of({64, 1024}, {1, 16}, {512, 1, 512}), 512, 1024, {0, 1});
  expect_part(parts_of({1024}, {4}, {512, 1, 256}), 512, 768, {0});
}

TEST(LocalPart, ButNotWhereItsClassesDoNotBeginAnew) {
  expect_part(parts_of({64, 1024}, {1, 3}, {512, 1, 512}), 512, 1024, {0});
}

TEST(LocalPart, NorWhereShorterSegmentsDoNotBegin) {
  expect_part(parts_of({100, 1024}, {1, 16}, {512, 1, 512}), 600, 1024, {0});
}

TEST(LocalPart, NorWhereTheDocumentEnds) {
  expect_part(parts_of({64, 1024}, {1, 16}, {512, 1, 512}, {0, 800, 1024}), 512, 1024, {0});
}

}  // namespace
}  // namespace annulus::cuda
