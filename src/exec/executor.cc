#include "exec/executor.h"

#include <algorithm>
#include <stdexcept>

#include "exec/agreement.h"

namespace annulus {
namespace {

std::vector<Parcel> parcels_for(const std::vector<Message>& messages, int peer) {
  for (const Message& message : messages)
    if (message.peer == peer) return message.parcels;
  return {};
}

std::vector<int> peers_of(const std::vector<Message>& some, const std::vector<Message>& others) {
  std::vector<int> peers;
  for (const auto* messages : {&some, &others})
    for (const Message& message : *messages)
      if (std::find(peers.begin(), peers.end(), message.peer) == peers.end()) peers.push_back(message.peer);
  return peers;
}

}  // namespace

Executor::Executor(const Problem& problem, const Plan& plan, const Sharding& sharding, Transport& transport,
                   const RankOptions& options)
    : problem_(problem),
      transport_(transport),
      schedule_(problem, sharding, options.strategy, transport.rank(), options.slot_bytes),
      parcels_(problem, schedule_.pieces()),
      kernels_(make_cpu_kernels(problem, plan, options.device, {schedule_.pieces(), sharding.ranks > 1})),
      recorder_(options.recorder != nullptr ? *options.recorder : own_recorder_) {
  plan_hash_ = agree(transport, describe(problem, sharding, options.strategy, options.slot_bytes));
  kernels_->poll = [this] { transport_.poll(); };
}

TensorView Executor::sums(float* data, std::int64_t heads) const {
  return {data, DType::fp32, {problem_.batch, rows(), heads, problem_.head_dim}};
}

// ---- what moves

std::int64_t Executor::count_exchanges(Pass pass) const {
  return schedule_.count() + (pass == Pass::backward && schedule_.count() > 0 ? Schedule::kReturnLag : 0);
}

// The step whose gradients go home in exchange e.
Step Executor::returning(Pass pass, std::int64_t e) const {
  return pass == Pass::backward ? schedule_.exchange(e - Schedule::kReturnLag) : Step{};
}

// Who sends what to this rank in exchange e, in the order of the slot.
std::vector<Executor::Arrival> Executor::arrivals(Pass pass, std::int64_t e) const {
  const Step now = schedule_.exchange(e), then = returning(pass, e);
  std::vector<Arrival> result;
  for (const int peer : peers_of(now.receives, then.homecomings))
    result.push_back({peer, parcels_for(then.homecomings, peer), parcels_for(now.receives, peer)});
  return result;
}

std::int64_t Executor::bytes(const Arrival& arrival) const {
  return parcels_.bytes(arrival.home, DType::fp32) + parcels_.bytes(arrival.keys, problem_.dtype);
}

RankAttention::Traffic Executor::traffic(Pass pass) const {
  RankAttention::Traffic traffic;
  for (std::int64_t e = 1; e <= count_exchanges(pass); ++e) {
    for (const Arrival& arrival : arrivals(pass, e)) traffic.received_bytes += bytes(arrival);
    for (const Message& message : schedule_.exchange(e).sends)
      traffic.sent_bytes += parcels_.bytes(message.parcels, problem_.dtype);
    for (const Message& message : returning(pass, e).returns)
      traffic.sent_bytes += parcels_.bytes(message.parcels, DType::fp32);
  }
  return traffic;
}

// ---- memory

Executor::Memory Executor::carve_slots(Pass pass, Carver& carver) const {
  Memory memory;
  std::int64_t kernel_bytes = 0;
  std::byte* kernel_memory = nullptr;
  for (const MemoryComponent& part : kernels_->workspace(pass)) {
    auto* start = carver.take<std::byte>(part.name, part.bytes);
    if (kernel_bytes == 0) kernel_memory = start;
    kernel_bytes += part.bytes;
  }
  if (!carver.measuring()) memory.kernels = {kernel_memory, static_cast<std::size_t>(kernel_bytes)};
  std::int64_t slot = 0, gradient_slot = 0;
  for (std::int64_t e = 1; e <= count_exchanges(pass); ++e) {
    std::int64_t arriving = 0, gradients = 0;
    for (const Arrival& arrival : arrivals(pass, e)) arriving += bytes(arrival);
    for (const Message& message : schedule_.exchange(e).returns)
      gradients += parcels_.bytes(message.parcels, DType::fp32);
    slot = std::max(slot, arriving);
    gradient_slot = std::max(gradient_slot, gradients);
  }
  for (std::byte*& start : memory.slots) start = carver.take<std::byte>("slots", slot);
  if (pass == Pass::backward)
    for (std::byte*& start : memory.gradients) start = carver.take<std::byte>("gradient slots", gradient_slot);
  return memory;
}

Executor::Memory Executor::carve_forward(Carver& carver, const TensorView& out) const {
  Memory memory = carve_slots(Pass::forward, carver);
  if (schedule_.last_receive() == 0) return memory;
  const std::int64_t row_count = problem_.batch * problem_.heads * rows();
  memory.states.maximum = carver.take<float>("states", row_count);
  memory.states.sum = carver.take<float>("states", row_count);
  memory.states.values =
      stores_sums() ? sums(carver.take<float>("states", row_count * problem_.head_dim), problem_.heads) : out;
  return memory;
}

Executor::Memory Executor::carve_backward(Carver& carver, const BackwardArgs& args) const {
  Memory memory = carve_slots(Pass::backward, carver);
  const auto sums_for = [&](const TensorView& result, std::int64_t heads) {
    if (!stores_sums()) return result;
    return sums(carver.take<float>("sums", problem_.batch * rows() * heads * problem_.head_dim), heads);
  };
  memory.dq = sums_for(args.dq, problem_.heads);
  memory.dk = sums_for(args.dk, problem_.kv_heads);
  memory.dv = sums_for(args.dv, problem_.kv_heads);
  return memory;
}

std::vector<MemoryComponent> Executor::workspace(Pass pass) const {
  Carver carver;
  if (pass == Pass::forward)
    carve_forward(carver, {});
  else
    carve_backward(carver, {});
  return carver.components();
}

// ---- sources

std::vector<KeySource> Executor::own_sources(const KeyTensors& tensors) const {
  std::vector<KeySource> sources;
  std::int64_t first = 0;
  for (const Rows& piece : pieces()) {
    const Rows rows{first, 1, piece.count};
    const auto part = [&](const TensorView& view) { return view.data == nullptr ? view : part_of(view, rows); };
    sources.push_back({problem_,
                       {.owner = transport_.rank(), .rows = piece},
                       {part_of(tensors.k, rows), part_of(tensors.v, rows), part(tensors.dk), part(tensors.dv)}});
    first += piece.count;
  }
  return sources;
}

// Keys that exchange e brought and that this rank's queries can see; in backward also where their gradients go.
std::vector<KeySource> Executor::arrived_sources(Pass pass, std::int64_t e, const Memory& memory) const {
  std::vector<KeySource> sources;
  std::byte* data = memory.slot(e);
  std::byte* gradients = memory.gradient_slot(e);
  const std::vector<Message> returns = schedule_.exchange(e).returns;
  for (const Arrival& arrival : arrivals(pass, e)) {
    data += parcels_.bytes(arrival.home, DType::fp32);
    const bool seen = std::any_of(returns.begin(), returns.end(),
                                  [&](const Message& message) { return message.parcels == arrival.keys; });
    for (const Parcel& parcel : arrival.keys) {
      const PackedPair keys = parcels_.packed(parcel, problem_.dtype, data);
      data += parcels_.bytes(parcel, problem_.dtype);
      if (!seen) continue;
      KeyTensors tensors{keys.first, keys.second, {}, {}};
      if (pass == Pass::backward) {
        const PackedPair sums = parcels_.packed(parcel, DType::fp32, gradients);
        gradients += parcels_.bytes(parcel, DType::fp32);
        tensors.dk = sums.first;
        tensors.dv = sums.second;
      }
      sources.push_back({problem_, parcel, tensors});
    }
  }
  return sources;
}

// ---- exchanges

void Executor::post(Pass pass, std::int64_t e, const Memory& memory, const Keys& own) const {
  if (e > count_exchanges(pass)) return;
  Exchange exchange{.plan = plan_hash_, .step = e, .sends = {}, .receives = {}};
  const Step now = schedule_.exchange(e), then = returning(pass, e);
  std::int64_t moved = 0;
  for (const int peer : peers_of(now.sends, then.returns)) {
    Send send{.peer = peer, .blocks = {}};
    add_gradients(then, peer, memory.gradient_slot(e), send.blocks);
    add_keys(pass, e, parcels_for(now.sends, peer), memory, own, send.blocks);
    moved += total_bytes(send.blocks);
    exchange.sends.push_back(std::move(send));
  }
  std::byte* data = memory.slot(e);
  for (const Arrival& arrival : arrivals(pass, e)) {
    exchange.receives.push_back({arrival.peer, {data, static_cast<std::size_t>(bytes(arrival))}});
    data += bytes(arrival);
  }
  if (exchange.sends.empty() && exchange.receives.empty()) return;
  recorder_.time("post", e, moved, [&] { transport_.post(exchange); });
}

void Executor::wait(std::int64_t e) const {
  recorder_.time("wait", e, 0, [&] { transport_.wait(); });
}

// Gradients for `peer`. They lie in their slot in the order in which the keys arrived.
void Executor::add_gradients(const Step& then, int peer, const std::byte* data,
                             std::vector<StridedBlock>& blocks) const {
  for (const Message& receive : then.receives)
    for (const Message& message : then.returns) {
      if (message.parcels != receive.parcels) continue;
      const std::int64_t size = parcels_.bytes(message.parcels, DType::fp32);
      if (message.peer == peer) blocks.push_back({data, {}, size});
      data += size;
    }
}

// This rank's own keys, or those that the exchange before has brought and that go on.
void Executor::add_keys(Pass pass, std::int64_t e, const std::vector<Parcel>& list, const Memory& memory,
                        const Keys& own, std::vector<StridedBlock>& blocks) const {
  if (list.empty()) return;
  if (list.front().owner == transport_.rank()) {
    for (const Parcel& parcel : list) parcels_.add_blocks(parcel, own.k, own.v, blocks);
    return;
  }
  const std::byte* data = memory.slot(e - 1);
  for (const Arrival& arrival : arrivals(pass, e - 1)) {
    data += parcels_.bytes(arrival.home, DType::fp32);
    const std::int64_t size = parcels_.bytes(arrival.keys, problem_.dtype);
    if (arrival.keys == list) return blocks.push_back({data, {}, size});
    data += size;
  }
  throw std::logic_error("keys are to be passed on that have not arrived");
}

// Gradients of this rank's keys that exchange e brought home.
void Executor::add_home(std::int64_t e, const Memory& memory) const {
  std::byte* data = memory.slot(e);
  for (const Arrival& arrival : arrivals(Pass::backward, e)) {
    for (const Parcel& parcel : arrival.home) {
      const PackedPair packed = parcels_.packed(parcel, DType::fp32, data);
      data += parcels_.bytes(parcel, DType::fp32);
      for (const auto& [from, to] : parcels_.matches(parcel, packed.first, memory.dk)) kernels_->add(from, to);
      for (const auto& [from, to] : parcels_.matches(parcel, packed.second, memory.dv)) kernels_->add(from, to);
    }
    data += parcels_.bytes(arrival.keys, problem_.dtype);
  }
}

// ---- the two loops

void Executor::forward(ForwardArgs args) const {
  Carver carver(args.workspace.data());
  const Memory memory = carve_forward(carver, args.out);
  const Keys own{args.k, args.v};
  args.workspace = memory.kernels;
  const auto attend = [&](std::int64_t e, const std::vector<KeySource>& sources) {
    recorder_.time("attend", e, 0, [&] {
      kernels_->forward(args, {sources, e == 0, e == schedule_.last_receive(), memory.states});
    });
  };
  post(Pass::forward, 1, memory, own);
  attend(0, own_sources({args.k, args.v, {}, {}}));
  for (std::int64_t e = 1; e <= count_exchanges(Pass::forward); ++e) {
    wait(e);
    post(Pass::forward, e + 1, memory, own);
    const std::vector<KeySource> sources = arrived_sources(Pass::forward, e, memory);
    if (!sources.empty() || e == schedule_.last_receive()) attend(e, sources);
  }
}

void Executor::backward(BackwardArgs args) const {
  Carver carver(args.workspace.data());
  const Memory memory = carve_backward(carver, args);
  const Keys own{args.k, args.v};
  args.workspace = memory.kernels;
  const auto attend = [&](std::int64_t e, const std::vector<KeySource>& sources) {
    recorder_.time("attend", e, 0, [&] { kernels_->backward(args, {sources, e == 0, memory.dq}); });
  };
  post(Pass::backward, 1, memory, own);
  attend(0, own_sources({args.k, args.v, memory.dk, memory.dv}));
  for (std::int64_t e = 1; e <= count_exchanges(Pass::backward); ++e) {
    wait(e);
    add_home(e, memory);
    post(Pass::backward, e + 1, memory, own);
    const std::vector<KeySource> sources = arrived_sources(Pass::backward, e, memory);
    if (!sources.empty()) attend(e, sources);
  }
  if (!stores_sums()) return;
  kernels_->round(memory.dq, args.dq);
  kernels_->round(memory.dk, args.dk);
  kernels_->round(memory.dv, args.dv);
}

}  // namespace annulus
