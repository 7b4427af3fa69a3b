// Resharding: the units of plan/reshard.h on their way. Rows of shared segments go out to the rank that makes a unit
// whole, are computed there as if they were a short sequence of their own, and the results come home to be merged.
//
//   forward    q, k, v go out; out and lse of the unit come home, in fp32
//   backward   q, dout, k, v with lse and Delta go out; dq, dk and dv come home, in fp32
//
// A GPU reads fp32 at multiples of four bytes alone. So it is here: of a unit lse and Delta come first, and behind them
// an even number of vectors of the other type.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "annulus/ranks.h"
#include "annulus/transport.h"
#include "exec/parcels_in_memory.h"
#include "kernels/kernels.h"
#include "kernels/workspace.h"
#include "plan/reshard.h"

namespace annulus {

// How the recorder numbers the two: before the first exchange.
inline constexpr std::int64_t kGoOut = -1, kComeHome = 0;

class Resharding {
 public:
  // Everything must outlive it. No units: nothing to do.
  Resharding(const Problem& problem, const Sharding& sharding, const ParcelMemory& parcels, std::vector<Unit> units,
             int rank, const Options& device);

  bool empty() const { return units_.empty(); }
  // Bytes to and from each rank in a pass.
  std::vector<std::int64_t> sent_to(Pass pass) const;
  std::int64_t received_bytes(Pass pass) const;

  // Whom this rank sends to and hears from when rows go out, or when results come home.
  struct Partners {
    std::vector<int> to, from;
    std::int64_t arriving_bytes = 0;
  };
  Partners partners(Pass pass, bool homeward) const;

  struct Memory {
    std::span<std::byte> kernels;
    std::byte* slot = nullptr;
    std::vector<std::byte*> units;  // in and out of each unit that this rank computes
  };
  Memory carve(Pass pass, Carver& carver) const;

  // The tensors of this rank that a pass takes from and adds to.
  struct Tensors {
    ConstTensorView q, k, v, dout;
    const float* lse = nullptr;    // [batch, heads, rows]
    const float* delta = nullptr;  // [batch, heads, rows]
    SoftmaxStates states;          // forward
    TensorView dq, dk, dv;         // backward: fp32 sums
  };

  // In this order, each exchange posted and waited for by the caller.
  Exchange go_out(Pass pass, const Tensors& own, const Memory& memory) const;
  void compute(Pass pass, const Tensors& own, const Memory& memory, const Kernels& kernels) const;
  Exchange come_home(Pass pass, const Tensors& own, const Memory& memory) const;
  void merge(Pass pass, const Tensors& own, const Memory& memory, const Kernels& kernels) const;

 private:
  // One head of one tensor: in the rank's own memory [batch, rows, 1, n], and in the memory of a unit.
  struct Lane {
    TensorView own;
    TensorView unit;
    std::int64_t head = 0;
    enum class Kind { copied, values, lse, added } kind = Kind::copied;
  };
  // A problem of one unit: a short dense sequence.
  struct Short {
    Problem problem;
    Plan plan;
    std::unique_ptr<Kernels> kernels;
  };

  // A unit in memory, both directions together.
  struct UnitTensors {
    float* lse = nullptr;    // [batch, heads, rows]
    float* delta = nullptr;  // the same; backward
    TensorView values;       // out, or dq: fp32
    TensorView both;         // backward: dk and dv of a row lie together, as a GPU's kernel leaves them
    TensorView q, dout, k, v;
  };

  UnitTensors carve_unit(Pass pass, const Unit& unit, Carver& carver) const;
  std::vector<Lane> lanes(Pass pass, bool homeward, const Unit& unit, const Tensors& own, std::byte* memory) const;
  std::int64_t unit_bytes(Pass pass, const Unit& unit) const;
  std::int64_t row_bytes(Pass pass, bool homeward, const Unit& unit) const;
  std::int64_t message_bytes(Pass pass, bool homeward, int computer, int owner) const;
  std::vector<Rows> rows_of(const Unit& unit, int rank) const;
  std::vector<int> find_peers() const;
  const Short& short_problem(Pass pass, const Unit& unit) const;
  void combine(const Lane& lane, const ConstTensorView& result, const ConstTensorView& lse, const Rows& own_rows,
               const Tensors& own, const Kernels& kernels) const;

  const Problem& problem_;
  const Sharding& sharding_;
  const ParcelMemory& parcels_;
  std::vector<Unit> units_;
  int rank_;
  std::vector<int> peers_;  // ranks that units of this one go to, or come from
  std::map<std::tuple<Pass, std::int64_t, std::size_t>, std::unique_ptr<Short>> shorts_;  // by pass, rows, heads
};

}  // namespace annulus
