// Forward on the GPU against the fp64 reference, by the rule of section 7: every kernel, every type, every edge.
#include "kernels/cuda/forward.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "reference/draw_inputs.h"
#include "support/device_call.h"
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
using support::DeviceWay;
using support::Layout;
using support::make_problem;
using support::Yardstick;

class CudaForward : public support::OnDevice {};

// "" or what is wrong with one problem on one kernel.
std::string faults(const Problem& problem, const Inputs& inputs, const Yardstick& yardstick, const DeviceWay& way) {
  Call call(problem, inputs, {.options = {}, .inputs = way.layout, .outputs = way.layout});
  std::string fault = support::run_on_device(call, way);
  fault += yardstick.faults(call.forward_result());
  return fault.empty() ? "" : fault + " in " + support::describe(problem) + " by " + describe(way);
}

// The same on every kernel that takes the problem.
std::string faults(const Problem& problem, std::uint64_t seed, DeviceWay way = {}) {
  const Inputs inputs = draw_inputs(problem, seed, false);
  const Yardstick yardstick(problem, inputs);
  std::string text;
  for (const cuda::KernelChoice& kernel : cuda::kKernels) {
    way.kernel = kernel.name;
    try {
      text += faults(problem, inputs, yardstick, way);
    } catch (const Unsupported&) {  // another one takes it
    }
  }
  return text;
}

// Small enough for compute-sanitizer: every kernel, with one sweep and with two, all that a tile can have.
TEST_F(CudaForward, SmallProblems) {
  for (const bool causal : {false, true})
    for (const std::int64_t head_dim : {64, 128, 24})
      for (const DType dtype : {DType::bf16, DType::fp32})
        for (const std::vector<std::vector<int>>& sweeps : {std::vector<std::vector<int>>{{0, 1}}, {{1}, {0}}}) {
          Problem problem = make_problem(270, 2, head_dim, dtype, causal, {{70, 140}, {2, 4}});
          problem.documents = {0, 31, 270};
          DeviceWay way;
          way.sweeps = sweeps;
          EXPECT_EQ(faults(resolve(problem), 3, way), "");
        }
}

TEST_F(CudaForward, TileEdges) {
  constexpr std::int64_t kLengths[] = {1,   2,   15,  16,  17,  31,  32,  33,  63,  64,  65,  127, 128,
                                       129, 159, 160, 161, 191, 192, 193, 255, 256, 257, 319, 320, 321};
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

TEST_F(CudaForward, EveryHeadSize) {
  std::int64_t number = 0;
  for (const std::int64_t head_dim :
       {1, 3, 8, 16, 24, 32, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 200, 256, 264, 512})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
      if (!support::is_taken(number++)) continue;
      EXPECT_EQ(faults(make_problem(211, 2, head_dim, dtype, head_dim % 16 == 0, {{100, 150}, {1, 3}}), 7), "");
    }
}

TEST_F(CudaForward, NestedAndCrookedPatterns) {
  int number = 0;
  for (const Branches& pattern : support::kNestedAndCrooked)
    for (const bool causal : {false, true})
      for (const std::int64_t head_dim : {64, 128})
        for (const Phase phase : {Phase::by_head, Phase::by_head_block, Phase::every}) {
          if (!support::is_taken(number++)) continue;
          EXPECT_EQ(faults(make_problem(701, 5, head_dim, DType::bf16, causal, pattern, phase), 11), "");
        }
}

TEST_F(CudaForward, SweepsGiveTheSameAsOne) {
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
        DeviceWay way;
        way.sweeps = sweeps;
        EXPECT_EQ(faults(resolve(problem), 13, way), "");
      }
}

TEST_F(CudaForward, DocumentsGroupsAndPadding) {
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
    }
}

TEST_F(CudaForward, AnyScaleAndSteepLogits) {
  for (const double scale : {0.3, -0.4, 0.0, 8.0})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
      Problem problem = make_problem(500, 2, 64, dtype, true, {{200}, {1}});
      problem.scale = scale;
      EXPECT_EQ(faults(resolve(problem), 23), "");
    }
}

// Tensor cores cut sums instead of rounding them; over thousands of keys that would show in fp32.
TEST_F(CudaForward, LongSumsInEveryType) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t head_dim : {64, 256})
      EXPECT_EQ(faults(make_problem(2500, 1, head_dim, dtype, false, {{2500}, {1}}), 47), "");
}

std::vector<double> out_of(const Problem& problem, const Inputs& inputs) {
  Call call(problem, inputs);
  DeviceWay way;
  way.kernel = "mma";
  EXPECT_EQ(support::run_on_device(call, way), "");
  return call.forward_result().out;
}

// fp32 is brought into the range of fp16 by powers of two: no magnitude matters, and no other one's.
TEST_F(CudaForward, Fp32HasTheRangeOfFp32) {
  for (const std::int64_t head_dim : {64, 128}) {
    const Problem problem = make_problem(300, 2, head_dim, DType::fp32, true, {{300}, {1}});
    const Inputs inputs = draw_inputs(problem, 51, false);
    const std::vector<double> plain = out_of(problem, inputs);
    Inputs scaled = inputs;
    for (double& x : scaled.q) x *= 0x1p60;
    for (double& x : scaled.k) x *= 0x1p-60;
    for (double& x : scaled.v) x *= 0x1p100;
    std::vector<double> out = out_of(problem, scaled);
    for (double& x : out) x *= 0x1p-100;
    EXPECT_TRUE(out == plain) << "scaled, head size " << head_dim;
    Inputs steep = inputs;  // keys that come later are none of a row's business
    constexpr std::int64_t kLate = 150;
    for (std::int64_t head = 0; head < 2; ++head)
      for (const auto member : {&Inputs::k, &Inputs::v})
        (steep.*member)[reference::element(problem, 2, 0, kLate, head) + 3] = 1e30;
    out = out_of(problem, steep);
    const std::size_t early = reference::element(problem, 2, 0, kLate, 0);
    EXPECT_TRUE(std::equal(plain.begin(), plain.begin() + static_cast<std::ptrdiff_t>(early), out.begin()))
        << "steep, head size " << head_dim;
  }
}

TEST_F(CudaForward, AnyMemoryLayout) {
  std::int64_t number = 0;
  for (const Layout layout : {Layout::dense, Layout::apart, Layout::heads_major})
    for (const bool aligned : {true, false})
      for (const DType dtype : {DType::bf16, DType::fp32}) {
        if (!support::is_taken(number++)) continue;
        Problem problem = make_problem(333, 4, 64, dtype, true, {{100, 200}, {1, 2}});
        problem.batch = 2;
        DeviceWay way;
        way.layout = layout;
        way.aligned = aligned;
        const Inputs inputs = draw_inputs(resolve(problem), 29, false);
        EXPECT_EQ(faults(resolve(problem), inputs, Yardstick(resolve(problem), inputs), way), "");
        way.kernel = "rows";
        EXPECT_EQ(faults(resolve(problem), inputs, Yardstick(resolve(problem), inputs), way), "");
      }
}

// A bad row of V, K or Q reaches the rows that see it and no others: the reference says which.
TEST_F(CudaForward, NonFiniteNumbersStayWhereTheyBelong) {
  int number = 0;
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)})
    for (const bool causal : {false, true})
      for (const std::int64_t head_dim : {64, 128, 40})
        for (const auto member : {&Inputs::q, &Inputs::k, &Inputs::v}) {
          if (!support::is_taken(number++)) continue;
          Problem problem = make_problem(700, 2, head_dim, DType::bf16, causal, {{100, 300}, {1, 3}});
          Inputs inputs = draw_inputs(problem, 31, false);
          (inputs.*member)[reference::element(problem, 2, 0, 350, 1) + 3] = bad;
          const Yardstick yardstick(problem, inputs);
          for (const char* kernel : {"auto", "mma", "rows"}) {
            DeviceWay way;
            way.kernel = kernel;
            EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
          }
        }
}

// Keys with -inf: rows that see no others have no softmax, which is NaN and not the 0 of rows that see nothing.
TEST_F(CudaForward, RowsWithoutAFiniteLogit) {
  for (const std::int64_t head_dim : {64, 40}) {
    const Problem problem = make_problem(400, 2, head_dim, DType::bf16, false, {{100, 400}, {1, 4}});
    Inputs inputs = draw_inputs(problem, 37, false);
    for (std::int64_t head = 0; head < problem.heads; ++head)
      for (std::int64_t token = 0; token < problem.tokens; ++token) {
        inputs.q[reference::element(problem, 2, 0, token, head)] = 1;
        if (token < 150) inputs.k[reference::element(problem, 2, 0, token, head)] = -INFINITY;
      }
    const Yardstick yardstick(problem, inputs);
    for (const auto& sweeps : {std::vector<std::vector<int>>{{0, 1}}, {{1}, {0}}})
      for (const char* kernel : {"auto", "mma", "rows"}) {
        DeviceWay way;
        way.kernel = kernel;
        way.sweeps = sweeps;
        EXPECT_EQ(faults(problem, inputs, yardstick, way), "");
      }
  }
}

TEST_F(CudaForward, RepeatsBitForBit) {
  for (const char* kernel : {"sm90", "mma", "rows"})
    for (const bool causal : {false, true}) {
      if (kernel == std::string("sm90") && device.compute_capability != 90) continue;
      const Problem problem = make_problem(1500, 3, 128, DType::bf16, causal, {{256, 512, 1024}, {1, 2, 8}});
      const Inputs inputs = draw_inputs(problem, 37, false);
      std::vector<std::uint32_t> first;
      for (int i = 0; i < 5; ++i) {
        Call call(problem, inputs);
        DeviceWay way;
        way.kernel = kernel;
        way.sweeps = {{2}, {1}, {0}};
        ASSERT_EQ(support::run_on_device(call, way), "");
        if (i == 0) first = call.bits();
        EXPECT_TRUE(call.bits() == first) << kernel;
      }
    }
}

TEST_F(CudaForward, LseIsOptionalAndEmptyProblemsAreFine) {
  const Problem problem = make_problem(300, 2, 64, DType::bf16, true, {{100}, {1}});
  const Inputs inputs = draw_inputs(problem, 41, false);
  Call with(problem, inputs), without(problem, inputs);
  DeviceWay way;
  EXPECT_EQ(support::run_on_device(with, way), "");
  way.wants_lse = false;
  EXPECT_EQ(support::run_on_device(without, way), "");
  EXPECT_TRUE(with.out.bits() == without.out.bits());
  const Problem empty = make_problem(0, 2, 64, DType::bf16, true, {{100}, {1}});
  Call nothing(empty, draw_inputs(empty, 1, false));
  EXPECT_EQ(support::run_on_device(nothing, {}), "");
}

// More than 2^31 elements in a tensor: the last rows must be as right as the first ones.
TEST_F(CudaForward, OffsetsBeyond32Bits) {
  constexpr std::int64_t kTokens = (1 << 18) + 5, kHeads = 64, kDim = 128, kSegment = 64;
  const std::int64_t elements = kTokens * kHeads * kDim;
  ASSERT_GT(elements, std::int64_t{1} << 31);
  if (device.free_bytes < 5 * elements * 2) GTEST_SKIP() << "needs 22 GB on the device";
  const Problem problem = make_problem(kTokens, kHeads, kDim, DType::bf16, true, {{kSegment}, {1}});
  const auto bytes = static_cast<std::size_t>(elements * 2);
  cuda::DeviceBuffer q(bytes), k(bytes), v(bytes), out(bytes);
  for (const cuda::DeviceBuffer* tensor : {&q, &k, &v, &out})
    cuda::check(cudaMemset(tensor->data(), 0, bytes), "clear a tensor");
  // A small problem of the last segment of head 63, put to the very end of the large one.
  const std::int64_t rows = kTokens % kSegment, first = kTokens - rows;
  const Problem small = make_problem(rows, 1, kDim, DType::bf16, true, {{kSegment}, {1}});
  const Inputs inputs = draw_inputs(small, 43, false);
  Call call(small, inputs);
  const auto place = [&](const cuda::DeviceBuffer& tensor) {
    return tensor.data() + ((first * kHeads + kHeads - 1) * kDim) * 2;
  };
  const auto copy = [&](void* to, const void* from, std::size_t to_pitch, std::size_t from_pitch, cudaMemcpyKind kind) {
    cuda::check(cudaMemcpy2D(to, to_pitch, from, from_pitch, kDim * 2, static_cast<std::size_t>(rows), kind), "copy");
  };
  for (const auto& [tensor, host] : {std::pair{&q, &call.q}, {&k, &call.k}, {&v, &call.v}})
    copy(place(*tensor), host->view().data, kHeads * kDim * 2, kDim * 2, cudaMemcpyHostToDevice);
  for (const char* kernel : {"sm90", "mma"}) {
    if (kernel == std::string("sm90") && device.compute_capability != 90) continue;
    const cuda::Forward forward(problem, make_plan(problem), {.kernel = kernel, .sweeps = {}});
    cuda::DeviceBuffer workspace(static_cast<std::size_t>(total_bytes(forward.workspace())));
    const cuda::Stream stream;
    ForwardArgs args;
    const std::array<std::int64_t, 4> shape{1, kTokens, kHeads, kDim};
    args.q = {q.data(), DType::bf16, shape};
    args.k = {k.data(), DType::bf16, shape};
    args.v = {v.data(), DType::bf16, shape};
    args.out = TensorView(out.data(), DType::bf16, shape);
    args.workspace = {workspace.data(), workspace.bytes()};
    forward.run(args, stream.get());
    stream.wait();
    copy(call.out.view().data, place(out), kDim * 2, kHeads * kDim * 2, cudaMemcpyDeviceToHost);
    reference::Result result = call.forward_result();
    result.lse.clear();
    EXPECT_EQ(Yardstick(small, inputs).faults(result), "") << kernel;
  }
}

TEST_F(CudaForward, RefusesWhatItCannotDo) {
  const Problem problem = make_problem(100, 2, 64, DType::fp32, true, {{100}, {1}});
  const Plan plan = make_plan(problem);
  support::expect_refused([&] { cuda::Forward(problem, plan, {.kernel = "fast", .sweeps = {}}); },
                          {"one of sm90, mma, rows", "'fast'", "auto"});
  support::expect_refused_as<Unsupported>([&] { cuda::Forward(problem, plan, {.kernel = "sm90", .sweeps = {}}); },
                                          {"`sm90`", "fp32", "auto"});
  const Problem wide = make_problem(100, 2, 513, DType::bf16, true, {{100}, {1}});
  support::expect_refused_as<Unsupported>([&] { cuda::Forward(wide, make_plan(wide)); }, {"1 to 512", "513", "split"});
  const cuda::Forward forward(problem, plan);
  support::expect_refused([&] { forward.run({}, nullptr); }, {"workspace must have", "got 0"});
}

bool has_device() {
  try {
    cuda::device_info();
    return true;
  } catch (const DeviceError&) {
    return false;
  }
}

// Sweeps in the branches' own order, in slabs as they come: whoever waits must wait for everybody before.
TEST(CudaForwardProperties, SweepsOfEveryKind) {
  if (!has_device()) GTEST_SKIP() << "no GPU that the CUDA backend can use";
  EXPECT_TRUE(rc::check([] {
    const Problem problem = support::for_hopper(support::draw_problem(300, 8));
    DeviceWay way;
    for (int b = 0; b < static_cast<int>(problem.pattern.branches.size()); ++b) way.sweeps.push_back({b});
    const std::string fault = faults(problem, static_cast<std::uint64_t>(support::draw_between(0, 1 << 20)), way);
    if (!fault.empty()) RC_FAIL(fault);
  }));
}

TEST(CudaForwardProperties, ProblemsOfEveryKind) {
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
TEST(CudaForwardProperties, KeysOfSeveralBranches) {
  if (!has_device()) GTEST_SKIP() << "no GPU that the CUDA backend can use";
  EXPECT_TRUE(rc::check([] {
    const Problem problem = support::for_hopper(support::draw_nested_problem(900));
    const std::string fault = faults(problem, static_cast<std::uint64_t>(support::draw_between(0, 1 << 20)));
    if (!fault.empty()) RC_FAIL(fault);
  }));
}

}  // namespace
}  // namespace annulus
