#include "exec/forecast.h"

#include <algorithm>
#include <array>

#include "exec/messages.h"
#include "plan/choice.h"

namespace annulus {

namespace {

std::vector<bool> resharded(const std::vector<Strategy>& branches) {
  std::vector<bool> result;
  for (const Strategy strategy : branches) result.push_back(strategy == Strategy::reshard);
  return result;
}

// What is dealt out does not travel as keys: to the planners these branches have no heads.
Problem travelling(Problem problem, const std::vector<Strategy>& branches) {
  for (std::size_t i = 0; i < branches.size(); ++i)
    if (branches[i] == Strategy::reshard) {
      problem.pattern.branches[i].head_count = 0;
      problem.pattern.branches[i].classes.clear();
    }
  return problem;
}

bool is_one_run(const std::vector<Rows>& pieces) {
  return pieces.empty() || (pieces.size() == 1 && pieces.front().stride == 1);
}

}  // namespace

Forecast::Freight::Freight(const Problem& problem, const Sharding& sharding, int rank, const RankOptions& options,
                           Cargo cargo_)
    : cargo(cargo_),
      schedule(travelling(problem, options.branches), sharding, options.strategy, rank, options.slot_bytes, cargo),
      parcels(problem, schedule.pieces(), cargo) {}

Forecast::Forecast(const Problem& problem, const Plan& plan, const Sharding& sharding, int rank,
                   const RankOptions& options, bool partial)
    : problem_(problem),
      ranks_(sharding.ranks),
      dealt_out_(shared_segments_of(problem, sharding, resharded(options.branches), rank)),
      plan_(without(plan, dealt_out_)),
      key_freight_(problem, sharding, rank, options, Cargo::keys),
      query_freight_(queries_travel(travelling(problem, options.branches), sharding, options.strategy)
                         ? std::make_unique<Freight>(problem, sharding, rank, options, Cargo::queries)
                         : nullptr),
      resharding_(problem, sharding, key_freight_.parcels, units_of(problem, dealt_out_), rank, options.device),
      is_alone_(key_freight_.schedule.is_empty() && freight(Pass::backward).schedule.is_empty() &&
                resharding_.empty() && is_one_run(pieces())),
      kernels_(make_kernels(problem, plan_, options.device,
                            {pieces(), !is_alone(), is_alone() ? partial : !keeps_states()})) {
  if (is_alone() && !partial && !kernels_->is_whole()) {
    is_alone_ = false;
    kernels_ = make_kernels(problem, plan_, options.device, {pieces(), true, true});
  }
  if (!has_branch_deltas(problem) || is_alone()) return;
  for (std::size_t i = 0; i < problem.pattern.branches.size(); ++i) {
    auto alone = std::make_unique<Alone>(problem, i);
    RankOptions alone_options = options;
    alone_options.branches = {options.strategy};
    alone->forecast = std::make_unique<Forecast>(alone->problem, alone->plan, sharding, rank, alone_options, true);
    alone_.push_back(std::move(alone));
  }
}

std::int64_t Forecast::count_exchanges(Pass pass) const {
  const std::int64_t count = freight(pass).schedule.count();
  return count + (pass == Pass::backward && count > 0 ? Schedule::kReturnLag : 0);
}

Step Forecast::returning(Pass pass, std::int64_t e) const {
  return pass == Pass::backward ? freight(pass).schedule.exchange(e - Schedule::kReturnLag) : Step{};
}

std::vector<Arrival> Forecast::arrivals(Pass pass, std::int64_t e) const {
  const Step now = freight(pass).schedule.exchange(e), then = returning(pass, e);
  std::vector<Arrival> result;
  for (const int peer : peers_of(now.receives, then.homecomings))
    result.push_back({peer, parcels_for(then.homecomings, peer), parcels_for(now.receives, peer)});
  return result;
}

std::int64_t Forecast::bytes(Pass pass, const Arrival& arrival) const {
  const ParcelMemory& parcels = freight(pass).parcels;
  return parcels.bytes(arrival.home, Way::home) + parcels.bytes(arrival.cargo, Way::out);
}

// Slices of a step together are the step.
RankTraffic Forecast::traffic(Pass pass) const {
  RankTraffic traffic;
  for (const std::int64_t bytes : sent_to(pass)) traffic.sent_bytes += bytes;
  const auto& [cargo, schedule, parcels] = freight(pass);
  for (const Step& step : schedule.steps()) {
    for (const Message& message : step.receives) traffic.received_bytes += parcels.bytes(message.parcels, Way::out);
    if (pass == Pass::forward) continue;
    for (const Message& message : step.homecomings) traffic.received_bytes += parcels.bytes(message.parcels, Way::home);
  }
  traffic.received_bytes += resharding_.received_bytes(pass);
  if (pass == Pass::backward)
    for (const auto& branch : alone_) traffic.received_bytes += branch->forecast->traffic(Pass::forward).received_bytes;
  return traffic;
}

std::vector<std::int64_t> Forecast::sent_to(Pass pass) const {
  std::vector<std::int64_t> result = resharding_.sent_to(pass);
  const auto& [cargo, schedule, parcels] = freight(pass);
  for (const Step& step : schedule.steps()) {
    for (const Message& message : step.sends)
      result[static_cast<std::size_t>(message.peer)] += parcels.bytes(message.parcels, Way::out);
    if (pass == Pass::forward) continue;
    for (const Message& message : step.returns)
      result[static_cast<std::size_t>(message.peer)] += parcels.bytes(message.parcels, Way::home);
  }
  if (pass == Pass::backward)
    for (const auto& branch : alone_) {
      const std::vector<std::int64_t> more = branch->forecast->sent_to(Pass::forward);
      for (std::size_t peer = 0; peer < more.size(); ++peer) result[peer] += more[peer];
    }
  return result;
}

RankMemory Forecast::carve_slots(Pass pass, Carver& carver) const {
  RankMemory memory;
  std::int64_t kernel_bytes = 0;
  std::byte* kernel_memory = nullptr;
  for (const MemoryComponent& part : kernels_->workspace(pass)) {
    auto* start = carver.take<std::byte>(part.name, part.bytes);
    if (kernel_bytes == 0) kernel_memory = start;
    kernel_bytes += part.bytes;
  }
  if (!carver.measuring()) memory.kernels = {kernel_memory, static_cast<std::size_t>(kernel_bytes)};
  // What travels out in a step, what comes home of it, and what is made for others, all by slices.
  const auto& [cargo, schedule, parcels] = freight(pass);
  std::vector<std::int64_t> out, home, made;
  for (const Step& step : schedule.steps()) {
    out.push_back(parcels.most_bytes(step.receives, Way::out, schedule.slices()));
    home.push_back(pass == Pass::forward ? 0 : parcels.most_bytes(step.homecomings, Way::home, schedule.slices()));
    made.push_back(parcels.most_bytes(step.returns, Way::home, schedule.slices()));
  }
  // Two rounds of all steps show everything that ever meets in an exchange, of even and of odd number.
  const auto rounds = static_cast<std::int64_t>(out.size()) - 1;
  const auto at = [&](const std::vector<std::int64_t>& bytes, std::int64_t e) {
    return e < 1 || e > schedule.count() ? 0 : bytes[static_cast<std::size_t>(1 + (e - 1) % rounds)];
  };
  std::array<std::int64_t, 2> slots{}, gradients{};
  for (std::int64_t e = 1; e <= std::min(count_exchanges(pass), 2 * rounds + Schedule::kReturnLag); ++e) {
    const auto i = static_cast<std::size_t>(e % 2);
    slots[i] = std::max(slots[i], at(out, e) + at(home, e - Schedule::kReturnLag));
    gradients[i] = std::max(gradients[i], at(made, e));
  }
  for (std::size_t i = 0; i < 2; ++i) memory.slots[i] = carver.take<std::byte>("slots", slots[i]);
  memory.reshard = resharding_.carve(pass, carver);
  if (pass == Pass::backward)
    for (std::size_t i = 0; i < 2; ++i) memory.gradients[i] = carver.take<std::byte>("gradient slots", gradients[i]);
  return memory;
}

RankMemory Forecast::carve_forward(Carver& carver, const TensorView& out) const {
  RankMemory memory = carve_slots(Pass::forward, carver);
  if (!keeps_states()) return memory;
  memory.states = kernels_->carve_states(carver, out);
  return memory;
}

RankMemory Forecast::carve_backward(Carver& carver, const BackwardArgs& args) const {
  RankMemory memory = carve_slots(Pass::backward, carver);
  memory.sums = is_alone() ? GradientSums{args.dq, args.dk, args.dv} : kernels_->carve_sums(carver, args);
  std::int64_t branch = 0;
  for (const auto& alone : alone_) branch = std::max(branch, total_bytes(alone->forecast->workspace(Pass::forward)));
  auto* start = carver.take<std::byte>("branch", branch);
  if (!carver.measuring()) memory.branch = {start, static_cast<std::size_t>(branch)};
  return memory;
}

std::vector<MemoryComponent> Forecast::workspace(Pass pass) const {
  Carver carver;
  if (pass == Pass::forward)
    carve_forward(carver, {});
  else
    carve_backward(carver, {});
  return carver.components();
}

}  // namespace annulus
