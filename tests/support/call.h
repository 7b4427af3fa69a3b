// One call of the product with everything around it: tensors in guarded memory, results as the reference has them.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "reference/reference.h"
#include "support/describe.h"
#include "support/host_tensor.h"

namespace annulus::support {

// How to call: nothing here may change what is right.
struct Way {
  Options options = {};
  Layout inputs = Layout::dense;
  Layout outputs = Layout::dense;
  bool brings_workspace = false;
};

inline std::string describe(const Way& way) {
  const auto text = [](Layout layout) { return std::to_string(static_cast<int>(layout)); };
  return "threads " + std::to_string(way.options.threads) + " " +
         (way.options.instruction_set.empty() ? "auto" : way.options.instruction_set) + " layouts " + text(way.inputs) +
         ", " + text(way.outputs) + (way.brings_workspace ? " own workspace" : "");
}

// Memory of exactly the size asked for, at a multiple of 64 bytes, full of NaN, with guards behind it.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + 2 * kAlignment, std::byte{0xff}) {
    const std::size_t behind = reinterpret_cast<std::uintptr_t>(memory_.data()) % kAlignment;
    start_ = memory_.data() + (behind == 0 ? 0 : kAlignment - behind);
  }

  std::span<std::byte> span() { return {start_, bytes_}; }
  bool guards_intact() const {
    for (const std::byte* p = start_ + bytes_; p < memory_.data() + memory_.size(); ++p)
      if (*p != std::byte{0xff}) return false;
    return true;
  }

 private:
  static constexpr std::size_t kAlignment = 64;
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* start_;
};

// LSE between guards. It begins as a NaN that no arithmetic makes.
class LseRows {
 public:
  explicit LseRows(std::size_t count) : values_(count + 2 * kGuards, std::bit_cast<float>(kPoison)) {}

  std::span<float> span() { return std::span(values_).subspan(kGuards, values_.size() - 2 * kGuards); }
  std::span<const float> span() const { return std::span(values_).subspan(kGuards, values_.size() - 2 * kGuards); }
  std::vector<double> read() const { return {span().begin(), span().end()}; }

  bool untouched() const { return all_poisoned(0, values_.size()); }
  std::string faults() const {
    if (!all_poisoned(0, kGuards) || !all_poisoned(values_.size() - kGuards, values_.size()))
      return "lse: written outside";
    for (const float x : span())
      if (is_poison(x)) return "lse: an element was not written";
    return "";
  }

 private:
  static constexpr std::uint32_t kPoison = 0x7fe5a5a5u;  // quiet: a float on its way through a register keeps it
  static constexpr std::size_t kGuards = 17;

  static bool is_poison(float x) { return std::bit_cast<std::uint32_t>(x) == kPoison; }
  bool all_poisoned(std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin; i < end; ++i)
      if (!is_poison(values_[i])) return false;
    return true;
  }

  std::vector<float> values_;
};

class Call {
 public:
  Call(const Problem& resolved, const reference::Inputs& inputs, const Way& way = {})
      : problem(resolved),
        q(problem.dtype, shape(problem.heads), way.inputs),
        k(problem.dtype, shape(problem.kv_heads), way.inputs),
        v(problem.dtype, shape(problem.kv_heads), way.inputs),
        dout(problem.dtype, shape(problem.heads), way.inputs),
        out(problem.dtype, shape(problem.heads), way.outputs),
        dq(problem.dtype, shape(problem.heads), way.outputs),
        dk(problem.dtype, shape(problem.kv_heads), way.outputs),
        dv(problem.dtype, shape(problem.kv_heads), way.outputs),
        lse(static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens)),
        brings_workspace_(way.brings_workspace) {
    q.fill(inputs.q);
    k.fill(inputs.k);
    v.fill(inputs.v);
    if (!inputs.dout.empty()) dout.fill(inputs.dout);
  }

  ForwardArgs forward_args() {
    return {.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse.span(), .workspace = {}};
  }
  BackwardArgs backward_args() {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .out = out.view(),
            .lse = lse.span(),
            .dout = dout.view(),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view(),
            .workspace = {}};
  }

  // An Attention, or a RankAttention that has these rows.
  template <class AnyAttention>
  void forward(const AnyAttention& attention) {
    ForwardArgs args = forward_args();
    with_workspace(attention, Pass::forward, args.workspace, [&] { attention.forward(args); });
    collect({out.faults("out"), lse.faults()});
  }
  // After forward.
  template <class AnyAttention>
  void backward(const AnyAttention& attention) {
    BackwardArgs args = backward_args();
    with_workspace(attention, Pass::backward, args.workspace, [&] { attention.backward(args); });
    collect({dq.faults("dq"), dk.faults("dk"), dv.faults("dv"), out.faults("out"), lse.faults()});
  }

  reference::Result forward_result() const {
    return {.out = out.read(), .lse = lse.read(), .dq = {}, .dk = {}, .dv = {}};
  }
  reference::Result result() const {
    return {.out = out.read(), .lse = lse.read(), .dq = dq.read(), .dk = dk.read(), .dv = dv.read()};
  }

  // All results as stored, one behind the other.
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> all;
    for (const HostTensor* tensor : {&out, &dq, &dk, &dv})
      for (const std::uint32_t x : tensor->bits()) all.push_back(x);
    for (const float x : lse.span()) all.push_back(std::bit_cast<std::uint32_t>(x));
    return all;
  }

  // "" or what the calls did to memory that they should not have.
  const std::string& fault() const { return fault_; }

  Problem problem;
  HostTensor q, k, v, dout, out, dq, dk, dv;
  LseRows lse;

 private:
  Shape shape(std::int64_t heads) const { return {problem.batch, problem.tokens, heads, problem.head_dim}; }

  template <class AnyAttention, class Run>
  void with_workspace(const AnyAttention& attention, Pass pass, std::span<std::byte>& place, Run run) {
    if (!brings_workspace_) return run();
    Workspace workspace(attention.workspace_bytes(pass));
    place = workspace.span();
    run();
    if (!workspace.guards_intact()) collect({"written behind the workspace"});
  }
  void collect(const std::vector<std::string>& faults) {
    for (const std::string& text : faults)
      if (fault_.empty()) fault_ = text;
  }

  bool brings_workspace_;
  std::string fault_;
};

// Forward and backward.
inline Call compute(const Problem& problem, const reference::Inputs& inputs, const Way& way = {}) {
  const Attention attention(problem, way.options);
  Call call(attention.problem(), inputs, way);
  call.forward(attention);
  call.backward(attention);
  return call;
}

}  // namespace annulus::support
