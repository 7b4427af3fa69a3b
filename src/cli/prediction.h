// What a rank would hold and move, without running it: the product's own plans, made on a transport that goes nowhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "annulus/ranks.h"
#include "cli/launcher.h"

namespace annulus::cli {

// What a transport takes for itself.
struct Staging {
  std::int64_t host_bytes = 0;
  std::int64_t gpu_bytes = 0;
};
// Of the transport of this launch. That MPI may be CUDA-aware, and then has slots on the GPU instead of pinned ones,
// shows when it has begun.
Staging staging_of(const Launch& launch, bool on_gpu);

struct Prediction {
  int rank = 0;
  std::int64_t rows = 0;
  std::string kernel;                              // or instruction set
  std::vector<MemoryComponent> forward, backward;  // tensors included, and what the transport takes
  Staging staging;                                 // of that
  RankTraffic forward_traffic, backward_traffic;

  const std::vector<MemoryComponent>& memory(Pass pass) const { return pass == Pass::forward ? forward : backward; }
  std::int64_t bytes(bool with_backward) const;  // of the larger pass
  std::int64_t gpu_bytes(bool with_backward) const { return bytes(with_backward) - staging.host_bytes; }
  std::int64_t sent_bytes(bool with_backward) const;
};

// Takes a resolved problem and a resolved sharding; no automatic strategy.
Prediction predict(const Problem& problem, const Sharding& sharding, int rank, const RankOptions& options,
                   const Staging& staging = {});

// Bytes that a rank sends by this strategy: the same however they are cut, and so without the cutting.
std::int64_t predict_sent_bytes(const Problem& problem, const Sharding& sharding, int rank, Strategy strategy,
                                bool with_backward);

// The largest slots, by halving the given ones, with which the rank stays within `limit`. If there are none:
// slot_bytes is 0, and `bytes` the least that any of them needs.
struct Fit {
  std::int64_t slot_bytes = 0;
  std::int64_t bytes = 0;
};
Fit fit_slots(const Problem& problem, const Sharding& sharding, int rank, RankOptions options, const Staging& staging,
              bool with_backward, std::int64_t limit);

// Sent over all ranks, and by the rank that sends most.
struct Traffic {
  std::int64_t total = 0;
  std::int64_t largest = 0;
};
// Where only some of many ranks were predicted, the total is an estimate: their mean, times the ranks.
Traffic traffic_of(const std::vector<std::int64_t>& sent, int ranks);

}  // namespace annulus::cli
