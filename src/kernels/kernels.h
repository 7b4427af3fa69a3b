// Kernels: numbers from tasks. One interface for every kind of device; the plan says what, kernels say how.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "annulus/attention.h"
#include "plan/plan.h"

namespace annulus {

class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual std::string_view instruction_set() const = 0;
  virtual int threads() const = 0;
  // The parts of the workspace that a pass needs. Laid one behind the other, each from a multiple of 64 bytes on.
  virtual std::vector<MemoryComponent> workspace(Pass pass) const = 0;
  // Arguments have been checked; the workspace is there.
  virtual void forward(const ForwardArgs& args) const = 0;
  virtual void backward(const BackwardArgs& args) const = 0;
};

// Problem and plan must outlive the kernels.
std::unique_ptr<Kernels> make_cpu_kernels(const Problem& problem, const Plan& plan, const Options& options);

}  // namespace annulus
