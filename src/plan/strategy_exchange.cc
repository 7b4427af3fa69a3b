// exchange: in step s every rank hears from the one s places behind it, and hears only what its queries can see. No
// rank sends or receives twice in a step.
#include "plan/needs.h"
#include "plan/strategies.h"

namespace annulus {

std::vector<Step> plan_exchange(const Problem& problem, const Sharding& sharding, int rank, Cargo cargo) {
  const Problem packed_as = cargo == Cargo::keys ? problem : problem_of_queries(problem);
  const ParcelReader reader(packed_as);
  std::vector<Step> steps(static_cast<std::size_t>(sharding.ranks));
  for (int s = 1; s < sharding.ranks; ++s) {
    Step& step = steps[static_cast<std::size_t>(s)];
    const int from = behind(rank, s, sharding.ranks);
    const int to = ahead(rank, s, sharding.ranks);
    add_message(step.receives, from, needed_parcels(reader, problem, sharding, {rank, from, cargo}));
    add_message(step.sends, to, needed_parcels(reader, problem, sharding, {to, rank, cargo}));
    step.returns = step.receives;
    step.homecomings = step.sends;
  }
  return steps;
}

}  // namespace annulus
