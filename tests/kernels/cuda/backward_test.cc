// Backward on the GPU against the fp64 reference, by the rule of section 7: every kernel, every type, every edge.
#include "kernels/cuda/backward.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>

#include "reference/draw_inputs.h"
#include "support/device_gradient.h"
#include "support/device_problems.h"
#include "support/draw_case.h"
#include "support/refusal.h"
#include "support/test_scale.h"
#include "support/yardstick.h"

namespace annulus {
namespace {

using reference::draw_inputs;
using reference::Inputs;
using support::Branches;
using support::Call;
using support::GradientWay;
using support::Layout;
using support::make_problem;
using support::Yardstick;

class CudaBackward : public support::OnDevice {};

// Forward and backward; the call has all results. "" or what was wrong with memory.
std::string compute(Call& call, const GradientWay& way) {
  support::DeviceWay forward;
  forward.layout = way.layout;
  forward.aligned = way.aligned;
  const std::string fault = support::run_on_device(call, forward);
  return fault.empty() ? support::run_backward_on_device(call, way) : fault;
}

std::string faults(const Problem& problem, const Inputs& inputs, const Yardstick& yardstick, const GradientWay& way) {
  Call call(problem, inputs, {.options = {}, .inputs = way.layout, .outputs = way.layout});
  std::string fault = compute(call, way);
  fault += yardstick.faults(call.result());
  return fault.empty() ? "" : fault + " in " + support::describe(problem) + " by " + describe(way) + "\n";
}

// On every kernel that takes the problem; on Hopper deterministic or not, and with regions that wait for each other.
std::string faults(const Problem& problem, std::uint64_t seed, GradientWay way = {}) {
  const Inputs inputs = draw_inputs(problem, seed);
  const Yardstick yardstick(problem, inputs);
  std::string text;
  const auto try_way = [&] {
    try {
      text += faults(problem, inputs, yardstick, way);
    } catch (const Unsupported&) {  // another one takes it
    }
  };
  for (const cuda::KernelChoice& kernel : cuda::kBackwardKernels) {
    way.kernel = kernel.name;
    try_way();
    if (way.kernel != "sm90") continue;  // the same bits in any case, and no sums
    way.deterministic = true;
    try_way();
    way.deterministic = false;
    way.tiles_ahead = 1;
    try_way();
    way.tiles_ahead = -1;
  }
  return text;
}

// Small enough for compute-sanitizer: every kernel, with one sweep and with two, all that a tile can have.
TEST_F(CudaBackward, SmallProblems) {
  std::int64_t number = 0;
  for (const bool causal : {false, true})
    for (const std::int64_t head_dim : {64, 128, 24})
      for (const DType dtype : {DType::bf16, DType::fp32}) {
        if (!support::is_taken(number++)) continue;
        for (const std::vector<std::vector<int>>& sweeps : {std::vector<std::vector<int>>{{0, 1}}, {{1}, {0}}}) {
          Problem problem = make_problem(270, 4, head_dim, dtype, causal, {{70, 140}, {2, 4}});
          problem.kv_heads = causal ? 2 : 4;
          problem.documents = {0, 31, 270};
          problem.pattern.gradient = head_dim == 64 ? Gradient::detached : Gradient::exact;
          GradientWay way;
          way.sweeps = sweeps;
          EXPECT_EQ(faults(resolve(problem), 3, way), "");
        }
      }
  for (const bool causal : {false, true})
    for (const std::int64_t head_dim : {64, 128})
      EXPECT_EQ(faults(make_problem(270, 2, head_dim, DType::bf16, causal, {{140}, {3}}), 3), "");
}

TEST_F(CudaBackward, TileEdges) {
  constexpr std::int64_t kLengths[] = {1,   2,   15,  16,  17,  31,  32,  33,  63,  64, 65,
                                       127, 128, 129, 191, 192, 193, 255, 256, 257, 321};
  std::int64_t number = 0;
  for (const std::int64_t length : kLengths)
    for (const std::int64_t head_dim : {64, 128})
      for (const bool causal : {false, true}) {
        if (!support::is_taken(number++)) continue;
        const DType dtype = number % 3 == 0 ? DType::fp16 : DType::bf16;
        const Problem problem = make_problem(2 * length + 3, 2, head_dim, dtype, causal, {{length}, {1}});
        EXPECT_EQ(faults(problem, static_cast<std::uint64_t>(number)), "");
      }
}

TEST_F(CudaBackward, EveryHeadSize) {
  std::int64_t number = 0;
  for (const std::int64_t head_dim : {1, 3, 8, 16, 24, 32, 40, 64, 72, 96, 100, 128, 160, 192, 200, 256, 264, 512})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
      if (!support::is_taken(number++)) continue;
      EXPECT_EQ(faults(make_problem(211, 2, head_dim, dtype, head_dim % 16 == 0, {{100, 150}, {1, 3}}), 7), "");
    }
}

TEST_F(CudaBackward, NestedAndCrookedPatterns) {
  int number = 0;
  for (const Branches& pattern : support::kNestedAndCrooked)
    for (const bool causal : {false, true})
      for (const std::int64_t head_dim : {64, 128})
        for (const Phase phase : {Phase::by_head, Phase::by_head_block, Phase::every}) {
          if (!support::is_taken(number++)) continue;
          Problem problem = make_problem(701, 5, head_dim, DType::bf16, causal, pattern, phase);
          if (number % 3 == 0) problem.pattern.gradient = Gradient::detached;
          EXPECT_EQ(faults(problem, 11), "");
        }
}

TEST_F(CudaBackward, SweepsGiveTheSameAsOne) {
  const Branches pattern{{128, 256, 512}, {1, 2, 4}};
  const std::vector<std::vector<std::vector<int>>> ways = {
      {{0}, {1}, {2}}, {{2}, {1}, {0}}, {{0, 1, 2}}, {{2, 1}, {0}}, {{2}, {1, 0}}};
  std::int64_t number = 0;
  for (const auto& sweeps : ways)
    for (const std::int64_t head_dim : {64, 128})
      for (const bool causal : {false, true}) {
        if (!support::is_taken(number++)) continue;
        Problem problem = make_problem(1100, 2, head_dim, DType::bf16, causal, pattern);
        problem.batch = 2;
        GradientWay way;
        way.sweeps = sweeps;
        EXPECT_EQ(faults(resolve(problem), 13, way), "");
      }
}

// A sweep between others whose tiles meet nothing: what a row has so far is nothing, and is handed on at once.
TEST_F(CudaBackward, ASweepThatMeetsNothing) {
  for (const bool causal : {false, true}) {
    Problem problem = make_problem(200, 2, causal ? 64 : 24, DType::bf16, causal, {{32, 64, 128}, {1, 2, 4}});
    problem.pattern.branches[1].head_count = 1;  // head 1 is in the others alone
    GradientWay way;
    way.sweeps = {{2}, {1}, {0}};
    EXPECT_EQ(faults(resolve(problem), 13, way), "");
  }
}

TEST_F(CudaBackward, DocumentsGroupsAndPadding) {
  std::int64_t number = 0;
  const auto expect_right = [&](const Problem& problem, std::uint64_t seed) {
    if (!support::is_taken(number++)) return;
    EXPECT_EQ(faults(resolve(problem), seed), "");
  };
  for (const bool causal : {false, true})
    for (const std::int64_t head_dim : {64, 128}) {
      Problem problem = make_problem(900, 8, head_dim, DType::bf16, causal, {{128, 256}, {1, 4}});
      problem.kv_heads = 2;
      problem.batch = 2;
      problem.documents = {0, 1, 1, 130, 387, 700, 900};
      expect_right(problem, 17);
      problem.pattern = make_pattern(Preset::torchscale, {200, 300}, {1, 3}, 8);
      problem.pattern.pad_like_torchscale = true;
      expect_right(problem, 18);
      problem.pattern = make_pattern(Preset::head_groups, {100, 250, 300}, {1, 3, 4}, 8);
      expect_right(problem, 19);
      problem.kv_heads = 8;
      expect_right(problem, 20);
    }
}

// The Hopper kernel divides LSE by the scale, and leaves scales near the end of fp32's range to others.
TEST_F(CudaBackward, AnyScaleAndSteepLogits) {
  std::int64_t number = 0;
  for (const double scale : {0.3, -0.4, 0.0, 8.0, 1e-3, 2e-30, 1e-33})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
      if (!support::is_taken(number++)) continue;
      Problem problem = make_problem(500, 2, 64, dtype, true, {{200}, {1}});
      problem.scale = scale;
      EXPECT_EQ(faults(resolve(problem), 23), "");
    }
}

// Tensor cores cut sums instead of rounding them; over thousands of keys that would show in fp32.
TEST_F(CudaBackward, LongSumsInEveryType) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t head_dim : {64, 128})
      EXPECT_EQ(faults(make_problem(2500, 1, head_dim, dtype, head_dim == 64, {{2500}, {1}}), 47), "");
}

TEST_F(CudaBackward, AnyMemoryLayout) {
  std::int64_t number = 0;
  for (const Layout layout : {Layout::dense, Layout::apart, Layout::heads_major})
    for (const bool aligned : {true, false})
      for (const DType dtype : {DType::bf16, DType::fp32}) {
        if (!support::is_taken(number++)) continue;
        Problem problem = make_problem(333, 4, 64, dtype, true, {{100, 200}, {1, 2}});
        problem.batch = 2;
        problem = resolve(problem);
        const Inputs inputs = draw_inputs(problem, 29);
        const Yardstick yardstick(problem, inputs);
        GradientWay way;
        way.layout = layout;
        way.aligned = aligned;
        EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
        way.kernel = "rows";
        EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
      }
}

// A bad row of Q, K, V or dO reaches the rows that see it and no others: the reference says which.
TEST_F(CudaBackward, NonFiniteNumbersStayWhereTheyBelong) {
  int number = 0;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)})
    for (const bool causal : {false, true})
      for (const std::int64_t head_dim : {64, 128, 40})
        for (const auto member : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
          if (!support::is_taken(number++)) continue;
          Problem problem = make_problem(700, 2, head_dim, DType::bf16, causal, {{100, 300}, {1, 3}});
          problem.pattern.gradient = number % 2 == 0 ? Gradient::detached : Gradient::exact;
          Inputs inputs = draw_inputs(problem, 31);
          (inputs.*member)[reference::element(problem, 2, 0, 350, 1) + 3] = bad;
          const Yardstick yardstick(problem, inputs);
          for (const char* kernel : {"auto", "mma", "rows"}) {
            GradientWay way;
            way.kernel = kernel;
            EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
          }
        }
}

// Of the largest number that is expected.
double largest_difference(const std::vector<double>& found, const std::vector<double>& expected) {
  double largest = 0, off = 0;
  for (std::size_t e = 0; e < expected.size(); ++e) {
    largest = std::max(largest, std::abs(expected[e]));
    off = std::max(off, std::abs(found[e] - expected[e]));
  }
  return off / largest;
}

// dk and dv always, dq too where that is asked for; and dq is then what it is else, but for the order of sums.
void repeats_bit_for_bit(Problem problem, std::int64_t kv_heads) {
  problem.kv_heads = kv_heads;
  problem = resolve(problem);
  const Inputs inputs = draw_inputs(problem, 37);
  std::vector<double> dq;
  for (const bool deterministic : {false, true}) {
    std::vector<std::vector<std::uint32_t>> first;
    for (int i = 0; i < 4; ++i) {
      Call call(problem, inputs);
      GradientWay way;
      way.deterministic = deterministic;
      ASSERT_EQ(compute(call, way), "");
      const std::vector<std::vector<std::uint32_t>> bits{call.dk.bits(), call.dv.bits(),
                                                         deterministic ? call.dq.bits() : call.dk.bits()};
      EXPECT_TRUE(i == 0 || bits == first) << "deterministic " << deterministic << " in " << support::describe(problem);
      if (i > 0) continue;
      first = bits;
      const std::vector<double> now = call.dq.read();
      if (!deterministic) dq = now;
      EXPECT_LT(largest_difference(now, dq), 0.01) << support::describe(problem);
    }
  }
}

TEST_F(CudaBackward, RepeatsBitForBit) {
  for (const bool causal : {false, true})
    for (const std::int64_t head_dim : {64, 128}) {
      repeats_bit_for_bit(make_problem(1500, 3, head_dim, DType::bf16, causal, {{256, 512, 1024}, {1, 2, 8}}), 3);
      // One branch, where many tiles wait for each other,
      repeats_bit_for_bit(make_problem(5003, 4, head_dim, DType::fp16, causal, {{4096}, {3}}, Phase::every), 4);
      // and more of them than there are multiprocessors.
      if (causal == (head_dim == 128))
        repeats_bit_for_bit(make_problem(20'011, 2, head_dim, DType::bf16, causal, {{20'011}, {1}}), 1);
      // Of many groups: tiles come from the last one on, but for those at the end.
      if (causal) repeats_bit_for_bit(make_problem(15'003, 16, head_dim, DType::bf16, true, {{2048}, {1}}), 16);
    }
}

// Several tiles for each multiprocessor, of one block or two: warps of a block are in different tiles all the time.
TEST_F(CudaBackward, ManyShortTiles) {
  std::int64_t number = 0;
  for (const std::int64_t head_dim : {64, 128})
    for (const bool causal : {false, true})
      for (const std::int64_t dilation : {1, 3}) {
        if (!support::is_taken(number++)) continue;
        Problem problem = make_problem(4501, 8, head_dim, DType::bf16, causal, {{150 * dilation}, {dilation}},
                                       causal ? Phase::every : Phase::by_head);
        problem.kv_heads = dilation == 1 ? 8 : 4;
        problem = resolve(problem);
        const Inputs inputs = draw_inputs(problem, 61);
        const Yardstick yardstick(problem, inputs);
        GradientWay way;
        EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
        way.tiles_ahead = 1;
        EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
        way.tiles_ahead = -1;
        way.deterministic = true;
        EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
      }
}

// Slots for the sums of dq and regions that have them, as the plan says.
std::pair<int, int> slots_and_regions(const Problem& problem, std::int64_t tiles_ahead) {
  const cuda::Backward backward(problem, make_plan(problem),
                                {.kernel = "sm90", .deterministic = false, .sweeps = {}, .tiles_ahead = tiles_ahead});
  const std::string text = backward.explain();
  std::pair<int, int> counts;
  const std::size_t at = text.find("dq in fp32: ");
  if (at == std::string::npos ||
      std::sscanf(text.c_str() + at, "dq in fp32: %d slots for %d", &counts.first, &counts.second) != 2)
    throw std::runtime_error("no slots in\n" + text);
  return counts;
}

// Many regions in few slots: dq is what it is with a slot for each, but for the order of its sums, and not a row is
// left out or taken twice.
TEST_F(CudaBackward, ManyRegionsInFewSlots) {
  if (cuda::device_info().compute_capability != 90)
    GTEST_SKIP() << "no Hopper GPU: the kernel that adds up dq needs one";
  for (const std::int64_t head_dim : {64, 128})
    for (const bool causal : {false, true})
      for (const Branches& pattern : {Branches{{512}, {1}}, Branches{{1024}, {4}}, Branches{{256, 512}, {1, 2}}}) {
        if (causal && pattern.segments[0] != 512) continue;  // a chunk has all regions, or sweeps have several turns
        Problem problem = make_problem(15'003, 16, head_dim, DType::bf16, causal, pattern, Phase::every);
        problem.kv_heads = causal ? 16 : 4;
        problem = resolve(problem);
        const Inputs inputs = draw_inputs(problem, 67);
        Call call(problem, inputs);
        std::vector<double> own;
        for (const std::int64_t ahead : {0, 1, 60}) {
          const auto [slots, regions] = slots_and_regions(problem, ahead);
          EXPECT_TRUE(ahead == 0 ? slots == regions : 2 * slots <= regions)
              << slots << " slots, " << regions << " regions";
          GradientWay way;
          way.tiles_ahead = ahead;
          ASSERT_EQ(compute(call, way), "");
          const std::vector<double> dq = call.dq.read();
          if (ahead == 0) own = dq;
          EXPECT_LT(largest_difference(dq, own), 0.01) << "head size " << head_dim << ", " << ahead << " tiles ahead";
        }
      }
}

// The first region of a slot is the shorter one at the end of its sequence, and longer ones follow.
TEST_F(CudaBackward, ShortRegionsBeforeLongOnesInASlot) {
  if (cuda::device_info().compute_capability != 90)
    GTEST_SKIP() << "no Hopper GPU: the kernel that adds up dq needs one";
  Problem problem = make_problem(640, 2, 64, DType::bf16, false, {{128}, {4}}, Phase::every);
  problem.batch = 8;
  problem = resolve(problem);
  const auto [slots, regions] = slots_and_regions(problem, 40);
  EXPECT_LE(2 * slots, regions);
  const Inputs inputs = draw_inputs(problem, 71);
  GradientWay way;
  way.tiles_ahead = 40;
  EXPECT_EQ(faults(problem, inputs, Yardstick(problem, inputs), way), "");
}

// Many tiles for each multiprocessor, of sweeps that hand state on beside ones that store and clear rows: whoever gets
// a tile ahead of another must not take what the other still needs.
TEST_F(CudaBackward, ManyTilesOfSeveralSweeps) {
  for (const std::int64_t head_dim : {64, 128}) {
    std::vector<double> without_sums;  // dq as the deterministic mode makes it
    for (const bool deterministic : {true, false}) {
      const Problem problem = make_problem(1 << 14, 8, head_dim, DType::bf16, false, {{128, 1024}, {2, 16}});
      const Inputs inputs = draw_inputs(problem, 59);
      Call call(problem, inputs);
      GradientWay way;
      way.deterministic = deterministic;
      std::vector<std::uint32_t> first;
      for (int i = 0; i < 20; ++i) {
        if (!support::is_taken(i)) continue;
        ASSERT_EQ(compute(call, way), "");
        if (i == 0) first = call.dk.bits();
        ASSERT_TRUE(call.dk.bits() == first) << "head size " << head_dim << " deterministic " << deterministic;
        if (i % 19 != 0) continue;  // reading dq takes longer than making it
        const std::vector<double> dq = call.dq.read();
        if (deterministic && i == 0) without_sums = dq;
        ASSERT_LT(largest_difference(dq, without_sums), 0.01)
            << "head size " << head_dim << " deterministic " << deterministic;
      }
    }
  }
}

// What the gradient is for: a step along it changes the loss by so much.
TEST_F(CudaBackward, FiniteDifferences) {
  for (const bool causal : {false, true}) {
    Problem problem = make_problem(90, 2, 16, DType::fp32, causal, {{40, 80}, {1, 2}});
    problem.kv_heads = 1;
    problem = resolve(problem);
    const Inputs inputs = draw_inputs(problem, 53);
    Call call(problem, inputs);
    ASSERT_EQ(compute(call, {}), "");
    const reference::Result result = call.result();
    const auto loss = [&](const Inputs& at) {
      Call moved(problem, at);
      EXPECT_EQ(support::run_on_device(moved, {}), "");
      const std::vector<double> out = moved.out.read();
      double sum = 0;
      for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * inputs.dout[i];
      return sum;
    };
    constexpr double kStep = 1.0 / 64;
    const std::pair<std::vector<double> Inputs::*, const std::vector<double>*> gradients[] = {
        {&Inputs::q, &result.dq}, {&Inputs::k, &result.dk}, {&Inputs::v, &result.dv}};
    for (const auto& [member, gradient] : gradients)
      for (std::size_t element = 5; element < gradient->size(); element += gradient->size() / 7) {
        Inputs up = inputs, down = inputs;
        (up.*member)[element] += kStep;
        (down.*member)[element] -= kStep;
        EXPECT_NEAR((loss(up) - loss(down)) / (2 * kStep), (*gradient)[element], 4e-3) << element;
      }
  }
}

TEST_F(CudaBackward, EmptyProblemsAreFine) {
  const Problem empty = make_problem(0, 2, 64, DType::bf16, true, {{100}, {1}});
  Call nothing(empty, draw_inputs(empty, 1));
  EXPECT_EQ(compute(nothing, {}), "");
}

TEST_F(CudaBackward, RefusesWhatItCannotDo) {
  const Problem problem = make_problem(100, 2, 64, DType::fp32, true, {{100}, {1}});
  const Plan plan = make_plan(problem);
  support::expect_refused(
      [&] {
        cuda::Backward(problem, plan, {.kernel = "fast", .deterministic = false, .sweeps = {}, .tiles_ahead = -1});
      },
      {"one of sm90, mma, rows", "'fast'", "auto"});
  support::expect_refused_as<Unsupported>(
      [&] {
        cuda::Backward(problem, plan, {.kernel = "sm90", .deterministic = false, .sweeps = {}, .tiles_ahead = -1});
      },
      {"`sm90`", "fp32", "auto"});
  const Problem wide = make_problem(100, 2, 513, DType::bf16, true, {{100}, {1}});
  support::expect_refused_as<Unsupported>([&] { cuda::Backward(wide, make_plan(wide)); }, {"1 to 512", "513", "split"});
  const cuda::Backward backward(problem, plan);
  support::expect_refused([&] { backward.run({}, nullptr); }, {"workspace must have", "got 0"});
}

bool has_device() {
  try {
    cuda::device_info();
    return true;
  } catch (const DeviceError&) {
    return false;
  }
}

TEST(CudaBackwardProperties, ProblemsOfEveryKind) {
  if (!has_device()) GTEST_SKIP() << "no GPU that the CUDA backend can use";
  EXPECT_TRUE(rc::check([] {
    Problem problem = support::draw_problem(400, 70);
    if (support::draw_bool()) problem.head_dim = support::draw_bool() ? 64 : 128;
    problem.scale = support::draw_bool() ? 0.3 : 0.1;
    const std::string fault = faults(resolve(problem), static_cast<std::uint64_t>(support::draw_between(0, 1 << 20)));
    if (!fault.empty()) RC_FAIL(fault);
  }));
}

// Segments and dilations that grow together: keys of several branches are met once and count as often.
TEST(CudaBackwardProperties, KeysOfSeveralBranches) {
  if (!has_device()) GTEST_SKIP() << "no GPU that the CUDA backend can use";
  EXPECT_TRUE(rc::check([] {
    const Problem problem = support::for_hopper(support::draw_nested_problem(900));
    const std::string fault = faults(problem, static_cast<std::uint64_t>(support::draw_between(0, 1 << 20)));
    if (!fault.empty()) RC_FAIL(fault);
  }));
}

}  // namespace
}  // namespace annulus
