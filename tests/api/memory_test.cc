// Memory: the workspace is what was said, at most 4 MiB a thread beside Delta, whatever the number of tokens; and the
// ledger adds up.
#include "annulus/memory.h"

#include <thread>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "kernels/workspace.h"
#include "support/describe.h"

namespace annulus {
namespace {

std::int64_t bytes_of(const std::vector<MemoryComponent>& components, const std::string& name) {
  std::int64_t bytes = 0;
  for (const MemoryComponent& component : components) bytes += component.name == name ? component.bytes : 0;
  return bytes;
}

Problem sized_problem(std::int64_t tokens, std::int64_t head_dim, DType dtype, Gradient gradient) {
  Problem problem;
  problem.batch = 2;
  problem.tokens = tokens;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = head_dim;
  problem.dtype = dtype;
  problem.pattern = make_pattern(Preset::longnet, {2048, 4096, std::int64_t{1} << 40}, {1, 2, 4}, 4);
  problem.pattern.gradient = gradient;
  return resolve(problem);
}

template <class F>
void for_each_kind(F f) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const Gradient gradient : {Gradient::exact, Gradient::detached})
      for (const std::string& instruction_set : instruction_sets()) f(dtype, gradient, instruction_set);
}

TEST(Memory, WorkspaceIsWhatMemorySays) {
  for_each_kind([](DType dtype, Gradient gradient, const std::string& instruction_set) {
    const Attention attention(sized_problem(1000, 40, dtype, gradient),
                              {.threads = 3, .instruction_set = instruction_set});
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const std::vector<MemoryComponent> memory = attention.memory(pass);
      const std::int64_t workspace = bytes_of(memory, "delta") + bytes_of(memory, "tiles");
      EXPECT_EQ(static_cast<std::size_t>(workspace), attention.workspace_bytes(pass));
      std::int64_t tensors = 0;
      for (const char* name : {"q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"})
        tensors += bytes_of(memory, name);
      EXPECT_EQ(tensors + workspace, total_bytes(memory));
    }
  });
}

TEST(Memory, TensorsAreThoseOfTheProblem) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const Attention attention(sized_problem(1000, 40, dtype, Gradient::exact));
    const std::int64_t q = 2 * 1000 * 4 * 40 * size_of(dtype);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const auto memory = attention.memory(pass);
      for (const char* name : {"q", "out"}) EXPECT_EQ(bytes_of(memory, name), q);
      for (const char* name : {"k", "v"}) EXPECT_EQ(bytes_of(memory, name), q / 2);
      EXPECT_EQ(bytes_of(memory, "lse"), 2 * 1000 * 4 * 4);
      for (const char* name : {"dout", "dq"}) EXPECT_EQ(bytes_of(memory, name), pass == Pass::backward ? q : 0);
      for (const char* name : {"dk", "dv"}) EXPECT_EQ(bytes_of(memory, name), pass == Pass::backward ? q / 2 : 0);
    }
  }
}

TEST(Memory, TilesStayBelowFourMebibytesAThread) {
  for_each_kind([](DType dtype, Gradient gradient, const std::string& instruction_set) {
    for (const int threads : {1, 5})
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        std::int64_t most = 0, head_dim_of_most = 0;
        for (std::int64_t head_dim = 1; head_dim <= 512; ++head_dim) {
          const Options options{.threads = threads, .instruction_set = instruction_set};
          const Attention attention(sized_problem(1 << 20, head_dim, dtype, gradient), options);
          const std::int64_t bytes = bytes_of(attention.memory(pass), "tiles");
          if (bytes > most) most = bytes, head_dim_of_most = head_dim;
        }
        EXPECT_LE(most, threads * (std::int64_t{4} << 20))
            << "head size " << head_dim_of_most << ", " << name(dtype) << ", " << name(gradient) << ", "
            << instruction_set << ", " << (pass == Pass::forward ? "forward" : "backward") << ", threads " << threads;
      }
  });
}

TEST(Memory, OnlyDeltaGrowsWithTokens) {
  for_each_kind([](DType dtype, Gradient gradient, const std::string& instruction_set) {
    const Options options{.threads = 2, .instruction_set = instruction_set};
    const Attention few(sized_problem(1, 64, dtype, gradient), options);
    for (const std::int64_t tokens : {std::int64_t{1000}, std::int64_t{1} << 20, std::int64_t{1} << 40}) {
      const Attention many(sized_problem(tokens, 64, dtype, gradient), options);
      EXPECT_EQ(many.workspace_bytes(Pass::forward), few.workspace_bytes(Pass::forward));
      EXPECT_EQ(bytes_of(many.memory(Pass::forward), "delta"), 0);
      const auto backward = many.memory(Pass::backward);
      EXPECT_EQ(bytes_of(backward, "tiles"), bytes_of(few.memory(Pass::backward), "tiles"));
      // One number a row, or one a row and branch.
      const std::int64_t deltas = gradient == Gradient::detached ? 3 : 1;
      EXPECT_GE(bytes_of(backward, "delta"), deltas * 2 * 4 * tokens * 4);
      EXPECT_LT(bytes_of(backward, "delta"), deltas * 2 * 4 * tokens * 4 + Carver::kAlignment * deltas);
    }
  });
}

TEST(Memory, TotalBytesAddsUp) {
  EXPECT_EQ(total_bytes({}), 0);
  EXPECT_EQ(total_bytes({{"q", 3}, {"k", std::int64_t{1} << 40}, {"q", 4}}), (std::int64_t{1} << 40) + 7);
}

TEST(MemoryLedger, KeepsCurrentAndPeak) {
  MemoryLedger ledger;
  EXPECT_EQ(ledger.current_bytes(), 0);
  EXPECT_EQ(ledger.peak_bytes(), 0);
  EXPECT_TRUE(ledger.components().empty());
  ledger.allocate("q", 100);
  ledger.allocate("slot", 30);
  ledger.allocate("q", 5);
  EXPECT_EQ(ledger.current_bytes(), 135);
  ledger.release("q", 100);
  ledger.allocate("slot", 20);
  EXPECT_EQ(ledger.current_bytes(), 55);
  EXPECT_EQ(ledger.peak_bytes(), 135);
  EXPECT_EQ(ledger.components(), (std::vector<MemoryComponent>{{"q", 105}, {"slot", 50}}));
}

// Two things that never live at the same time share the peak.
TEST(MemoryLedger, ThePeakIsOfTheSum) {
  MemoryLedger ledger;
  ledger.allocate("forward", 100);
  ledger.release("forward", 100);
  ledger.allocate("backward", 120);
  ledger.release("backward", 120);
  EXPECT_EQ(ledger.current_bytes(), 0);
  EXPECT_EQ(ledger.peak_bytes(), 120);
  EXPECT_EQ(total_bytes(ledger.components()), 220);
}

TEST(MemoryLedger, TakesManyThreads) {
  MemoryLedger ledger;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&ledger, i] {
        for (int round = 0; round < 1000; ++round) {
          ledger.allocate("slot " + std::to_string(i % 2), 7);
          (void)ledger.peak_bytes();
          (void)ledger.components();
          ledger.release("slot " + std::to_string(i % 2), 7);
        }
      });
  }
  EXPECT_EQ(ledger.current_bytes(), 0);
  EXPECT_GE(ledger.peak_bytes(), 7);
  EXPECT_LE(ledger.peak_bytes(), 28);
}

}  // namespace
}  // namespace annulus
