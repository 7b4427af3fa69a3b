// Section 7: the same bits run after run, for every number of threads, with the caller's workspace or without, alone or beside other calls.
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
    if (compute(problem, inputs, way).bits() != want) return support::describe(way) + " differs: " + support::describe(problem);
  }
  return "";
}

RC_GTEST_PROP(AttentionBitsProperty, DoNotDependOnThreads, ()) {
  const Problem problem = support::draw_problem(60, 20);
  const Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  const std::string fault = differences(problem, inputs, *rc::gen::elementOf(instruction_sets()));
  if (!fault.empty()) RC_FAIL(fault);
}

// Long enough that the number of threads changes how the rows are dealt out, with several stretches of keys a group.
TEST(AttentionBits, DoNotDependOnThreadsInLongSequences) {
  std::int64_t number = 0;
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const bool causal : {false, true})
      for (const Gradient gradient : {Gradient::exact, Gradient::detached})
        for (const std::string& instruction_set : instruction_sets()) {
          if (!support::is_taken(number++)) continue;
          Problem problem;
          problem.tokens = 2700;
          problem.heads = 2;
          problem.kv_heads = 1;
          problem.head_dim = 20;
          problem.dtype = dtype;
          problem.causal = causal;
          problem.pattern = make_pattern(Preset::longnet, {300, 5000}, {1, 2}, 2);
          problem.pattern.gradient = gradient;
          problem.documents = {0, 100, 2700};
          problem = resolve(problem);
          EXPECT_EQ(differences(problem, draw_inputs(problem, 11), instruction_set), "");
        }
}

// Weights of 0, values of 0 and of -0, maxima that jump: whatever a thread count could change in the signs of zeros.
RC_GTEST_PROP(AttentionBitsProperty, DoNotDependOnThreadsWhereResultsVanish, ()) {
  Problem problem = support::draw_problem(3, 5);
  problem.tokens = draw_between(500, 900);
  problem.heads = problem.kv_heads = problem.batch = 1;
  problem.causal = true;
  problem.documents = {};
  problem.scale = 1.0;
  problem.pattern = make_pattern(Preset::longnet, {2000}, {1}, 1);
  problem = resolve(problem);
  Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  for (double& x : inputs.q) x = round_to(problem.dtype, x * 100);
  for (double& x : inputs.k) x = round_to(problem.dtype, x * 10);
  for (double& x : inputs.v) x = x > 1 ? 1 : x < -1 ? -1 : x < 0 ? -0.0 : 0.0;
  const std::string fault = differences(problem, inputs, *rc::gen::elementOf(instruction_sets()));
  if (!fault.empty()) RC_FAIL(fault);
}

// A NaN makes tiles take another path; rows that never see it must not notice who computes them.
RC_GTEST_PROP(AttentionBitsProperty, DoNotDependOnThreadsBesideANaN, ()) {
  Problem problem = support::draw_problem(3, 20);
  problem.tokens = draw_between(300, 700);
  problem.heads = problem.kv_heads = problem.batch = 1;
  problem.causal = true;
  problem.documents = {};
  problem.pattern = make_pattern(Preset::longnet, {2000}, {1}, 1);
  problem = resolve(problem);
  Inputs inputs = draw_inputs(problem, static_cast<std::uint64_t>(draw_between(0, 1000)));
  std::vector<double>* tensors[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.dout};
  std::vector<double>& spoiled = *tensors[draw_between(0, 3)];
  spoiled[static_cast<std::size_t>(draw_between(0, static_cast<std::int64_t>(spoiled.size()) - 1))] = NAN;
  const std::string fault = differences(problem, inputs, *rc::gen::elementOf(instruction_sets()));
  if (!fault.empty()) RC_FAIL(fault);
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
  support::Workspace workspace(std::max(attention.workspace_bytes(Pass::forward), attention.workspace_bytes(Pass::backward)));
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
