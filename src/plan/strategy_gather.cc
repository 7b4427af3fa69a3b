// gather: every rank hears all keys of all others in one step, needed or not.
#include "plan/needs.h"
#include "plan/strategies.h"

namespace annulus {

std::vector<Step> plan_gather(const Problem& problem, const Sharding& sharding, int rank) {
  std::vector<Step> steps(sharding.ranks > 1 ? 2 : 1);
  const Reach own_reach(problem, sharding, rank);
  for (int s = 1; s < sharding.ranks; ++s) {
    Step& step = steps[1];
    const int from = behind(rank, s, sharding.ranks);
    const int to = ahead(rank, s, sharding.ranks);
    add_message(step.receives, from, whole_shard(problem, sharding, from));
    add_message(step.sends, to, whole_shard(problem, sharding, rank));
    if (Reach(problem, sharding, from).meets(rank))
      add_message(step.returns, from, whole_shard(problem, sharding, from));
    if (own_reach.meets(to)) add_message(step.homecomings, to, whole_shard(problem, sharding, rank));
  }
  return steps;
}

}  // namespace annulus
