// Forward: a block of queries goes through all branches with one running softmax (eq. 4 and 5), then is written once.
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

  void begin(const Block& block);
  // Takes every group of the task that has queries in the block, if the block's head takes part.
  void attend(const Task& task, const ForwardArgs& args);

  std::int64_t rows() const { return block_.end - block_.begin; }
  // acc * (output_scale / sum), in fp32, is the block's output: factors() has one number a row.
  const float* values() const { return values_; }
  const float* factors();
  float lse(std::int64_t row) const;

 private:
  void attend_group(const Rows& queries, const Rows& keys, const ForwardArgs& args);
  void add_zero_keys(const Rows& queries, std::int64_t count);

  const Context& context_;
  const ForwardTiles& tiles_;
  Block block_;
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
void forward(const Context& context, const ForwardArgs& args);

}  // namespace annulus::cpu
