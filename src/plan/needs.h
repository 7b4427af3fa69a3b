// Which keys of one rank the queries of another can see.
#pragma once

#include <vector>

#include "plan/parcel.h"
#include "plan/rank_plan.h"
#include "plan/shard.h"

namespace annulus {

struct Need {
  int receiver = 0;
  int owner = 0;
  Cargo cargo = Cargo::keys;
};

// What the receiver must be sent of the rows of the owner: keys that its queries can see, or queries that can see its
// keys. Of contiguous and zigzag shards nothing else, though a row that two branches need goes twice; of striped ones
// whole shards. Takes resolved arguments and a reader of that cargo.
std::vector<Parcel> needed_parcels(const ParcelReader& reader, const Problem& problem, const Sharding& sharding,
                                   const Need& need);

// Whether any query of `receiver` lies in a segment with a key of `owner` that it may see: quicker to tell, and at
// times true where no class has both.
class Reach {
 public:
  Reach(const Problem& problem, const Sharding& sharding, int owner);
  bool meets(int receiver) const;
  // How many places ahead of the owner the last rank is that meets it, perhaps one or two too many where shards are
  // empty; 0: nobody else does.
  int last_hop() const;
  // The positions from the first to the last whose queries may see a key of the owner.
  Rows hull() const;

 private:
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  const Problem& problem_;
  const Sharding& sharding_;
  int owner_;
  std::vector<Range> ranges_;  // positions whose queries may see a key of the owner
};

}  // namespace annulus
