// A problem in one line, so that a failure can be typed in again.
#pragma once

#include <sstream>
#include <string>

#include "annulus/problem.h"

namespace annulus::support {

inline std::string describe(const std::vector<std::int64_t>& list) {
  std::ostringstream out;
  out << "{";
  for (std::size_t i = 0; i < list.size(); ++i) out << (i > 0 ? ", " : "") << list[i];
  out << "}";
  return out.str();
}

inline std::string describe(const Problem& problem) {
  std::ostringstream out;
  out << "B " << problem.batch << " N " << problem.tokens << " H " << problem.heads << "/" << problem.kv_heads << " D "
      << problem.head_dim << " " << name(problem.dtype) << (problem.causal ? " causal" : "") << " "
      << name(problem.pattern.phase) << " " << name(problem.pattern.gradient) << " output_scale "
      << problem.pattern.output_scale << (problem.pattern.pad_like_torchscale ? " padded" : "");
  if (problem.scale) out << " scale " << *problem.scale;
  if (problem.documents.size() < 20) out << " documents " << describe(problem.documents);
  for (const Branch& branch : problem.pattern.branches) {
    out << "; w " << branch.segment << " r " << branch.dilation << " heads " << branch.first_head << "+"
        << branch.head_count;
    if (!branch.classes.empty()) out << " classes " << describe(branch.classes);
  }
  return out.str();
}

}  // namespace annulus::support
