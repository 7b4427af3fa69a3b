// The fp64 reference for C: what gradient checks and doubts are settled with. It asks every key whether it belongs to a
// query, so its time grows with the square of the sequence.
#include <algorithm>

#include "annulus/annulus.h"
#include "api/c_abi_structs.h"
#include "api/c_status.h"
#include "reference/reference.h"

namespace annulus {
namespace {

std::vector<double> read(const double* data, std::int64_t count, const char* name) {
  if (count > 0) deref(data, name, "pass the tensor's data");
  return {data, data + count};
}

void write(const std::vector<double>& values, double* data, const char* name) {
  if (!values.empty()) std::ranges::copy(values, &deref(data, name, "pass memory for the result"));
}

}  // namespace
}  // namespace annulus

using namespace annulus;  // NOLINT(google-build-using-namespace): what follows is C

extern "C" int annulus_reference(const annulus_problem* problem, const annulus_reference_args* args) {
  return as_status([&] {
    const Problem resolved = resolve(to_problem(checked_struct(problem, "problem")));
    const annulus_reference_args& given = checked_struct(args, "reference_args");
    const std::int64_t rows = resolved.batch * resolved.tokens * resolved.head_dim;
    reference::Inputs inputs{.q = read(given.q, rows * resolved.heads, "q"),
                             .k = read(given.k, rows * resolved.kv_heads, "k"),
                             .v = read(given.v, rows * resolved.kv_heads, "v"),
                             .dout = {}};
    const bool backward = given.dout != nullptr;
    if (backward) inputs.dout = read(given.dout, rows * resolved.heads, "dout");
    const reference::Result result = reference::exact(resolved, inputs, given.threads);
    if (!backward) {
      write(result.out, given.out, "out");
      write(result.lse, given.lse, "lse");
      return;
    }
    write(result.dq, given.dq, "dq");
    write(result.dk, given.dk, "dk");
    write(result.dv, given.dv, "dv");
  });
}
