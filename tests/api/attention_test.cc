// The product against the reference, by the rule of section 7: random problems of every kind, any memory layout, and
// what an Attention says of itself.
#include "annulus/attention.h"

#include <cmath>
#include <random>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "kernels/thread_pool.h"
#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/draw_case.h"
#include "support/refusal.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::Call;
using support::compute;
using support::draw_between;
using support::Layout;
using support::Way;
using support::Yardstick;

Problem small_problem() {
  Problem problem;
  problem.batch = 2;
  problem.tokens = 50;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 24;
  problem.pattern = make_pattern(Preset::longnet, {16, 40}, {1, 3}, 4);
  problem.causal = true;
  return resolve(problem);
}

TEST(Attention, DevicesThatThereAreNone) {
  support::expect_refused([] { Attention(small_problem(), {.device = "tpu"}); },
                          {"cpu, cuda or cuda:N", "'tpu'", "leave it out"});
  EXPECT_THROW(Attention(small_problem(), {.device = "cuda:4095"}), DeviceError);  // with a GPU or without
}

std::uint64_t draw_seed() { return static_cast<std::uint64_t>(draw_between(0, 1 << 20)); }

RC_GTEST_PROP(AttentionProperty, SmallProblemsMatchTheReference, ()) {
  const Problem problem = support::draw_problem(40, 20);
  const Inputs inputs = draw_inputs(problem, draw_seed());
  const std::string fault = Yardstick(problem, inputs).faults(inputs, support::draw_way());
  if (!fault.empty()) RC_FAIL(fault);
}

RC_GTEST_PROP(AttentionProperty, EveryInstructionSetMatchesTheReference, ()) {
  const Problem problem = support::draw_problem(60, 70);
  const Inputs inputs = draw_inputs(problem, draw_seed());
  const Yardstick yardstick(problem, inputs);
  for (const Way& way : support::each_instruction_set(support::draw_way())) {
    const std::string fault = yardstick.faults(inputs, way);
    if (!fault.empty()) RC_FAIL(fault);
  }
}

// Segments around the tiles' sizes, few heads, so that several tiles meet in one group.
RC_GTEST_PROP(AttentionProperty, LongerProblemsMatchTheReference, ()) {
  Problem problem = support::draw_problem(1, 1);
  problem.tokens = draw_between(200, 700);
  problem.heads = 2;
  problem.kv_heads = draw_between(1, 2);
  problem.batch = 1;
  problem.head_dim = *rc::gen::element<std::int64_t>(1, 8, 16, 17, 40, 64);
  problem.documents = support::draw_documents(problem.tokens);
  problem.pattern = support::draw_pattern(problem.tokens, problem.heads);
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, draw_seed());
  const std::string fault = Yardstick(problem, inputs).faults(inputs, support::draw_way());
  if (!fault.empty()) RC_FAIL(fault);
}

TEST(Attention, EveryPresetMatchesTheReference) {
  for (const Preset preset : {Preset::longnet, Preset::torchscale, Preset::residue, Preset::head_groups})
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      Problem problem = small_problem();
      problem.pattern = make_pattern(preset, {16, 40}, {1, 3}, 4);
      problem.pattern.pad_like_torchscale = preset == Preset::torchscale;
      problem.causal = preset == Preset::longnet;
      problem.dtype = dtype;
      problem = resolve(problem);
      const Inputs inputs = draw_inputs(problem, 1);
      const Yardstick yardstick(problem, inputs);
      for (const Way& way : support::each_instruction_set()) EXPECT_EQ(yardstick.faults(inputs, way), "");
    }
}

TEST(Attention, AnyMemoryLayoutGivesTheSameBits) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    Problem problem = small_problem();
    problem.dtype = dtype;
    const Inputs inputs = draw_inputs(problem, 2);
    const auto want = compute(problem, inputs).bits();
    for (const Layout in : {Layout::dense, Layout::apart, Layout::heads_major})
      for (const Layout out : {Layout::dense, Layout::apart, Layout::heads_major}) {
        const Call call = compute(problem, inputs, {.options = {}, .inputs = in, .outputs = out});
        EXPECT_EQ(call.fault(), "");
        EXPECT_TRUE(call.bits() == want) << static_cast<int>(in) << " " << static_cast<int>(out);
      }
  }
}

TEST(Attention, InputsMayBeBroadcastOverTheBatch) {
  const Problem problem = small_problem();
  Inputs inputs = draw_inputs(problem, 3);
  for (std::vector<double>* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) {
    const auto half = tensor->begin() + static_cast<std::ptrdiff_t>(tensor->size() / 2);
    std::copy(half, tensor->end(), tensor->begin());
  }
  const Call broadcast = compute(problem, inputs, {.options = {}, .inputs = Layout::broadcast});
  EXPECT_EQ(broadcast.fault(), "");
  EXPECT_TRUE(broadcast.bits() == compute(problem, inputs).bits());
}

// Packed projections: q, k, v in one buffer [batch, tokens, heads + 2 kv_heads, head_dim]; out, dq, dk, dv in others
// like it.
TEST(Attention, PackedBuffersAreFine) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 4);
  Call separate = compute(problem, inputs);
  const std::int64_t all_heads = problem.heads + 2 * problem.kv_heads, row = all_heads * problem.head_dim;
  const auto count = static_cast<std::size_t>(problem.batch * problem.tokens * row);
  std::vector<float> packed(count), gradients(count, NAN);
  const auto view = [&](std::vector<float>& buffer, std::int64_t first_head, std::int64_t heads) {
    return TensorView(buffer.data() + first_head * problem.head_dim, problem.dtype,
                      {problem.batch, problem.tokens, heads, problem.head_dim},
                      {problem.tokens * row, row, problem.head_dim, 1});
  };
  const auto copy = [&](const std::vector<double>& from, std::int64_t first_head, std::int64_t heads) {
    std::size_t i = 0;
    for (std::int64_t t = 0; t < problem.batch * problem.tokens; ++t)
      for (std::int64_t e = 0; e < heads * problem.head_dim; ++e)
        packed[static_cast<std::size_t>(t * row + first_head * problem.head_dim + e)] = static_cast<float>(from[i++]);
  };
  const std::int64_t k_head = problem.heads, v_head = problem.heads + problem.kv_heads;
  copy(inputs.q, 0, problem.heads);
  copy(inputs.k, k_head, problem.kv_heads);
  copy(inputs.v, v_head, problem.kv_heads);
  BackwardArgs args = separate.backward_args();
  args.q = view(packed, 0, problem.heads);
  args.k = view(packed, k_head, problem.kv_heads);
  args.v = view(packed, v_head, problem.kv_heads);
  args.dq = view(gradients, 0, problem.heads);
  args.dk = view(gradients, k_head, problem.kv_heads);
  args.dv = view(gradients, v_head, problem.kv_heads);
  Attention(problem).backward(args);
  const auto expect_same = [&](const std::vector<double>& want, std::int64_t first_head, std::int64_t heads) {
    std::size_t i = 0;
    for (std::int64_t t = 0; t < problem.batch * problem.tokens; ++t)
      for (std::int64_t e = 0; e < heads * problem.head_dim; ++e)
        ASSERT_EQ(static_cast<double>(gradients[static_cast<std::size_t>(t * row + first_head * problem.head_dim + e)]),
                  want[i++]);
  };
  expect_same(separate.dq.read(), 0, problem.heads);
  expect_same(separate.dk.read(), k_head, problem.kv_heads);
  expect_same(separate.dv.read(), v_head, problem.kv_heads);
}

TEST(Attention, LseIsOptional) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 5);
  const Attention attention(problem);
  Call with(problem, inputs), without(problem, inputs);
  with.forward(attention);
  ForwardArgs args = without.forward_args();
  args.lse = {};
  attention.forward(args);
  EXPECT_EQ(without.out.faults("out"), "");
  EXPECT_TRUE(with.out.bits() == without.out.bits());
  EXPECT_TRUE(without.lse.untouched());
}

// f(x) = sum(out * dout) moves by <gradient, step>: fp32 noise bounds how small the step may be, hence the tolerance.
TEST(Attention, GradientsAreDirectionalDerivatives) {
  for (const bool causal : {false, true}) {
    Problem problem = small_problem();
    problem.causal = causal;
    const Inputs inputs = draw_inputs(problem, 6);
    const reference::Result gradient = compute(problem, inputs).result();
    const Inputs direction = draw_inputs(problem, 7, false);
    const auto value_at = [&](double step) {
      Inputs moved = inputs;
      for (const auto member : {&Inputs::q, &Inputs::k, &Inputs::v})
        for (std::size_t i = 0; i < (moved.*member).size(); ++i) (moved.*member)[i] += step * (direction.*member)[i];
      const std::vector<double> out = compute(problem, moved).out.read();
      double sum = 0;
      for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * inputs.dout[i];
      return sum;
    };
    double slope = 0, size = 0;
    const auto add = [&](const std::vector<double>& g, const std::vector<double>& d) {
      for (std::size_t i = 0; i < g.size(); ++i) slope += g[i] * d[i], size += g[i] * g[i];
    };
    add(gradient.dq, direction.q);
    add(gradient.dk, direction.k);
    add(gradient.dv, direction.v);
    constexpr double kStep = 1e-3;
    EXPECT_NEAR((value_at(kStep) - value_at(-kStep)) / (2 * kStep), slope, 2e-3 * std::sqrt(size));
  }
}

TEST(Attention, SaysWhatItIs) {
  Problem problem = small_problem();
  problem.scale.reset();
  const Attention attention(problem);
  EXPECT_EQ(attention.problem(), resolve(problem));
  EXPECT_EQ(attention.threads(), usable_cores());
  EXPECT_EQ(attention.instruction_set(), instruction_sets().front());
  EXPECT_NE(attention.explain().find("50 tokens"), std::string::npos);
  EXPECT_FALSE(version().empty());
  for (const std::string& instruction_set : instruction_sets()) {
    const Attention forced(problem, {.threads = 3, .instruction_set = instruction_set});
    EXPECT_EQ(forced.instruction_set(), instruction_set);
    EXPECT_EQ(forced.threads(), 3);
  }
  EXPECT_EQ(Attention(problem, {.threads = 1, .instruction_set = "auto"}).instruction_set(),
            instruction_sets().front());
}

TEST(Attention, MovesAndStillWorks) {
  const Problem problem = small_problem();
  const Inputs inputs = draw_inputs(problem, 8);
  Attention first(problem);
  Attention second(std::move(first));
  Attention third(small_problem());
  third = std::move(second);
  Call call(problem, inputs);
  call.forward(third);
  call.backward(third);
  EXPECT_TRUE(call.bits() == compute(problem, inputs).bits());
}

TEST(Attention, RefusesWhatTheCpuCannotDo) {
  Problem problem = small_problem();
  support::expect_refused([&] { Attention(problem, {.threads = 1, .instruction_set = "mmx"}); },
                          {"instruction set", "'mmx'", instruction_sets().front(), instruction_sets().back(), "auto"});
  for (const int threads : {-1, 1 << 30})
    support::expect_refused([&] { Attention(problem, {.threads = threads, .instruction_set = ""}); },
                            {"threads", "got " + std::to_string(threads), "0 takes all cores"});
  problem.head_dim = 513;
  support::expect_refused_as<Unsupported>([&] { Attention{problem}; },
                                          {"head sizes from 1 to 512", "got 513", "split"});
  problem.head_dim = 512;
  EXPECT_NO_THROW(Attention{problem});
  problem.heads = 3;
  support::expect_refused([&] { Attention{problem}; }, {"multiple of kv_heads", "3 heads"});
}

}  // namespace
}  // namespace annulus
