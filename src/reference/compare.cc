// The rule of docs/semantics.md, section 7: no worse than twice the textbook, give or take a few units in the last
// place.
#include <algorithm>
#include <cmath>
#include <limits>

#include "annulus/errors.h"
#include "numeric/half.h"
#include "reference/reference.h"

namespace annulus::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Tensor {
  const char* name;
  DType dtype;
  const std::vector<double>& result;
  const std::vector<double>& exact;
  const std::vector<double>& textbook;
  double terms;
  double stored_terms;
};

// atol. The textbook's error alone would be an unfair bound where the textbook is right by luck: one key has
// probability 1, no error and a dS of exactly 0. So we allow
//   2 units of the result's type at its largest value: it has to be stored, half a unit, and a bf16 dot product rounds
//   one factor before; 2 units of fp32 at the size of the terms that were summed, since all sums are fp32 and a
//   cancellation keeps its terms' error; 1 unit of the result's type in Delta, since backward is given O in that type.
double tolerance(const Tensor& tensor, double largest) {
  return 2 * ulp(tensor.dtype, largest) + 2 * ulp(DType::fp32, tensor.terms) + ulp(tensor.dtype, tensor.stored_terms);
}

void check_sizes(const Tensor& tensor) {
  if (tensor.result.size() == tensor.exact.size() && tensor.textbook.size() == tensor.exact.size()) return;
  throw InvalidArgument(std::string("compare needs tensors of one size; got ") + tensor.name + " with " +
                        std::to_string(tensor.result.size()) + " values in the result, " +
                        std::to_string(tensor.exact.size()) + " in exact and " +
                        std::to_string(tensor.textbook.size()) +
                        " in textbook: compute all three for the same problem");
}

// NaN for NaN, this infinity for this infinity.
bool same_kind(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b; }

Check check(const Tensor& tensor) {
  check_sizes(tensor);
  double error = 0;
  double textbook_error = 0;
  double largest = 0;
  for (std::size_t i = 0; i < tensor.exact.size(); ++i) {
    const double want = round_to(tensor.dtype, tensor.exact[i]);
    const double got = tensor.result[i];
    if (!std::isfinite(want) || !std::isfinite(got)) {
      if (!same_kind(want, got)) error = kInfinity;
      continue;
    }
    error = std::max(error, std::abs(got - tensor.exact[i]));
    largest = std::max(largest, std::abs(want));
    if (!std::isfinite(tensor.textbook[i])) continue;
    textbook_error = std::max(textbook_error, std::abs(tensor.textbook[i] - tensor.exact[i]));
  }
  const double bound = 2 * textbook_error + tolerance(tensor, largest);
  return {.tensor = tensor.name, .max_error = error, .bound = bound, .passed = error <= bound};
}

}  // namespace

std::vector<Check> compare(const Problem& problem, const Result& result, const Result& exact, const Result& textbook) {
  const DType dtype = problem.dtype;
  const Tensor tensors[] = {
      {"out", dtype, result.out, exact.out, textbook.out, exact.terms.out, 0},
      {"lse", DType::fp32, result.lse, exact.lse, textbook.lse, exact.terms.lse, 0},
      {"dq", dtype, result.dq, exact.dq, textbook.dq, exact.terms.dq, exact.terms.dq_stored},
      {"dk", dtype, result.dk, exact.dk, textbook.dk, exact.terms.dk, exact.terms.dk_stored},
      {"dv", dtype, result.dv, exact.dv, textbook.dv, exact.terms.dv, 0},
  };
  std::vector<Check> checks;
  for (const Tensor& tensor : tensors) {
    const bool absent = tensor.result.empty() && &tensor.result != &result.out;
    if (!absent) checks.push_back(check(tensor));
  }
  return checks;
}

}  // namespace annulus::reference
