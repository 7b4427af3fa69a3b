// Is the product right? One problem, drawn inputs, every check that its ranks allow.
//
// Against the fp64 reference by the rule of docs/semantics.md, section 7; bit for bit against itself, run again and run
// with another number of threads; and on several ranks against one: the error must not grow.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/group.h"
#include "cli/rank_setup.h"
#include "cli/trace.h"

namespace annulus::cli {

// For bitwise checks `max_error` is the number of elements whose bits differ, and the bound is 0.
struct VerifyCheck {
  std::string what;    // "avx2 against fp64", "avx2 on 3 ranks run again", "avx2 with 1 thread"
  std::string tensor;  // out, lse, dq, dk, dv
  double max_error = 0;
  double bound = 0;
  bool passed = false;
};

struct VerifySettings {
  std::vector<std::string> instruction_sets;
  RankSetup setup;
  std::uint64_t seed = 0;
};

// Takes a resolved problem. A collective; rank 0 gets the checks, which it makes with all of the tensors in memory.
// `step` is called with what begins next: verify_steps(settings) times. The passes enter the trace, if there is one.
std::vector<VerifyCheck> verify(const Problem& problem, const VerifySettings& settings, Rank& rank,
                                const std::function<void(const std::string&)>& step, Trace* trace = nullptr);
std::int64_t verify_steps(const VerifySettings& settings);

// What the product, the reference and their copies in fp64 take on rank 0.
std::int64_t verify_bytes(const Problem& problem);

bool all_passed(const std::vector<VerifyCheck>& checks);

}  // namespace annulus::cli
