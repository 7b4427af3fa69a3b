// Section 9 for tensors: every bad argument is refused with the rule, the value received and the remedy, before
// anything is written; what only looks bad is taken.
#include "api/checks.h"

#include <algorithm>
#include <functional>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "reference/draw_inputs.h"
#include "support/call.h"
#include "support/refusal.h"

namespace annulus {
namespace {

using support::Call;
using support::expect_refused;

Problem checked_problem() {
  Problem problem;
  problem.batch = 2;
  problem.tokens = 6;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 8;
  problem.pattern = make_pattern(Preset::longnet, {4}, {1}, 4);
  return resolve(problem);
}

class Checks : public ::testing::Test {
 protected:
  // Both passes with one thing changed in the arguments; nothing may have been written.
  void expect_bad_forward(const std::function<void(ForwardArgs&)>& spoil, const std::vector<std::string>& parts) {
    ForwardArgs args = call_.forward_args();
    spoil(args);
    expect_refused([&] { attention_.forward(args); }, parts);
    EXPECT_TRUE(call_.out.untouched() && call_.lse.untouched());
  }
  void expect_bad_backward(const std::function<void(BackwardArgs&)>& spoil, const std::vector<std::string>& parts) {
    BackwardArgs args = call_.backward_args();
    spoil(args);
    expect_refused([&] { attention_.backward(args); }, parts);
    EXPECT_TRUE(call_.dq.untouched() && call_.dk.untouched() && call_.dv.untouched());
  }

  // Applies the same change to each tensor of each pass in turn. `spoil` takes a TensorView or ConstTensorView.
  template <class Spoil>
  void expect_bad_view(Spoil spoil, const std::vector<std::string>& parts) {
    const auto with = [&](const char* name) {
      std::vector<std::string> all = parts;
      all.emplace_back(name);
      return all;
    };
    expect_bad_forward([&](ForwardArgs& a) { spoil(a.q); }, with("q"));
    expect_bad_forward([&](ForwardArgs& a) { spoil(a.k); }, with("k"));
    expect_bad_forward([&](ForwardArgs& a) { spoil(a.v); }, with("v"));
    expect_bad_forward([&](ForwardArgs& a) { spoil(a.out); }, with("out"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.q); }, with("q"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.k); }, with("k"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.v); }, with("v"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.out); }, with("out"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.dout); }, with("dout"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.dq); }, with("dq"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.dk); }, with("dk"));
    expect_bad_backward([&](BackwardArgs& a) { spoil(a.dv); }, with("dv"));
  }

  const Attention attention_{checked_problem()};
  Call call_{checked_problem(), reference::draw_inputs(checked_problem(), 1)};
};

TEST_F(Checks, TheGoodCallIsTaken) {
  EXPECT_NO_THROW(attention_.forward(call_.forward_args()));
  EXPECT_NO_THROW(attention_.backward(call_.backward_args()));
}

TEST_F(Checks, RefuseAWrongShape) {
  expect_bad_view([](auto& view) { view.shape[0] = 3; },
                  {"shape [batch, tokens, heads, head_dim]", "[2, 6,", "got [3, 6,", "pass the tensor"});
  expect_bad_view([](auto& view) { view.shape[1] = 7; }, {"shape", "got [2, 7,", "pass the tensor"});
  expect_bad_view([](auto& view) { view.shape[2] += 1; }, {"shape", "got [2, 6,", "pass the tensor"});
  expect_bad_view([](auto& view) { view.shape[3] = 4; }, {"shape", ", 4]", "pass the tensor"});
  expect_bad_view([](auto& view) { view.shape[1] = -6; }, {"shape", "-6", "pass the tensor"});
  expect_bad_view([](auto& view) { view = {}; }, {"shape", "[0, 0, 0, 0]", "pass the tensor"});
}

TEST_F(Checks, RefuseAWrongType) {
  expect_bad_view([](auto& view) { view.dtype = DType::bf16; }, {"dtype fp32", "got bf16", "convert"});
}

TEST_F(Checks, RefuseNull) {
  expect_bad_view([](auto& view) { view.data = nullptr; },
                  {"must point to memory", "got null", "pass the tensor's data"});
}

TEST_F(Checks, RefuseAMisalignedAddress) {
  const auto shift = [](auto& view) {
    using Pointer = decltype(view.data);
    view.data = reinterpret_cast<Pointer>(reinterpret_cast<std::uintptr_t>(view.data) + 2);
  };
  expect_bad_view(shift, {"aligned to 4 bytes", "2 bytes behind", "move it"});
}

TEST_F(Checks, RefuseBadStrides) {
  expect_bad_view([](auto& view) { view.stride[3] = 2; }, {"contiguous", "stride of 2", "copy"});
  expect_bad_view([](auto& view) { view.stride[3] = 0; }, {"contiguous", "stride of 0", "copy"});
  for (const std::size_t axis : {0u, 1u, 2u})
    expect_bad_view([axis](auto& view) { view.stride[axis] = -view.stride[axis]; },
                    {"must not be negative", "-", "copy"});
}

TEST_F(Checks, RefuseOutputsThatFoldOntoThemselves) {
  for (const std::size_t axis : {0u, 1u, 2u})
    for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{7}}) {
      const std::vector<std::string> parts{"no two elements", "got strides", std::to_string(stride), "larger strides"};
      expect_bad_forward([=](ForwardArgs& a) { a.out.stride[axis] = stride; }, parts);
      expect_bad_backward([=](BackwardArgs& a) { a.dq.stride[axis] = stride; }, parts);
      expect_bad_backward([=](BackwardArgs& a) { a.dk.stride[axis] = stride; }, parts);
      expect_bad_backward([=](BackwardArgs& a) { a.dv.stride[axis] = stride; }, parts);
    }
}

TEST_F(Checks, InputsMayFoldOntoThemselves) {
  for (const std::size_t axis : {0u, 1u, 2u}) {
    ForwardArgs args = call_.forward_args();
    args.q.stride[axis] = 0;
    args.k.stride[axis] = 0;
    args.v.stride[axis] = 0;
    EXPECT_NO_THROW(attention_.forward(args));
  }
}

TEST_F(Checks, RefuseAWrongLse) {
  std::vector<float> memory(100, 1.0f);
  for (const std::size_t size : {1u, 47u, 49u}) {
    const std::vector<std::string> parts{"lse", "batch * heads * tokens = 48", "got " + std::to_string(size),
                                         "buffer of that size"};
    expect_bad_forward([&](ForwardArgs& a) { a.lse = {memory.data(), size}; }, parts);
    expect_bad_backward([&](BackwardArgs& a) { a.lse = {memory.data(), size}; }, parts);
  }
  expect_bad_backward([](BackwardArgs& a) { a.lse = {}; }, {"lse", "= 48", "got 0"});
  auto* odd = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(memory.data()) + 1);
  expect_bad_forward(
      [&](ForwardArgs& a) {
        a.lse = {odd, 48};
      },
      {"lse", "aligned to 4 bytes", "1 bytes behind", "move it"});
  expect_bad_backward(
      [&](BackwardArgs& a) {
        a.lse = {odd, 48};
      },
      {"lse", "aligned to 4 bytes", "1 bytes behind", "move it"});
  EXPECT_EQ(memory, std::vector<float>(100, 1.0f));
}

TEST_F(Checks, RefuseABadWorkspace) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::size_t needed = attention_.workspace_bytes(pass);
    support::Workspace memory(needed + 64);
    const auto expect_bad = [&](std::span<std::byte> workspace, const std::vector<std::string>& parts) {
      if (pass == Pass::forward)
        expect_bad_forward([&](ForwardArgs& a) { a.workspace = workspace; }, parts);
      else
        expect_bad_backward([&](BackwardArgs& a) { a.workspace = workspace; }, parts);
    };
    for (const std::size_t size : {std::size_t{1}, needed - 1})
      expect_bad(memory.span().subspan(0, size),
                 {"workspace_bytes = " + std::to_string(needed), "got " + std::to_string(size), "larger"});
    for (const std::size_t behind : {1u, 32u})
      expect_bad(memory.span().subspan(behind, needed),
                 {"workspace", "aligned to 64 bytes", std::to_string(behind) + " bytes behind", "move it"});
  }
}

TEST_F(Checks, ALargerWorkspaceIsFine) {
  support::Workspace memory(attention_.workspace_bytes(Pass::forward) + 640);
  ForwardArgs args = call_.forward_args();
  args.workspace = memory.span();
  EXPECT_NO_THROW(attention_.forward(args));
}

TEST_F(Checks, RefuseOutputsInTheMemoryOfInputs) {
  const auto parts = [](const char* output, const char* other) {
    return std::vector<std::string>{"must not overlap", output, other, "memory of its own"};
  };
  const ForwardArgs f = call_.forward_args();
  const BackwardArgs b = call_.backward_args();
  const auto writable = [](const ConstTensorView& view) { return const_cast<void*>(view.data); };
  expect_bad_forward([&](ForwardArgs& a) { a.out.data = writable(f.q); }, parts("out", "q"));
  expect_bad_forward([&](ForwardArgs& a) { a.lse = {static_cast<float*>(writable(f.k)) + 10, 48}; }, parts("lse", "k"));
  expect_bad_forward([&](ForwardArgs& a) { a.lse = {static_cast<float*>(f.out.data) + 100, 48}; }, parts("out", "lse"));
  expect_bad_forward([&](ForwardArgs& a) { a.out.data = static_cast<float*>(writable(f.q)) + 1; }, parts("out", "q"));
  expect_bad_backward([&](BackwardArgs& a) { a.dq.data = writable(b.q); }, parts("dq", "q"));
  expect_bad_backward([&](BackwardArgs& a) { a.dq.data = writable(b.dout); }, parts("dq", "dout"));
  expect_bad_backward([&](BackwardArgs& a) { a.dq.data = writable(b.out); }, parts("dq", "out"));
  expect_bad_backward([&](BackwardArgs& a) { a.dk.data = writable(b.k); }, parts("dk", "k"));
  expect_bad_backward([&](BackwardArgs& a) { a.dv.data = writable(b.v); }, parts("dv", "v"));
  expect_bad_backward([&](BackwardArgs& a) { a.dv.data = b.dk.data; }, parts("dk", "dv"));
  expect_bad_backward([&](BackwardArgs& a) { a.dk.data = static_cast<float*>(b.dq.data) + 5; }, parts("dq", "dk"));
  expect_bad_backward([&](BackwardArgs& a) { a.lse = {static_cast<const float*>(b.dq.data), 48}; }, parts("dq", "lse"));
}

TEST_F(Checks, RefuseAWorkspaceInTheMemoryOfTensors) {
  support::Workspace memory(
      std::max(attention_.workspace_bytes(Pass::forward), attention_.workspace_bytes(Pass::backward)));
  const std::vector<std::string> parts{"must not overlap", "the workspace", "memory of its own"};
  auto* inside = memory.span().data() + 128;
  expect_bad_forward([&](ForwardArgs& a) { a.workspace = memory.span(), a.q.data = inside; }, parts);
  expect_bad_forward([&](ForwardArgs& a) { a.workspace = memory.span(), a.out.data = inside; }, parts);
  expect_bad_backward([&](BackwardArgs& a) { a.workspace = memory.span(), a.dout.data = inside; }, parts);
  expect_bad_backward([&](BackwardArgs& a) { a.workspace = memory.span(), a.dv.data = inside; }, parts);
}

TEST_F(Checks, InputsMayShareMemory) {
  ForwardArgs args = call_.forward_args();
  args.v = args.k;
  EXPECT_NO_THROW(attention_.forward(args));
  args.k.data = args.v.data = static_cast<const float*>(args.q.data) + 3;
  EXPECT_NO_THROW(attention_.forward(args));
}

// Rows that take turns in one buffer: legal as long as each has its own part of the period, by one element.
TEST_F(Checks, InterleavedRowsHaveToLeaveOneAnotherRoom) {
  const Problem problem = checked_problem();
  const std::int64_t row = problem.heads * problem.head_dim, period = 2 * row;
  std::vector<float> buffer(static_cast<std::size_t>(problem.batch * problem.tokens * period + row), 0.5f);
  const auto view = [&](std::int64_t first) {
    return TensorView(buffer.data() + first, problem.dtype,
                      {problem.batch, problem.tokens, problem.heads, problem.head_dim},
                      {problem.tokens * period, period, problem.head_dim, 1});
  };
  ForwardArgs args = call_.forward_args();
  args.q = view(0);
  args.out = view(row);
  EXPECT_NO_THROW(attention_.forward(args));
  std::fill(buffer.begin(), buffer.end(), 0.5f);
  for (const std::int64_t first : {row - 1, row + 1}) {
    args.out = view(first);
    expect_refused([&] { attention_.forward(args); }, {"must not overlap", "out", "q"});
  }
  for (const float x : buffer) ASSERT_EQ(x, 0.5f);
}

// [batch, tokens, heads, 2, head_dim] and [tokens, batch, ...]: whichever axis the tensors take turns along.
TEST_F(Checks, OutputsMayTakeTurnsAlongEveryAxis) {
  const Problem problem = checked_problem();
  const std::int64_t dim = problem.head_dim, row = problem.heads * dim;
  const std::array<std::int64_t, 4> shape{problem.batch, problem.tokens, problem.heads, dim};
  const std::int64_t all = problem.batch * problem.tokens * row;
  struct Turns {
    std::array<std::int64_t, 4> stride;
    std::int64_t second;  // where the second tensor begins
  };
  const Turns cases[] = {{{2 * problem.tokens * row, 2 * row, 2 * dim, 1}, dim},
                         {{2 * row, problem.batch * 2 * row, 2 * dim, 1}, dim},
                         {{2 * row, problem.batch * 2 * row, dim, 1}, row},
                         {{row, problem.batch * 2 * row, dim, 1}, problem.batch * row},
                         {{2 * problem.tokens * row, row, dim, 1}, problem.tokens * row}};
  for (const Turns& turns : cases) {
    std::vector<float> buffer(static_cast<std::size_t>(2 * all + dim), 0.5f);
    ForwardArgs args = call_.forward_args();
    args.q = TensorView(buffer.data(), problem.dtype, shape, turns.stride);
    args.out = TensorView(buffer.data() + turns.second, problem.dtype, shape, turns.stride);
    EXPECT_NO_THROW(attention_.forward(args)) << turns.second;
    args.out = TensorView(buffer.data() + turns.second + 1, problem.dtype, shape, turns.stride);
    expect_refused([&] { attention_.forward(args); }, {"must not overlap", "out", "q"});
  }
}

TEST_F(Checks, NeighboursInMemoryAreFine) {
  const Problem problem = checked_problem();
  const std::array<std::int64_t, 4> q_shape{2, 6, 4, 8};
  std::vector<float> buffer(2 * 384 + 48);
  ForwardArgs args = call_.forward_args();
  args.q = TensorView(buffer.data(), problem.dtype, q_shape);
  args.out = TensorView(buffer.data() + 384, problem.dtype, q_shape);
  args.lse = {buffer.data() + 768, 48};
  EXPECT_NO_THROW(attention_.forward(args));
}

// 2^62 floats are 2^64 bytes: an address computed without care comes round to where it began.
TEST_F(Checks, RefuseStridesThatLeaveTheAddressSpace) {
  for (const std::size_t axis : {0u, 1u, 2u})
    expect_bad_view([axis](auto& view) { view.stride[axis] = std::int64_t{1} << 62; },
                    {"stride", std::to_string(std::int64_t{1} << 62)});
}

// An axis of one element is never stepped along.
TEST(ChecksOfOneRow, StridesOfSingleElementsDoNotMatter) {
  Problem problem = checked_problem();
  problem.batch = problem.tokens = problem.heads = problem.kv_heads = problem.head_dim = 1;
  problem.documents = {};
  problem.pattern = make_pattern(Preset::longnet, {4}, {1}, 1);
  problem = resolve(problem);
  Call call(problem, reference::draw_inputs(problem, 2));
  ForwardArgs args = call.forward_args();
  args.q.stride = args.out.stride = {0, 0, 0, 0};
  args.k.stride = args.v.stride = {5, 0, 9, 3};
  EXPECT_NO_THROW(Attention(problem).forward(args));
  EXPECT_EQ(call.out.faults("out"), "");
}

}  // namespace
}  // namespace annulus
