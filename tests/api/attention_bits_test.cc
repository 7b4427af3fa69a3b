// Section 7: the same bits run after run, for every number of threads, with the caller's workspace or without, alone or
// beside other calls.
#include <cmath>
#include <thread>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "annulus/attention.h"
#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/draw_case.h"
#include "support/test_scale.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::Call;
using support::compute;
using support::draw_between;
using support::Way;

// "" or the first way that gives other bits than one thread does.
std::string differences(const Problem& problem, const Inputs& inputs, const std::string& instruction_set) {
  Way way;
  way.options = {.threads = 1, .instruction_set = instruction_set};
  const std::vector<std::uint32_t> want = compute(problem, inputs, way).bits();
  for (const int threads : {1, 2, 3, 7}) {
    way.options.threads = threads;
    way.brings_workspace = threads != 1;
    if (compute(problem, inputs, way).bits() != want)
      return support::describe(way) + " differs: " + support::describe(problem);
  }
  return "";
}

RC_GTEST_PROP(AttentionBitsProperty, DoNotDependOnThreads, ()) {
  const Problem problem = support::draw_problem(60, 20);
  const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  const std::string fault = differences(problem, inputs, *rc::gen::elementOf(instruction_sets()));
  if (!fault.empty()) RC_FAIL(fault);
}

// Long enough that the number of threads changes how rows are dealt out, and that a group has several stretches of
// keys.
constexpr std::int64_t kLong = 2100;

Problem long_problem(DType dtype, bool causal) {
  Problem problem;
  problem.tokens = kLong;
  problem.heads = 2;
  problem.kv_heads = 1;
  problem.head_dim = 8;
  problem.dtype = dtype;
  problem.causal = causal;
  problem.documents = {0, 37, kLong};
  problem.pattern = make_pattern(Preset::longnet, {300, 5000}, {2, 1}, 2);
  return resolve(problem);
}

// f(problem, instruction set, number) for every type and instruction set of this machine.
template <class F>
void for_each_case(F f) {
  std::int64_t number = 0;
  for (const bool causal : {true, false})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const std::string& instruction_set : instruction_sets()) {
        const std::int64_t n = number++;
        if (support::is_taken(n)) f(long_problem(dtype, causal), instruction_set, n);
      }
}

TEST(AttentionBits, DoNotDependOnThreadsInLongSequences) {
  for_each_case([](Problem problem, const std::string& instruction_set, std::int64_t number) {
    problem.pattern.gradient = number % 2 == 0 ? Gradient::exact : Gradient::detached;
    EXPECT_EQ(differences(problem, draw_inputs(problem, 11), instruction_set), "");
  });
}

// Weights of 0, values of 0 and of -0, maxima that jump: whatever the dealing of rows could change in the signs of
// zeros.
TEST(AttentionBits, DoNotDependOnThreadsWhereResultsVanish) {
  for_each_case([](Problem problem, const std::string& instruction_set, std::int64_t number) {
    problem.pattern = make_pattern(Preset::longnet, {5000}, {1}, 2);
    problem.heads = problem.kv_heads = 1;
    problem.head_dim = 4;
    problem.scale = 1.0;
    problem = resolve(problem);
    Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(number));
    for (double& x : inputs.q) x = round_to(problem.dtype, x * 100);
    for (double& x : inputs.k) x = round_to(problem.dtype, x * 10);
    for (std::vector<double>* tensor : {&inputs.v, &inputs.dout})
      for (double& x : *tensor) x = x > 1 ? 1 : x < -1 ? -1 : x < 0 ? -0.0 : 0.0;
    EXPECT_EQ(differences(problem, inputs, instruction_set), "");
  });
}

// A NaN makes tiles take another path; rows that never see it must not notice who computes them.
TEST(AttentionBits, DoNotDependOnThreadsBesideANaN) {
  for_each_case([](const Problem& problem, const std::string& instruction_set, std::int64_t number) {
    Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(number));
    std::vector<double>* tensors[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.dout};
    const std::int64_t tensor = (number + number / 4) % 4;  // an instruction set meets all of them, type by type
    std::vector<double>& spoiled = *tensors[tensor];
    for (const double part : {0.1, 0.45, 0.8})
      spoiled[static_cast<std::size_t>(part * static_cast<double>(spoiled.size()))] = NAN;
    EXPECT_EQ(differences(problem, inputs, instruction_set), "") << "tensor " << tensor;
  });
}

TEST(AttentionBits, ConcurrentCallsDoNotDisturbOneAnother) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    Problem problem;
    problem.tokens = 600;
    problem.heads = 2;
    problem.head_dim = 16;
    problem.dtype = dtype;
    problem.causal = true;
    problem.pattern = make_pattern(Preset::torchscale, {64, 600}, {1, 2}, 2);
    problem = resolve(problem);
    const Attention attention(problem, {.threads = 3, .instruction_set = ""});
    constexpr std::size_t kCallers = 4;
    std::vector<Inputs> inputs;
    std::vector<std::vector<std::uint32_t>> want, got(kCallers);
    for (std::size_t i = 0; i < kCallers; ++i) {
      inputs.push_back(draw_inputs(problem, i));
      want.push_back(compute(problem, inputs.back()).bits());
    }
    {
      std::vector<std::jthread> callers;
      for (std::size_t i = 0; i < kCallers; ++i)
        callers.emplace_back([&, i] {
          for (int round = 0; round < 3; ++round) {
            Way way;
            way.brings_workspace = i % 2 == 0;
            Call call(problem, inputs[i], way);
            call.forward(attention);
            call.backward(attention);
            got[i] = call.bits();
          }
        });
    }
    for (std::size_t i = 0; i < kCallers; ++i) EXPECT_TRUE(got[i] == want[i]) << "caller " << i;
  }
}

TEST(AttentionBits, AUsedWorkspaceIsAsGoodAsANewOne) {
  Problem problem;
  problem.tokens = 300;
  problem.heads = 3;
  problem.head_dim = 40;
  problem.pattern = make_pattern(Preset::torchscale, {100, 300}, {1, 2}, 3);
  const Attention attention(problem);
  const Inputs inputs = draw_inputs(attention.problem(), 12);
  support::Workspace workspace(
      std::max(attention.workspace_bytes(Pass::forward), attention.workspace_bytes(Pass::backward)));
  std::vector<std::uint32_t> first;
  for (int round = 0; round < 3; ++round) {
    Call call(attention.problem(), inputs);
    ForwardArgs forward = call.forward_args();
    forward.workspace = workspace.span();
    attention.forward(forward);
    BackwardArgs backward = call.backward_args();
    backward.workspace = workspace.span();
    attention.backward(backward);
    if (round == 0) first = call.bits();
    EXPECT_TRUE(call.bits() == first);
  }
  EXPECT_TRUE(workspace.guards_intact());
}

}  // namespace
}  // namespace annulus
