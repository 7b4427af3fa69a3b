// Kernels: numbers from tasks. One interface for every kind of device; the plan says what, kernels say how.
//
// A rank's queries stay where they are while keys come in steps, a few sources at a time. On one rank there is one step
// and one source: its own keys.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "annulus/attention.h"
#include "kernels/row_source.h"
#include "kernels/workspace.h"
#include "plan/plan.h"

namespace annulus {

// Which queries a rank has, in the order of its memory, and whether keys come in several steps.
struct Shard {
  std::vector<Rows> pieces;
  bool stepwise = false;
  // Forward has one step, nobody brings states, and results may be fp32 whatever the inputs are: kernels that need
  // states have them in their workspace.
  bool own_states = false;
};

// The softmax states of a rank's rows (softmax_state.h) between two steps, in the kernels' own order.
struct SoftmaxStates {
  TensorView values;         // fp32, [batch, rows, heads, head_dim]; may be `out` itself
  float* maximum = nullptr;  // [batch, heads, rows]; on a GPU pairs of a maximum and a sum
  float* sum = nullptr;      // [batch, heads, rows]; on a GPU null
};

struct ForwardStep {
  std::span<const KeySource> sources;
  bool first = true;
  bool last = true;
  SoftmaxStates states = {};  // unused where there is one step
};

struct BackwardStep {
  std::span<const KeySource> sources;  // their dk and dv are set, not added to; without data: not wanted
  // Queries of other ranks that have come to meet this rank's keys: then `sources` are those keys, their dk and dv are
  // added to, and the visitors' dq is set.
  std::span<const QuerySource> visitors = {};
  bool first = true;             // dq starts at 0, Delta is made of the sources unless it is there
  bool has_delta = false;        // by Kernels::delta, of each branch
  const float* delta = nullptr;  // [batch, heads, rows], if it is given from outside
  TensorView dq;  // fp32, [batch, rows, heads, head_dim]; may be the result itself; without data: not wanted
};

// The sums of a rank's gradients between two steps, fp32, in the kernels' own units: `round` makes results of them.
struct GradientSums {
  TensorView dq, dk, dv;
};
enum class Sum { dq, dk, dv };

class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual std::string_view instruction_set() const = 0;
  virtual int threads() const = 0;
  // The parts of the workspace that a pass needs. Laid one behind the other, each a multiple of Carver::kAlignment from
  // where the workspace begins.
  virtual std::vector<MemoryComponent> workspace(Pass pass) const = 0;
  // Whether a pass can be done in one step, straight to its results, without states and sums.
  virtual bool is_whole() const = 0;
  // Memory for what a pass keeps between its steps. The results themselves, where those can hold it.
  virtual SoftmaxStates carve_states(Carver& carver, const TensorView& out) const = 0;
  virtual GradientSums carve_sums(Carver& carver, const BackwardArgs& args) const = 0;
  // Whether those sums are the results, once everything is added: then nothing is left to round.
  virtual bool sums_are_results() const = 0;

  // Arguments have been checked; the workspace is there, and is left alone between two steps of a pass.
  virtual void forward(const ForwardArgs& args, const ForwardStep& step) const = 0;
  virtual void backward(const BackwardArgs& args, const BackwardStep& step) const = 0;
  // Whether backward makes the Delta of eq. 8 itself, where the first step has all keys. Else it comes by `delta`.
  virtual bool makes_branch_deltas() const = 0;
  // Delta of one branch for the detached gradient (eq. 8), from the branch's own output in fp32; into the workspace.
  virtual void delta(const BackwardArgs& args, int branch, const ConstTensorView& out) const = 0;

  // Delta as the first step of backward left it in the workspace: [batch, heads, rows]. The exact gradient alone.
  virtual const float* delta(const BackwardArgs& args) const = 0;

  // Takes a partial result of one head into the states of some rows: fp32 values [batch, rows, 1, head_dim] and their
  // lse [batch, rows, 1, 1].
  virtual void merge(const ConstTensorView& out, const ConstTensorView& lse, const SoftmaxStates& states,
                     std::int64_t head, const Rows& rows) const = 0;

  // For tensors of the same shape. Of fp32 sums: target += source, and target = source, rounded.
  virtual void add(const ConstTensorView& source, const TensorView& target) const = 0;
  virtual void round(const ConstTensorView& source, Sum which, const TensorView& target) const = 0;
  virtual void copy(const ConstTensorView& from, const TensorView& to) const = 0;

  // Called now and then while a pass is computed, by any of its threads: whoever has bytes to move hooks in here.
  std::function<void()> poll;
  // On a GPU: the stream that everything is queued on. Nothing waits for it.
  void* stream = nullptr;
};

// On the device that the options name. Problem and plan must outlive the kernels.
std::unique_ptr<Kernels> make_kernels(const Problem& problem, const Plan& plan, const Options& options,
                                      const Shard& shard);
std::unique_ptr<Kernels> make_cpu_kernels(const Problem& problem, const Plan& plan, const Options& options,
                                          const Shard& shard);

}  // namespace annulus
