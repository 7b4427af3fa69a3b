// ring: in step s the block of the owner s places behind arrives from the neighbour, and goes on to the next one until
// nobody further on needs it. Gradients go straight home.
#include "plan/needs.h"
#include "plan/strategies.h"

namespace annulus {
std::vector<Step> plan_ring(const Problem& problem, const Sharding& sharding, int rank) {
  const int ranks = sharding.ranks;
  std::vector<Step> steps(static_cast<std::size_t>(ranks));
  const Reach own_reach(problem, sharding, rank);
  bool goes_on = own_reach.last_hop() >= 1;  // the block that this rank has in hand
  for (int s = 1; s < ranks; ++s) {
    Step& step = steps[static_cast<std::size_t>(s)];
    const int outgoing = behind(rank, s - 1, ranks);
    const int incoming = behind(rank, s, ranks);
    const int user = ahead(rank, s, ranks);
    if (goes_on) add_message(step.sends, ahead(rank, 1, ranks), whole_shard(problem, sharding, outgoing));
    const Reach reach(problem, sharding, incoming);
    const int hops = reach.last_hop();
    if (s <= hops) {
      add_message(step.receives, behind(rank, 1, ranks), whole_shard(problem, sharding, incoming));
      if (reach.meets(rank)) step.returns.push_back({incoming, step.receives[0].parcels});
    }
    if (own_reach.meets(user)) add_message(step.homecomings, user, whole_shard(problem, sharding, rank));
    goes_on = s < hops;
  }
  return steps;
}

}  // namespace annulus
