// Executor: runs the passes of one rank. Three of them: one streams keys past the queries (streaming.cc), one completes
// every group before it is attended to, for the same bits on any number of ranks (complete.cc), and one has all queries
// on every rank (replicated.cc).
//
// Arguments have been checked; the workspace is there.
#pragma once

#include <memory>
#include <vector>

#include "annulus/ranks.h"
#include "annulus/transport.h"
#include "kernels/kernels.h"

namespace annulus {

class Executor {
 public:
  virtual ~Executor() = default;

  virtual void forward(ForwardArgs args) const = 0;
  virtual void backward(BackwardArgs args) const = 0;

  virtual const std::vector<Rows>& pieces() const = 0;  // of this rank
  virtual bool replicates_queries() const { return false; }
  virtual std::vector<MemoryComponent> workspace(Pass pass) const = 0;
  virtual RankTraffic traffic(Pass pass) const = 0;
  virtual const Kernels& kernels() const = 0;
};

// All are collectives. They take a resolved problem and a resolved sharding, which must outlive them, as the plan and
// the transport must; no automatic strategy.
std::unique_ptr<Executor> make_streaming_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                                  Transport& transport, const RankOptions& options);
std::unique_ptr<Executor> make_replicated_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                                   Transport& transport, const RankOptions& options);
std::unique_ptr<Executor> make_complete_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                                 Transport& transport, const RankOptions& options);

}  // namespace annulus
