// A Chrome trace of all ranks, which Perfetto (ui.perfetto.dev) opens: a process a rank; tracks for passes, compute,
// send and receive, and wait; a counter of the bytes in slots; arrows from a sender's post to the receiver's wait. On a
// GPU those are what its host did, and two more tracks have the GPU's own kernels and copies.
//
// Machines have different clocks, so each counts from the moment at which all ranks met.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "annulus/ranks.h"
#include "cli/group.h"
#include "cli/rank_setup.h"
#include "kernels/cuda/load.h"

namespace annulus::cli {

inline constexpr std::size_t kTracedEvents = std::size_t{1} << 20;  // of a rank; the last ones are kept

// Whether a rank spent an event on others: waiting for what it could not hide behind computing.
bool is_waiting(const Event& event);

class Trace {
 public:
  using Clock = Recorder::Clock;

  // A collective. `watches_device`: what a GPU does goes into the trace, by its own clock.
  explicit Trace(Rank& rank, bool watches_device = false);

  // A pass that this rank has run from `begin` to now.
  void add_pass(Pass pass, Clock::time_point begin);

  // Rank 0 writes the file. A collective. `options` are those that the passes ran with.
  void write(const std::string& path, const Problem& problem, const Sharding& sharding,
             const RankOptions& options) const;

 private:
  struct TracedPass {
    Pass pass;
    Clock::time_point begin, end;
  };

  std::string events_text(const Problem& problem, const Sharding& sharding, const RankOptions& options) const;

  Rank& rank_;
  Clock::time_point origin_;
  std::vector<TracedPass> passes_;
  std::unique_ptr<cuda::Timeline> timeline_;  // of a GPU
};

}  // namespace annulus::cli
