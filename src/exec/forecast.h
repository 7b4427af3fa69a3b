// Forecast: what a rank will move and hold in a pass, to the byte, before anything does. It needs no transport, so the
// forecasts of all ranks can be made anywhere.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "annulus/ranks.h"
#include "exec/branch_deltas.h"
#include "exec/parcels_in_memory.h"
#include "exec/resharding.h"
#include "exec/schedule.h"
#include "kernels/kernels.h"
#include "kernels/workspace.h"

namespace annulus {

// A message as it lies in a slot: gradients that come home first, since they are fp32 and want to be aligned, then what
// travels out.
struct Arrival {
  int peer = 0;
  std::vector<Parcel> home;
  std::vector<Parcel> cargo;
};

// The workspace of a pass, carved.
struct RankMemory {
  std::span<std::byte> kernels;
  SoftmaxStates states;
  std::array<std::byte*, 2> slots{};      // exchange e arrives in slot e % 2
  std::array<std::byte*, 2> gradients{};  // of what lies in that slot
  GradientSums sums;
  std::span<std::byte> branch;  // for one branch alone, with the detached gradient
  Resharding::Memory reshard;

  std::byte* slot(std::int64_t e) const { return slots[static_cast<std::size_t>(e % 2)]; }
  std::byte* gradient_slot(std::int64_t e) const { return gradients[static_cast<std::size_t>(e % 2)]; }
};

class Forecast {
 public:
  // Takes a resolved problem and a resolved sharding, which must outlive it; no automatic strategy, one a branch.
  // `partial`: results in fp32, whatever the inputs are.
  Forecast(const Problem& problem, const Plan& plan, const Sharding& sharding, int rank, const RankOptions& options,
           bool partial = false);

  const std::vector<Rows>& pieces() const { return key_freight_.schedule.pieces(); }
  std::int64_t rows() const { return count_rows(pieces()); }
  // What travels in a pass, when, and how it lies in memory.
  struct Freight {
    Freight(const Problem& problem, const Sharding& sharding, int rank, const RankOptions& options, Cargo cargo_);

    Cargo cargo;
    Schedule schedule;
    ParcelMemory parcels;
  };
  const Freight& freight(Pass pass) const {
    return pass == Pass::backward && query_freight_ != nullptr ? *query_freight_ : key_freight_;
  }
  const ParcelMemory& own_parcels() const { return key_freight_.parcels; }
  const Resharding& resharding() const { return resharding_; }
  // Whether this rank's rows are a sequence of their own: nothing travels, and results are made in one go.
  bool is_alone() const { return is_alone_; }
  // Whether states wait in memory: for keys that arrive, or for results that come home.
  bool keeps_states() const { return key_freight_.schedule.last_receive() > 0 || !resharding_.empty(); }
  Kernels& kernels() const { return *kernels_; }

  std::int64_t count_exchanges(Pass pass) const;
  // The step whose gradients go home in exchange e.
  Step returning(Pass pass, std::int64_t e) const;
  // Who sends what to this rank in exchange e, in the order of the slot.
  std::vector<Arrival> arrivals(Pass pass, std::int64_t e) const;
  std::int64_t bytes(Pass pass, const Arrival& arrival) const;

  // The detached gradient on several ranks: each branch goes round once more, alone, before backward.
  struct Alone : BranchAlone {
    using BranchAlone::BranchAlone;
    std::unique_ptr<Forecast> forecast;
  };
  const std::vector<std::unique_ptr<Alone>>& alone() const { return alone_; }

  RankTraffic traffic(Pass pass) const;
  // Bytes sent to each rank.
  std::vector<std::int64_t> sent_to(Pass pass) const;

  // One code path carves and measures.
  RankMemory carve_forward(Carver& carver, const TensorView& out) const;
  RankMemory carve_backward(Carver& carver, const BackwardArgs& args) const;
  std::vector<MemoryComponent> workspace(Pass pass) const;

 private:
  RankMemory carve_slots(Pass pass, Carver& carver) const;

  const Problem& problem_;
  int ranks_;
  std::vector<SharedSegment> dealt_out_;  // segments that are not this rank's alone any more
  Plan plan_;                             // of the others
  Freight key_freight_;
  std::unique_ptr<Freight> query_freight_;  // backward, where that is cheaper
  Resharding resharding_;
  bool is_alone_;
  std::unique_ptr<Kernels> kernels_;
  std::vector<std::unique_ptr<Alone>> alone_;
};

}  // namespace annulus
