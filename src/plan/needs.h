// Which keys of one rank the queries of another can see.
#pragma once

#include <vector>

#include "plan/parcel.h"
#include "plan/shard.h"

namespace annulus {

// What `receiver` must be sent of the rows of `owner`, and nothing else. Takes resolved arguments.
std::vector<Parcel> needed_parcels(const ParcelReader& reader, const Problem& problem, const Sharding& sharding,
                                   int receiver, int owner);

// Whether any query of `receiver` lies in a segment with a key of `owner` that it may see: quicker to tell, and at
// times true where no class has both.
class Reach {
 public:
  Reach(const Problem& problem, const Sharding& sharding, int owner);
  bool meets(int receiver) const;
  // The positions from the first to the last whose queries may see a key of the owner.
  Rows hull() const;

 private:
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  const Problem& problem_;
  const Sharding& sharding_;
  std::vector<Range> ranges_;  // positions whose queries may see a key of the owner
};

}  // namespace annulus
