// Both passes of a problem on one rank, wherever they are computed: what annulus::Attention hands its calls to.
//
// Arguments have been checked; without a workspace a pass takes its own for the call. On a GPU all pointers are to its
// memory, work is queued on the call's stream, and nothing waits for it.
#pragma once

#include <string>
#include <vector>

#include "annulus/attention.h"

namespace annulus {

class Passes {
 public:
  virtual ~Passes() = default;

  virtual std::string instruction_set() const = 0;  // on a GPU: the kernel
  virtual int threads() const = 0;                  // of the CPU
  virtual std::string explain() const = 0;          // what there is to say beyond the plan
  // Throws Unsupported for a pass that the device does not have.
  virtual std::vector<MemoryComponent> workspace(Pass pass) const = 0;
  virtual void forward(const ForwardArgs& args) const = 0;
  virtual void backward(const BackwardArgs& args) const = 0;
};

}  // namespace annulus
