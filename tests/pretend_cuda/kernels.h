// The kernels of a pretend GPU: those of the CPU, queued on the call's stream, with every address that they are given
// looked up behind the wall. Nobody waits for them, and what they are given is copied, as a launch does.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>

#include "kernels/cuda/backend.h"
#include "kernels/kernels.h"
#include "pretend_cuda/memory.h"
#include "pretend_cuda/timeline.h"

namespace annulus::pretend {

// ---- Addresses: where the CPU finds them. What is empty has an address that nobody reads, and that may be anywhere.

template <class Void>
bool is_empty(const BasicTensorView<Void>& view) {
  return std::ranges::find(view.shape, 0) != view.shape.end();
}
template <class Void>
BasicTensorView<Void> inside(BasicTensorView<Void> view, const char* what) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  if (!is_empty(view)) view.data = reached(static_cast<Byte*>(view.data), what);
  return view;
}
template <class T>
std::span<T> inside(std::span<T> span, const char* what) {
  return span.empty() ? span : std::span<T>{reached(span.data(), what), span.size()};
}
inline ForwardArgs inside(ForwardArgs args) {
  args.q = inside(args.q, "q");
  args.k = inside(args.k, "k");
  args.v = inside(args.v, "v");
  args.out = inside(args.out, "out");
  args.lse = inside(args.lse, "lse");
  args.workspace = inside(args.workspace, "the workspace");
  return args;
}
inline BackwardArgs inside(BackwardArgs args) {
  args.q = inside(args.q, "q");
  args.k = inside(args.k, "k");
  args.v = inside(args.v, "v");
  args.out = inside(args.out, "out");
  args.lse = inside(args.lse, "lse");
  args.dout = inside(args.dout, "dout");
  args.dq = inside(args.dq, "dq");
  args.dk = inside(args.dk, "dk");
  args.dv = inside(args.dv, "dv");
  args.workspace = inside(args.workspace, "the workspace");
  return args;
}
inline SoftmaxStates inside(SoftmaxStates states) {
  if (is_empty(states.values)) return states;
  states.values = inside(states.values, "the states");
  states.maximum = reached(states.maximum, "the states");
  states.sum = reached(states.sum, "the states");
  return states;
}
inline std::vector<KeySource> inside(std::vector<KeySource> sources) {
  for (KeySource& source : sources) {
    KeyTensors& own = source.tensors;
    own.k = inside(own.k, "k of a source");
    own.v = inside(own.v, "v of a source");
    own.dk = inside(own.dk, "dk of a source");
    own.dv = inside(own.dv, "dv of a source");
  }
  return sources;
}
inline std::vector<QuerySource> inside(std::vector<QuerySource> sources) {
  for (QuerySource& source : sources) {
    QueryTensors& own = source.tensors;
    own.q = inside(own.q, "q of a visitor");
    own.dout = inside(own.dout, "dout of a visitor");
    own.lse = inside(own.lse, "lse of a visitor");
    own.delta = inside(own.delta, "Delta of a visitor");
    own.dq = inside(own.dq, "dq of a visitor");
  }
  return sources;
}

class PretendKernels final : public Kernels {
 public:
  // As ranks on GPUs do; see rank_kernels.cc.
  PretendKernels(const Problem& problem, const Plan& plan, const cuda::PassOptions& options, const Shard& shard)
      : cpu_(make_cpu_kernels(problem, plan, {.threads = 1}, shard)),
        is_stepwise_(shard.stepwise),
        deltas_come_from_outside_(has_branch_deltas(problem)) {
    if (options.kernel != "auto" && options.kernel != "mma")
      throw Unsupported("a pretend GPU has the kernel mma; got '" + options.kernel + "': leave the choice to auto");
  }
  ~PretendKernels() override { support::PretendStream::wait_for_all(); }

  std::string_view instruction_set() const override { return "mma"; }
  int threads() const override { return 0; }
  std::vector<MemoryComponent> workspace(Pass pass) const override { return cpu_->workspace(pass); }
  bool is_whole() const override { return cpu_->is_whole(); }
  SoftmaxStates carve_states(Carver& carver, const TensorView& out) const override {
    return cpu_->carve_states(carver, out);
  }
  GradientSums carve_sums(Carver& carver, const BackwardArgs& args) const override {
    return cpu_->carve_sums(carver, args);
  }
  bool sums_are_results() const override { return cpu_->sums_are_results(); }
  bool makes_branch_deltas() const override { return !is_stepwise_; }

  void forward(const ForwardArgs& args, const ForwardStep& step) const override {
    queue("attend", [this, args, step = ForwardStep(step),
                     sources = std::vector(step.sources.begin(), step.sources.end())]() mutable {
      sources = inside(std::move(sources));
      step.sources = sources;
      step.states = inside(step.states);
      cpu_->forward(inside(args), step);
    });
  }
  void backward(const BackwardArgs& args, const BackwardStep& step) const override {
    if (!makes_branch_deltas() && deltas_come_from_outside_ && step.first && !step.has_delta && step.delta == nullptr)
      throw std::logic_error("Delta of each branch comes from outside");
    queue(step.sources.empty() ? "Delta" : "attend",
          [this, args, step = BackwardStep(step), sources = std::vector(step.sources.begin(), step.sources.end()),
           visitors = std::vector(step.visitors.begin(), step.visitors.end())]() mutable {
            sources = inside(std::move(sources));
            visitors = inside(std::move(visitors));
            step.sources = sources;
            step.visitors = visitors;
            if (!is_empty(args.q)) step.delta = reached(step.delta, "Delta");
            step.dq = inside(step.dq, "the sums of dq");
            cpu_->backward(inside(args), step);
          });
  }
  void delta(const BackwardArgs& args, int branch, const ConstTensorView& out) const override {
    queue("Delta", [this, args, branch, out] { cpu_->delta(inside(args), branch, inside(out, "a branch's output")); });
  }
  const float* delta(const BackwardArgs& args) const override { return cpu_->delta(args); }

  void merge(const ConstTensorView& out, const ConstTensorView& lse, const SoftmaxStates& states, std::int64_t head,
             const Rows& rows) const override {
    queue("merge", [this, out, lse, states, head, rows] {
      cpu_->merge(inside(out, "a partial result"), inside(lse, "its lse"), inside(states), head, rows);
    });
  }
  void add(const ConstTensorView& source, const TensorView& target) const override {
    queue("merge", [this, source, target] { cpu_->add(inside(source, "a sum"), inside(target, "a sum")); });
  }
  void round(const ConstTensorView& source, Sum which, const TensorView& target) const override {
    queue("round",
          [this, source, which, target] { cpu_->round(inside(source, "a sum"), which, inside(target, "a gradient")); });
  }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    queue("copy", [this, from, to] { cpu_->copy(inside(from, "rows"), inside(to, "rows")); });
  }

 private:
  void queue(const char* what, std::function<void()> work) const {
    queue_slice(support::PretendStream::at(stream), what, 0, std::move(work));
  }

  std::unique_ptr<Kernels> cpu_;
  bool is_stepwise_, deltas_come_from_outside_;
};

}  // namespace annulus::pretend
