// The only place where compute meets communication. Both loops read: wait, post, attend. While the keys of one exchange
// are attended to, the next exchange is under way into the other slot.
//
// Arguments have been checked; the workspace is there.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "annulus/ranks.h"
#include "exec/parcels_in_memory.h"
#include "exec/recorder.h"
#include "exec/schedule.h"
#include "kernels/kernels.h"
#include "kernels/workspace.h"
#include "transport/transport.h"

namespace annulus {

class Executor {
 public:
  // Takes a resolved problem and a resolved sharding, which must outlive it, as the plan and the transport must. A
  // collective.
  Executor(const Problem& problem, const Plan& plan, const Sharding& sharding, Transport& transport,
           const RankOptions& options);

  void forward(ForwardArgs args) const;
  void backward(BackwardArgs args) const;

  std::vector<MemoryComponent> workspace(Pass pass) const;
  RankAttention::Traffic traffic(Pass pass) const;
  const std::vector<Rows>& pieces() const { return schedule_.pieces(); }
  const Kernels& kernels() const { return *kernels_; }

 private:
  // A message as it lies in a slot: gradients that come home first, since they are fp32 and want to be aligned, then
  // keys and values.
  struct Arrival {
    int peer = 0;
    std::vector<Parcel> home;
    std::vector<Parcel> keys;
  };

  struct Memory {
    std::span<std::byte> kernels;
    SoftmaxStates states;
    std::array<std::byte*, 2> slots{};      // exchange e arrives in slot e % 2
    std::array<std::byte*, 2> gradients{};  // of the keys in that slot
    TensorView dq, dk, dv;                  // fp32 sums; the results themselves where those are fp32

    std::byte* slot(std::int64_t e) const { return slots[static_cast<std::size_t>(e % 2)]; }
    std::byte* gradient_slot(std::int64_t e) const { return gradients[static_cast<std::size_t>(e % 2)]; }
  };

  struct Keys {
    ConstTensorView k, v;  // of this rank
  };

  std::int64_t rows() const { return count_rows(pieces()); }
  bool stores_sums() const { return problem_.dtype != DType::fp32 && transport_.size() > 1; }
  TensorView sums(float* data, std::int64_t heads) const;

  std::int64_t count_exchanges(Pass pass) const;
  Step returning(Pass pass, std::int64_t e) const;
  std::vector<Arrival> arrivals(Pass pass, std::int64_t e) const;
  std::int64_t bytes(const Arrival& arrival) const;

  Memory carve_slots(Pass pass, Carver& carver) const;
  Memory carve_forward(Carver& carver, const TensorView& out) const;
  Memory carve_backward(Carver& carver, const BackwardArgs& args) const;

  std::vector<KeySource> own_sources(const KeyTensors& tensors) const;
  std::vector<KeySource> arrived_sources(Pass pass, std::int64_t e, const Memory& memory) const;

  void post(Pass pass, std::int64_t e, const Memory& memory, const Keys& own) const;
  void wait(std::int64_t e) const;
  void add_gradients(const Step& then, int peer, const std::byte* data, std::vector<StridedBlock>& blocks) const;
  void add_keys(Pass pass, std::int64_t e, const std::vector<Parcel>& list, const Memory& memory, const Keys& own,
                std::vector<StridedBlock>& blocks) const;
  void add_home(std::int64_t e, const Memory& memory) const;

  const Problem& problem_;
  Transport& transport_;
  Schedule schedule_;
  ParcelMemory parcels_;
  std::unique_ptr<Kernels> kernels_;
  Recorder own_recorder_;
  Recorder& recorder_;
  std::uint64_t plan_hash_ = 0;
};

}  // namespace annulus
