// Is the product right? One problem, drawn inputs, every check that one rank allows.
//
// Against the fp64 reference by the rule of docs/semantics.md, section 7; and bit for bit against itself, run again and
// run with another number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "annulus/attention.h"

namespace annulus::cli {

// For bitwise checks `max_error` is the number of elements whose bits differ, and the bound is 0.
struct VerifyCheck {
  std::string what;    // "avx2 against fp64", "avx2 run again", "avx2 with 1 thread"
  std::string tensor;  // out, lse, dq, dk, dv
  double max_error = 0;
  double bound = 0;
  bool passed = false;
};

struct VerifySettings {
  std::vector<std::string> instruction_sets;
  int threads = 0;
  std::uint64_t seed = 0;
};

// Takes a resolved problem. `step` is called with what begins next: verify_steps(settings) times.
std::vector<VerifyCheck> verify(const Problem& problem, const VerifySettings& settings,
                                const std::function<void(const std::string&)>& step);
std::int64_t verify_steps(const VerifySettings& settings);

// What the product, the reference and their copies in fp64 take.
std::int64_t verify_bytes(const Problem& problem);

bool all_passed(const std::vector<VerifyCheck>& checks);

}  // namespace annulus::cli
