// The only place where compute meets communication. Both loops read: wait, post, attend. While the keys of one exchange
// are attended to, the next exchange is under way into the other slot.
#include "exec/executor.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "annulus/recorder.h"
#include "exec/agreement.h"
#include "exec/forecast.h"
#include "exec/messages.h"

namespace annulus {
namespace {

class StreamingExecutor final : public Executor {
 public:
  // `agreed`: this is a branch alone, of ranks that have agreed on this hash. Without, they agree now.
  StreamingExecutor(const Problem& problem, const Plan& plan, const Sharding& sharding, Transport& transport,
                    const RankOptions& options, std::optional<std::uint64_t> agreed = {});

  void forward(ForwardArgs args) const override;
  void backward(BackwardArgs args) const override;

  const std::vector<Rows>& pieces() const override { return forecast_.pieces(); }
  std::vector<MemoryComponent> workspace(Pass pass) const override { return forecast_.workspace(pass); }
  RankTraffic traffic(Pass pass) const override { return forecast_.traffic(pass); }
  const Kernels& kernels() const override { return kernels_; }

 private:
  using Tensors = std::vector<ConstTensorView>;  // this rank's, as they travel out

  std::vector<KeySource> own_sources(const KeyTensors& tensors) const;
  std::vector<KeySource> arrived_keys(Pass pass, std::int64_t e, const RankMemory& memory) const;
  std::vector<QuerySource> arrived_queries(std::int64_t e, const RankMemory& memory) const;
  template <class F>
  void for_each_arrived(Pass pass, std::int64_t e, const RankMemory& memory, F f) const;

  // Whether there was anything to post.
  bool post(Pass pass, std::int64_t e, const RankMemory& memory, const Tensors& own) const;
  // So that a rank in forward and one in backward do not take each other's messages for their own.
  std::uint64_t plan_of(Pass pass) const { return plan_hash_ + (pass == Pass::backward ? 1 : 0); }
  void wait(std::int64_t e) const;
  void add_gradients(const Step& then, const ParcelMemory& parcels, int peer, const std::byte* data,
                     std::vector<StridedBlock>& blocks) const;
  void add_cargo(Pass pass, std::int64_t e, const std::vector<Parcel>& list, const RankMemory& memory,
                 const Tensors& own, std::vector<StridedBlock>& blocks) const;
  void add_home(std::int64_t e, const RankMemory& memory) const;

  struct Around {
    std::function<void()> meanwhile;   // computes while rows go out
    std::function<void()> after_home;  // posts what may move while results are merged
  };
  void reshard(Pass pass, const Resharding::Tensors& own, const RankMemory& memory, const Around& around) const;

  bool is_detached() const { return !branches_.empty(); }  // and not alone
  void make_deltas(const BackwardArgs& args, const RankMemory& memory) const;

  const Problem& problem_;
  Transport& transport_;
  Forecast forecast_;
  std::vector<std::unique_ptr<StreamingExecutor>> branches_;  // each alone, for the detached gradient
  Problem query_problem_;                                     // how parcels of queries are packed
  Kernels& kernels_;
  Recorder own_recorder_;
  Recorder& recorder_;
  std::uint64_t plan_hash_ = 0;
};

StreamingExecutor::StreamingExecutor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                     Transport& transport, const RankOptions& options,
                                     std::optional<std::uint64_t> agreed)
    : problem_(problem),
      transport_(transport),
      forecast_(problem, plan, sharding, transport.rank(), options, agreed.has_value()),
      query_problem_(problem_of_queries(problem)),
      kernels_(forecast_.kernels()),
      recorder_(options.recorder != nullptr ? *options.recorder : own_recorder_) {
  plan_hash_ = agreed ? *agreed : agree(transport, describe(problem, sharding, options));
  RankOptions alone_options = options;
  alone_options.branches = {options.strategy};
  for (const auto& alone : forecast_.alone())
    branches_.push_back(std::make_unique<StreamingExecutor>(alone->problem, alone->plan, sharding, transport,
                                                            alone_options, plan_hash_ + 2 + branches_.size()));
  kernels_.poll = [this] { transport_.poll(); };
}

// ---- sources

std::vector<KeySource> StreamingExecutor::own_sources(const KeyTensors& tensors) const {
  return own_keys(problem_, forecast_.pieces(), transport_.rank(), tensors);
}

// f(parcel, packed tensors, gradients) for what exchange e brought and what has something to meet here.
template <class F>
void StreamingExecutor::for_each_arrived(Pass pass, std::int64_t e, const RankMemory& memory, F f) const {
  const ParcelMemory& parcels = forecast_.freight(pass).parcels;
  std::byte* data = memory.slot(e);
  std::byte* gradients = memory.gradient_slot(e);
  const std::vector<Message> returns = forecast_.freight(pass).schedule.exchange(e).returns;
  for (const Arrival& arrival : forecast_.arrivals(pass, e)) {
    data += parcels.bytes(arrival.home, Way::home);
    const bool met = std::any_of(returns.begin(), returns.end(),
                                 [&](const Message& message) { return message.parcels == arrival.cargo; });
    for (const Parcel& parcel : arrival.cargo) {
      if (met) f(parcel, parcels.packed(parcel, Way::out, data), parcels.packed(parcel, Way::home, gradients));
      data += parcels.bytes(parcel, Way::out);
      if (met && pass == Pass::backward) gradients += parcels.bytes(parcel, Way::home);
    }
  }
}

std::vector<KeySource> StreamingExecutor::arrived_keys(Pass pass, std::int64_t e, const RankMemory& memory) const {
  std::vector<KeySource> sources;
  for_each_arrived(pass, e, memory, [&](const Parcel& parcel, const auto& cargo, const auto& gradients) {
    KeyTensors tensors{cargo[0], cargo[1], {}, {}};
    if (pass == Pass::backward) tensors.dk = gradients[0], tensors.dv = gradients[1];
    sources.push_back({problem_, parcel, tensors});
  });
  return sources;
}

std::vector<QuerySource> StreamingExecutor::arrived_queries(std::int64_t e, const RankMemory& memory) const {
  std::vector<QuerySource> sources;
  for_each_arrived(Pass::backward, e, memory, [&](const Parcel& parcel, const auto& cargo, const auto& gradients) {
    sources.push_back({query_problem_,
                       parcel,
                       {.q = cargo[2], .dout = cargo[3], .lse = cargo[0], .delta = cargo[1], .dq = gradients[0]}});
  });
  return sources;
}

// ---- exchanges

bool StreamingExecutor::post(Pass pass, std::int64_t e, const RankMemory& memory, const Tensors& own) const {
  if (e > forecast_.count_exchanges(pass)) return false;
  Exchange exchange{.plan = plan_of(pass), .step = e, .sends = {}, .receives = {}, .stream = kernels_.stream};
  const Step now = forecast_.freight(pass).schedule.exchange(e), then = forecast_.returning(pass, e);
  std::int64_t moved = 0;
  for (const int peer : peers_of(now.sends, then.returns)) {
    Send send{.peer = peer, .blocks = {}};
    add_gradients(then, forecast_.freight(pass).parcels, peer, memory.gradient_slot(e), send.blocks);
    add_cargo(pass, e, parcels_for(now.sends, peer), memory, own, send.blocks);
    moved += total_bytes(send.blocks);
    exchange.sends.push_back(std::move(send));
  }
  std::byte* data = memory.slot(e);
  for (const Arrival& arrival : forecast_.arrivals(pass, e)) {
    exchange.receives.push_back({arrival.peer, {data, static_cast<std::size_t>(forecast_.bytes(pass, arrival))}});
    data += forecast_.bytes(pass, arrival);
  }
  if (exchange.sends.empty() && exchange.receives.empty()) return false;
  recorder_.time("post", e, moved, [&] { transport_.post(exchange); });
  return true;
}

void StreamingExecutor::wait(std::int64_t e) const {
  recorder_.time("wait", e, 0, [&] { transport_.wait(); });
}

// Gradients for `peer`. They lie in their slot in the order in which what they belong to arrived.
void StreamingExecutor::add_gradients(const Step& then, const ParcelMemory& parcels, int peer, const std::byte* data,
                                      std::vector<StridedBlock>& blocks) const {
  for (const Message& receive : then.receives)
    for (const Message& message : then.returns) {
      if (message.parcels != receive.parcels) continue;
      const std::int64_t size = parcels.bytes(message.parcels, Way::home);
      if (message.peer == peer) blocks.push_back({data, {}, size});
      data += size;
    }
}

// This rank's own rows, or those that the exchange before has brought and that go on.
void StreamingExecutor::add_cargo(Pass pass, std::int64_t e, const std::vector<Parcel>& list, const RankMemory& memory,
                                  const Tensors& own, std::vector<StridedBlock>& blocks) const {
  if (list.empty()) return;
  const ParcelMemory& parcels = forecast_.freight(pass).parcels;
  if (list.front().owner == transport_.rank()) {
    for (const Parcel& parcel : list) parcels.add_blocks(parcel, own, blocks);
    return;
  }
  const std::byte* data = memory.slot(e - 1);
  for (const Arrival& arrival : forecast_.arrivals(pass, e - 1)) {
    data += parcels.bytes(arrival.home, Way::home);
    const std::int64_t size = parcels.bytes(arrival.cargo, Way::out);
    if (arrival.cargo == list) return blocks.push_back({data, {}, size});
    data += size;
  }
  throw std::logic_error("keys are to be passed on that have not arrived");
}

// Gradients of what this rank sent, which exchange e brought home.
void StreamingExecutor::add_home(std::int64_t e, const RankMemory& memory) const {
  const auto& [cargo, schedule, parcels] = forecast_.freight(Pass::backward);
  const std::vector<TensorView> sums =
      cargo == Cargo::keys ? std::vector{memory.sums.dk, memory.sums.dv} : std::vector{memory.sums.dq};
  std::byte* data = memory.slot(e);
  for (const Arrival& arrival : forecast_.arrivals(Pass::backward, e)) {
    for (const Parcel& parcel : arrival.home) {
      const std::vector<TensorView> packed = parcels.packed(parcel, Way::home, data);
      data += parcels.bytes(parcel, Way::home);
      for (std::size_t i = 0; i < sums.size(); ++i)
        for (const auto& [from, to] : parcels.matches(parcel, packed[i], sums[i])) kernels_.add(from, to);
    }
    data += parcels.bytes(arrival.cargo, Way::out);
  }
}

// Segments that are dealt out: their rows go out, are computed elsewhere and come home.
void StreamingExecutor::reshard(Pass pass, const Resharding::Tensors& own, const RankMemory& memory,
                                const Around& around) const {
  const Resharding& resharding = forecast_.resharding();
  const auto move = [&](std::int64_t number, std::int64_t step, Exchange exchange) {
    exchange.plan = plan_of(pass);
    exchange.step = step;
    exchange.stream = kernels_.stream;
    std::int64_t moved = 0;
    for (const Send& send : exchange.sends) moved += total_bytes(send.blocks);
    if (!exchange.sends.empty() || !exchange.receives.empty())
      recorder_.time("post", number, moved, [&] { transport_.post(exchange); });
  };
  // Transports count steps from 0, and no exchange of the schedule may have the same.
  move(kGoOut, 0, resharding.go_out(pass, own, memory.reshard));
  around.meanwhile();
  wait(kGoOut);
  recorder_.time("attend", kGoOut, 0, [&] { resharding.compute(pass, own, memory.reshard, kernels_); });
  move(kComeHome, forecast_.count_exchanges(pass) + 1, resharding.come_home(pass, own, memory.reshard));
  wait(kComeHome);
  around.after_home();
  recorder_.time("merge", kComeHome, 0, [&] { resharding.merge(pass, own, memory.reshard, kernels_); });
}

// ---- the two loops

void StreamingExecutor::forward(ForwardArgs args) const {
  kernels_.stream = args.stream;
  Carver carver(args.workspace.data());
  const RankMemory memory = forecast_.carve_forward(carver, args.out);
  const Tensors own{args.k, args.v};
  args.workspace = memory.kernels;
  const auto attend = [&](std::int64_t e, const std::vector<KeySource>& sources, bool first, bool last) {
    recorder_.time("attend", e, 0, [&] { kernels_.forward(args, {sources, first, last, memory.states}); });
  };
  const bool more = forecast_.keeps_states();
  const std::int64_t last_receive = forecast_.freight(Pass::forward).schedule.last_receive();
  const auto attend_own = [&] { attend(0, own_sources({args.k, args.v, {}, {}}), true, !more); };
  bool under_way = false;
  const auto post_first = [&] { under_way = post(Pass::forward, 1, memory, own); };
  if (!forecast_.resharding().empty()) {
    Resharding::Tensors tensors;
    tensors.q = args.q, tensors.k = args.k, tensors.v = args.v, tensors.states = memory.states;
    reshard(Pass::forward, tensors, memory, {attend_own, post_first});
  } else {
    post_first();
    attend_own();
  }
  if (more && last_receive == 0) attend(0, {}, false, true);
  for (std::int64_t e = 1; e <= forecast_.count_exchanges(Pass::forward); ++e) {
    if (under_way) wait(e);
    under_way = post(Pass::forward, e + 1, memory, own);
    const bool last = e == last_receive;
    const std::vector<KeySource> sources = arrived_keys(Pass::forward, e, memory);
    if (!sources.empty() || last) attend(e, sources, false, last);
  }
}

// Eq. 8 needs every branch's own output, which nobody kept: each branch goes round once more, alone. The outputs find
// room in dq, which is yet to be made.
void StreamingExecutor::make_deltas(const BackwardArgs& args, const RankMemory& memory) const {
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    branches_[i]->forward({.q = args.q,
                           .k = args.k,
                           .v = args.v,
                           .out = memory.sums.dq,
                           .lse = {},
                           .workspace = memory.branch,
                           .stream = args.stream});
    kernels_.delta(args, static_cast<int>(i), memory.sums.dq);
  }
}

void StreamingExecutor::backward(BackwardArgs args) const {
  kernels_.stream = args.stream;
  Carver carver(args.workspace.data());
  const RankMemory memory = forecast_.carve_backward(carver, args);
  args.workspace = memory.kernels;
  if (is_detached()) make_deltas(args, memory);
  // No keys yet: Delta is made, and dq starts at 0. Who is alone has all keys at once.
  const bool alone = forecast_.is_alone();
  if (!alone) kernels_.backward(args, {.sources = {}, .has_delta = is_detached(), .dq = memory.sums.dq});
  const auto attend = [&](std::int64_t e, const BackwardStep& step) {
    recorder_.time("attend", e, 0, [&] { kernels_.backward(args, step); });
  };
  const std::vector<KeySource> keys = own_sources({args.k, args.v, memory.sums.dk, memory.sums.dv});
  const auto attend_own = [&] { attend(0, {.sources = keys, .first = alone, .dq = memory.sums.dq}); };
  const float* delta = alone ? nullptr : kernels_.delta(args);
  const auto numbers = [&](const float* data) {
    return single_numbers<const void>(data, problem_.batch, forecast_.rows(), problem_.heads);
  };
  const bool keys_travel = forecast_.freight(Pass::backward).cargo == Cargo::keys;
  const Tensors own =
      keys_travel ? Tensors{args.k, args.v} : Tensors{numbers(args.lse.data()), numbers(delta), args.q, args.dout};
  bool under_way = false;
  const auto post_first = [&] { under_way = post(Pass::backward, 1, memory, own); };
  if (!forecast_.resharding().empty()) {
    const Resharding::Tensors tensors{.q = args.q,
                                      .k = args.k,
                                      .v = args.v,
                                      .dout = args.dout,
                                      .lse = args.lse.data(),
                                      .delta = delta,
                                      .states = {},
                                      .dq = memory.sums.dq,
                                      .dk = memory.sums.dk,
                                      .dv = memory.sums.dv};
    reshard(Pass::backward, tensors, memory, {attend_own, post_first});
  } else {
    post_first();
    attend_own();
  }
  for (std::int64_t e = 1; e <= forecast_.count_exchanges(Pass::backward); ++e) {
    if (under_way) wait(e);
    add_home(e, memory);
    under_way = post(Pass::backward, e + 1, memory, own);
    if (keys_travel) {
      const std::vector<KeySource> arrived = arrived_keys(Pass::backward, e, memory);
      if (!arrived.empty()) attend(e, {.sources = arrived, .first = false, .dq = memory.sums.dq});
    } else {
      const std::vector<QuerySource> visitors = arrived_queries(e, memory);
      if (!visitors.empty()) attend(e, {.sources = keys, .visitors = visitors, .first = false, .dq = {}});
    }
  }
  if (alone || kernels_.sums_are_results()) return;
  kernels_.round(memory.sums.dq, Sum::dq, args.dq);
  kernels_.round(memory.sums.dk, Sum::dk, args.dk);
  kernels_.round(memory.sums.dv, Sum::dv, args.dv);
}

}  // namespace

std::unique_ptr<Executor> make_streaming_executor(const Problem& problem, const Plan& plan, const Sharding& sharding,
                                                  Transport& transport, const RankOptions& options) {
  return std::make_unique<StreamingExecutor>(problem, plan, sharding, transport, options);
}

}  // namespace annulus
