// Under mpirun: problems of every kind, one after the other, on all processes; rank 0 holds the whole against the fp64
// reference.
//
//   mpirun -n 3 mpi_rank_attention [CASES]
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>

#include "annulus/mpi.h"
#include "plan/reshard.h"
#include "reference/draw_inputs.h"
#include "support/rank_call.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using support::ShardResult;

struct Case {
  Problem problem;
  Sharding sharding;
  RankOptions options;
};

Case draw_case(std::uint64_t seed, int ranks) {
  std::mt19937_64 random(seed);
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  Case drawn;
  Problem& problem = drawn.problem;
  problem.batch = between(1, 2);
  problem.tokens = between(1, 150);
  problem.kv_heads = between(1, 3);
  problem.heads = problem.kv_heads * between(1, 2);
  problem.head_dim = between(1, 24);
  problem.dtype = std::array{DType::fp32, DType::bf16, DType::fp16}[random() % 3];
  problem.causal = random() % 2 == 0;
  if (random() % 2 == 0) problem.documents = {0, problem.tokens / 3, problem.tokens};
  std::vector<std::int64_t> segments, dilations;
  for (std::int64_t i = between(1, 3); i > 0; --i) {
    segments.push_back(between(1, problem.tokens + 3));
    dilations.push_back(between(1, 6));
  }
  problem.pattern = make_pattern(Preset::longnet, segments, dilations, problem.heads);
  problem.pattern.phase = std::array{Phase::by_head, Phase::by_head_block, Phase::every}[random() % 3];
  problem.pattern.gradient = random() % 4 == 0 ? Gradient::detached : Gradient::exact;
  problem = resolve(problem);
  drawn.sharding = {.ranks = ranks,
                    .layout = std::array{Layout::contiguous, Layout::zigzag, Layout::striped}[random() % 3]};
  drawn.options.strategy = std::array{Strategy::automatic, Strategy::exchange, Strategy::reshard, Strategy::ring,
                                      Strategy::gather}[random() % 5];
  if (drawn.options.strategy == Strategy::reshard && !can_reshard(problem, drawn.sharding))
    drawn.options.strategy = Strategy::exchange;
  drawn.options.slot_bytes = std::array<std::int64_t, 3>{1000, 20'000, 1 << 20}[random() % 3];
  drawn.options.reproducible = random() % 5 == 0;
  return drawn;
}

std::string to_text(const reference::Result& result) {
  std::string text;
  for (const auto* tensor : {&result.out, &result.lse, &result.dq, &result.dk, &result.dv})
    text.append(reinterpret_cast<const char*>(tensor->data()), tensor->size() * sizeof(double));
  return text;
}

reference::Result from_text(const std::string& text, const Problem& problem, std::int64_t rows) {
  const std::size_t q = static_cast<std::size_t>(problem.batch * rows * problem.heads * problem.head_dim);
  const std::size_t k = static_cast<std::size_t>(problem.batch * rows * problem.kv_heads * problem.head_dim);
  const std::size_t lse = static_cast<std::size_t>(problem.batch * rows * problem.heads);
  const char* data = text.data();
  const auto take = [&](std::size_t count) {
    std::vector<double> values(count);
    std::memcpy(values.data(), data, count * sizeof(double));
    data += count * sizeof(double);
    return values;
  };
  reference::Result result;
  result.out = take(q);
  result.lse = take(lse);
  result.dq = take(q);
  result.dk = take(k);
  result.dv = take(k);
  return result;
}

// "" or what is wrong, on every rank.
std::string run_case(MpiProcess& process, std::uint64_t seed) {
  const Case drawn = draw_case(seed, process.size());
  const Problem& problem = drawn.problem;
  const Sharding sharding = resolve(drawn.sharding, problem.tokens);
  const reference::Inputs inputs = reference::draw_inputs(problem, seed);
  const auto transport = process.make_transport();
  support::Way way;
  way.options.threads = 1;
  const ShardResult shard = compute_shard(problem, inputs, sharding, *transport, drawn.options, way);
  std::string fault = shard.fault;
  if (!(shard.planned == shard.counted)) fault += "other bytes than planned; ";
  std::vector<reference::Result> parts;
  const std::vector<std::string> texts = transport->all_gather(to_text(shard.result));
  for (int rank = 0; rank < sharding.ranks; ++rank)
    parts.push_back(from_text(texts[static_cast<std::size_t>(rank)], problem,
                              count_rows(pieces_of(sharding, problem.tokens, rank))));
  if (process.rank() == 0)
    fault += support::Yardstick(problem, inputs).faults(support::assemble(problem, sharding, parts));
  if (fault.empty()) return "";
  return fault + " in case " + std::to_string(seed) + ": " + support::describe(problem) + ", " +
         std::string(name(sharding.layout)) + ", " + std::string(name(drawn.options.strategy));
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  annulus::MpiProcess process(&argc, &argv);
  const std::uint64_t cases = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 60;
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    const std::string fault = annulus::run_case(process, seed);
    if (fault.empty()) continue;
    ++wrong;
    std::cerr << "rank " + std::to_string(process.rank()) + ": " + fault + "\n";
  }
  if (process.rank() == 0)
    std::cout << cases << " cases on " << process.size() << " processes, " << wrong << " wrong\n";
  return wrong == 0 ? 0 : 1;
}
