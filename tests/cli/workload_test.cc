// Tensors in memory: what the ledger says is what the plan said, to the byte.
#include "cli/workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "annulus/thread_group.h"
#include "cli/random.h"

namespace annulus::cli {
namespace {

Problem small_problem(DType dtype) {
  Problem problem;
  problem.batch = 2;
  problem.tokens = 301;
  problem.heads = 6;
  problem.kv_heads = 2;
  problem.head_dim = 24;
  problem.dtype = dtype;
  problem.pattern = make_pattern(Preset::longnet, {32, 100}, {1, 3}, 6);
  return resolve(problem);
}

// A lone rank.
struct Lone {
  explicit Lone(const Problem& problem, const Options& device = {})
      : group(make_thread_group(1)), attention(problem, {}, *group.front(), options(device)) {}
  static RankOptions options(const Options& device) {
    RankOptions result;
    result.device = device;
    return result;
  }
  std::vector<std::unique_ptr<Transport>> group;
  RankAttention attention;
};

std::int64_t plan_of(const RankAttention& attention, Pass pass) { return total_bytes(attention.memory(pass)); }

TEST(Workload, TheLedgerMeetsThePlanToTheByte) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    const Lone lone(small_problem(dtype), {.threads = 3, .instruction_set = ""});
    const RankAttention& attention = lone.attention;
    Workload work(attention.problem());
    work.draw(1, 2, Pass::forward);
    work.forward(attention);
    EXPECT_EQ(work.ledger().current_bytes(), plan_of(attention, Pass::forward));
    EXPECT_EQ(work.ledger().peak_bytes(), plan_of(attention, Pass::forward));
    work.draw(1, 2, Pass::backward);
    work.backward(attention);
    EXPECT_EQ(work.ledger().current_bytes(), plan_of(attention, Pass::backward));
    EXPECT_EQ(work.ledger().peak_bytes(),
              std::max(plan_of(attention, Pass::forward), plan_of(attention, Pass::backward)));
    work.backward(attention);
    EXPECT_EQ(work.ledger().current_bytes(), plan_of(attention, Pass::backward));
  }
}

TEST(Workload, ShapesAndTypes) {
  const Workload work(small_problem(DType::bf16));
  EXPECT_EQ(work.shape("q"), (std::vector<std::int64_t>{2, 301, 6, 24}));
  EXPECT_EQ(work.shape("dk"), (std::vector<std::int64_t>{2, 301, 2, 24}));
  EXPECT_EQ(work.shape("lse"), (std::vector<std::int64_t>{2, 6, 301}));
  EXPECT_EQ(work.dtype("out"), DType::bf16);
  EXPECT_EQ(work.dtype("lse"), DType::fp32);
  EXPECT_EQ(work.bytes("q"), 2 * 301 * 6 * 24 * 2);
}

TEST(Workload, DrawsWhatTheGeneratorSays) {
  Workload work(small_problem(DType::fp32));
  work.draw(5, 2, Pass::backward);
  for (const auto& [name, stream] :
       {std::pair("q", Stream::q), {"k", Stream::k}, {"v", Stream::v}, {"dout", Stream::dout}}) {
    const std::int64_t last = work.elements(name) - 1;
    EXPECT_EQ(static_cast<const float*>(work.data(name))[last], normal_value(5, stream, last)) << name;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(work.data(name)) % 64, 0u) << name;
  }
}

TEST(Workload, BorrowedInputsAreReadWhereTheyAre) {
  const Lone lone(small_problem(DType::fp32));
  const RankAttention& attention = lone.attention;
  Workload own(attention.problem());
  own.draw(3, 2, Pass::forward);
  own.forward(attention);
  Workload borrower(attention.problem());
  for (const std::string& name : input_names(Pass::forward)) borrower.borrow(name, own.data(name));
  borrower.forward(attention);
  EXPECT_EQ(borrower.data("q"), own.data("q"));
  EXPECT_EQ(std::memcmp(borrower.data("out"), own.data("out"), static_cast<std::size_t>(own.bytes("out"))), 0);
  EXPECT_EQ(borrower.ledger().peak_bytes(), own.ledger().peak_bytes());
}

TEST(Workload, NoTokens) {
  Problem problem = small_problem(DType::fp32);
  problem.tokens = 0;
  problem.documents = {0, 0};
  const Lone lone(problem);
  const RankAttention& attention = lone.attention;
  Workload work(attention.problem());
  work.draw(0, 2, Pass::backward);
  work.forward(attention);
  work.backward(attention);
  EXPECT_EQ(work.bytes("out"), 0);
}

// Every third row belongs to somebody else.
TEST(Workload, AShardHasTheRowsOfTheWhole) {
  const Problem problem = small_problem(DType::bf16);
  Workload whole(problem);
  whole.draw(5, 2, Pass::backward);
  for (const ShardMap& shard :
       {ShardMap{{{1, 3, 100}}, 301}, ShardMap{{{0, 1, 50}, {250, 1, 51}}, 301}, ShardMap{{}, 301}}) {
    Workload drawn(problem, {shard, shard}), copied(problem, {shard, shard});
    drawn.draw(5, 3, Pass::backward);
    for (const std::string& name : input_names(Pass::backward)) {
      const auto* bytes = static_cast<const std::byte*>(whole.data(name));
      copied.copy(name, {bytes, static_cast<std::size_t>(whole.bytes(name))});
      ASSERT_EQ(drawn.bytes(name), copied.bytes(name));
      EXPECT_EQ(std::memcmp(drawn.data(name), copied.data(name), static_cast<std::size_t>(drawn.bytes(name))), 0);
    }
    EXPECT_EQ(drawn.shape("lse"), (std::vector<std::int64_t>{2, 6, shard.rows()}));
    EXPECT_EQ(drawn.whole_shape("lse"), (std::vector<std::int64_t>{2, 6, 301}));
  }
}

}  // namespace
}  // namespace annulus::cli
