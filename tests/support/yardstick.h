// The rule of section 7 for one problem: what is exact, how far the textbook is from it, and whether a result stays
// within twice that.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "reference/reference.h"
#include "support/call.h"

namespace annulus::support {

class Yardstick {
 public:
  // Takes a resolved problem.
  Yardstick(const Problem& problem, const reference::Inputs& inputs)
      : problem_(problem), exact_(reference::exact(problem, inputs)), textbook_(reference::textbook(problem, inputs)) {}

  const reference::Result& exact() const { return exact_; }

  // "" or which tensors are how far off.
  std::string faults(const reference::Result& result) const {
    std::ostringstream out;
    for (const reference::Check& check : reference::compare(problem_, result, exact_, textbook_))
      if (!check.passed) out << check.tensor << " is off by " << check.max_error << ", allowed " << check.bound << "; ";
    return out.str();
  }

  // The same after computing forward and backward in this way.
  std::string faults(const reference::Inputs& inputs, const Way& way) const {
    const Call call = compute(problem_, inputs, way);
    const std::string fault = call.fault() + faults(call.result());
    return fault.empty() ? "" : fault + " in " + describe(problem_) + " by " + describe(way);
  }

 private:
  Problem problem_;
  reference::Result exact_;
  reference::Result textbook_;
};

// One way for each instruction set of this machine.
inline std::vector<Way> each_instruction_set(const Way& way = {}) {
  std::vector<Way> ways;
  for (const std::string& instruction_set : instruction_sets()) {
    ways.push_back(way);
    ways.back().options.instruction_set = instruction_set;
  }
  return ways;
}

}  // namespace annulus::support
