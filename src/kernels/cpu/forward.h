// Forward: a block of queries goes through all branches with one running softmax (eq. 4 and 5), then is written once.
// Where keys come in several steps, the states wait in memory in between.
#pragma once

#include "annulus/attention.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/context.h"
#include "kernels/workspace.h"

namespace annulus::cpu {

// The running softmax of one block of queries, and the scratch to move it on. Backward uses it too, for the detached
// gradient.
class QueryBlock {
 public:
  QueryBlock(const Context& context, Carver& carver);

  // Starts from nothing, or goes on from states that are fetched when a group needs them.
  void begin(const Block& block);
  void resume(const Block& block, const SoftmaxStates& states);

  // Takes every group of the task that has queries in the block and keys in the sources, if the block's head takes
  // part.
  void attend(const Task& task, const ConstTensorView& q, std::span<const KeySource> sources);
  // The zero keys that torchscale pads with (docs/semantics.md, section 5), once for each task.
  void add_padding(const Task& task);

  void fetch();                            // if it has not happened yet
  void keep(const SoftmaxStates& states);  // if anything has changed

  // acc * (output_scale / sum), in fp32, is the block's output: factors() has one number a row.
  const float* values() const { return values_; }
  const float* factors();
  float lse(std::int64_t row) const;

 private:
  struct Group {
    Rows queries;  // of the block
    SourceRows q, k, v;
    Diagonal diagonal;
  };
  void attend_group(const Group& group);
  void add_zero_keys(const Rows& queries, std::int64_t count);

  const Context& context_;
  const ForwardTiles& tiles_;
  Block block_;
  SoftmaxStates states_;  // where those of this block still lie, if fetched_ is false
  bool fetched_ = true;
  float* values_;
  float* maximum_;
  float* sum_;
  float* factor_;
  std::byte* packed_queries_;
  std::byte* packed_keys_;
  std::byte* packed_values_;
  std::byte* scores_;
};

std::vector<MemoryComponent> forward_workspace(const Context& context);
void forward(const Context& context, const ForwardArgs& args, const ForwardStep& step);

}  // namespace annulus::cpu
