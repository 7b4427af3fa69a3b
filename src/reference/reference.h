// The oracle: equations 1 to 8 of docs/semantics.md in fp64, position by position, as plain as they are written.
//
// It shares no index code with src/plan: S_i(t, j) is found by asking every key whether it belongs. `textbook` is the
// same arithmetic as people would type it in the input type; its error is the yardstick for ours (section 7).
//
// Infinite logits follow IEEE: a row with a logit of +inf is NaN, lse too; a row whose logits are all -inf has lse =
// -inf and out = NaN.
#pragma once

#include <string>
#include <vector>

#include "annulus/problem.h"

namespace annulus::reference {

// Dense tensors, [batch, tokens, heads, head_dim]; the values are exactly representable in problem.dtype.
struct Inputs {
  std::vector<double> q, k, v;
  std::vector<double> dout;  // empty: forward alone
};

// How far rounding may move a tensor although the tensor itself is small: what cancels leaves an error of the size of
// its terms behind. By tensor, the largest over its elements; see compare, which allows a few units in the last place
// of these.
struct TermSizes {
  double out = 0, lse = 0, dq = 0, dk = 0, dv = 0;  // of fp32 sums
  double dq_stored = 0, dk_stored = 0;              // of Delta, since backward is given O in the tensors' type
};

struct Result {
  std::vector<double> out;         // like q
  std::vector<double> lse;         // [batch, heads, tokens]
  std::vector<double> dq, dk, dv;  // empty without dout
  TermSizes terms = {};            // of `exact` alone
};

// fp64 throughout. Takes a resolved problem. threads = 0: all cores.
Result exact(const Problem& problem, const Inputs& inputs, int threads = 0);

// Every intermediate (scores, probabilities, O, dP, dS) stored in problem.dtype, sums in fp32, results in
// problem.dtype. An intermediate that problem.dtype cannot hold (a logit beyond fp16) stays as it was in fp32: a
// yardstick of infinities measures nothing.
Result textbook(const Problem& problem, const Inputs& inputs, int threads = 0);

struct Check {
  std::string tensor;  // out, lse, dq, dk, dv
  double max_error = 0;
  double bound = 0;
  bool passed = false;
};

// The rule of section 7: max|x - exact| <= 2 max|textbook - exact| + atol, for each tensor that `result` has. NaN and
// infinities must stand where the exact result has them; if not, max_error is infinite. A value beyond the type's range
// is the infinity it rounds to.
std::vector<Check> compare(const Problem& problem, const Result& result, const Result& exact, const Result& textbook);

}  // namespace annulus::reference
