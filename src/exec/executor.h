// The only place where compute meets communication. Both loops read: wait, post, attend. While the keys of one exchange
// are attended to, the next exchange is under way into the other slot.
//
// Arguments have been checked; the workspace is there.
#pragma once

#include <vector>

#include "annulus/ranks.h"
#include "exec/forecast.h"
#include "exec/recorder.h"
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

  const Forecast& forecast() const { return forecast_; }

 private:
  struct Keys {
    ConstTensorView k, v;  // of this rank
  };

  std::vector<KeySource> own_sources(const KeyTensors& tensors) const;
  std::vector<KeySource> arrived_sources(Pass pass, std::int64_t e, const RankMemory& memory) const;

  void post(Pass pass, std::int64_t e, const RankMemory& memory, const Keys& own) const;
  void wait(std::int64_t e) const;
  void add_gradients(const Step& then, int peer, const std::byte* data, std::vector<StridedBlock>& blocks) const;
  void add_keys(Pass pass, std::int64_t e, const std::vector<Parcel>& list, const RankMemory& memory, const Keys& own,
                std::vector<StridedBlock>& blocks) const;
  void add_home(std::int64_t e, const RankMemory& memory) const;

  const Problem& problem_;
  Transport& transport_;
  Forecast forecast_;
  const Schedule& schedule_;
  const ParcelMemory& parcels_;
  Kernels& kernels_;
  Recorder own_recorder_;
  Recorder& recorder_;
  std::uint64_t plan_hash_ = 0;
};

}  // namespace annulus
