#include "cli/prediction.h"

#include <algorithm>
#include <limits>

#include "annulus/carrier.h"
#include "annulus/device_transports.h"
#include "annulus/rendezvous.h"
#include "exec/schedule.h"
#include "plan/shard.h"
#ifdef ANNULUS_WITH_MPI
#include "annulus/mpi.h"
#endif

namespace annulus::cli {
namespace {

constexpr std::int64_t kLeastSlot = std::int64_t{64} << 10;  // below, messages cost more than what they carry
constexpr std::int64_t kMostExchanges = 1 << 20;             // of a pass

}  // namespace

std::int64_t Prediction::bytes(bool with_backward) const {
  const std::int64_t of_forward = total_bytes(forward);
  return with_backward ? std::max(of_forward, total_bytes(backward)) : of_forward;
}

std::int64_t Prediction::sent_bytes(bool with_backward) const {
  return forward_traffic.sent_bytes + (with_backward ? backward_traffic.sent_bytes : 0);
}

Prediction predict(const Problem& problem, const Sharding& sharding, int rank, const RankOptions& options,
                   const Staging& staging) {
  const auto ahead = make_carried_transport(rank, sharding.ranks, nullptr);
  const RankAttention attention(problem, sharding, *ahead, options);
  Prediction result;
  result.rank = rank;
  result.rows = attention.rows();
  result.kernel = attention.instruction_set();
  result.staging = staging;
  result.forward = attention.memory(Pass::forward);
  result.backward = attention.memory(Pass::backward);
  for (auto* memory : {&result.forward, &result.backward}) {
    if (staging.host_bytes > 0) memory->push_back({"transport", staging.host_bytes});
    if (staging.gpu_bytes > 0) memory->push_back({"transport_gpu", staging.gpu_bytes});
  }
  result.forward_traffic = attention.traffic(Pass::forward);
  result.backward_traffic = attention.traffic(Pass::backward);
  return result;
}

std::int64_t predict_sent_bytes(const Problem& problem, const Sharding& sharding, int rank, Strategy strategy,
                                bool with_backward) {
  if (sharding.ranks == 1) return 0;
  RankOptions options;
  options.strategy = strategy;
  options.slot_bytes = std::numeric_limits<std::int64_t>::max() / 2;
  return predict(problem, sharding, rank, options).sent_bytes(with_backward);
}

Staging staging_of(const Launch& launch, bool on_gpu) {
  Staging staging;
#ifdef ANNULUS_WITH_MPI
  if (launch.by_mpi()) staging.host_bytes = mpi_staging_bytes(launch.ranks);
#endif
  if (!launch.rendezvous.empty()) staging.host_bytes = tcp_staging_bytes(launch.ranks);
  if (!on_gpu) return staging;
  if (launch.transport == "mpi" || launch.transport == "tcp")
    staging.host_bytes += staged_staging_bytes(launch.ranks);
  else if (launch.transport == "nccl")
    staging.gpu_bytes = nccl_staging_bytes(launch.ranks);
  return staging;
}

Fit fit_slots(const Problem& problem, const Sharding& sharding, int rank, RankOptions options, const Staging& staging,
              bool with_backward, std::int64_t limit) {
  Fit fit;
  for (;; options.slot_bytes /= 2) {
    const std::int64_t bytes = predict(problem, sharding, rank, options, staging).bytes(with_backward);
    if (bytes <= limit) return {options.slot_bytes, bytes};
    fit.bytes = fit.bytes == 0 ? bytes : std::min(fit.bytes, bytes);
    if (options.strategy == Strategy::gather || options.strategy == Strategy::replicated)
      return fit;  // no slots to cut
    const Schedule schedule(problem, sharding, options.strategy, rank, options.slot_bytes);
    if (schedule.count() == 0 || schedule.count() >= kMostExchanges || options.slot_bytes / 2 < kLeastSlot) return fit;
  }
}

Traffic traffic_of(const std::vector<std::int64_t>& sent, int ranks) {
  Traffic traffic;
  double sum = 0;
  for (const std::int64_t bytes : sent) {
    sum += static_cast<double>(bytes);
    traffic.total += bytes;
    traffic.largest = std::max(traffic.largest, bytes);
  }
  if (!sent.empty() && sent.size() < static_cast<std::size_t>(ranks))
    traffic.total = static_cast<std::int64_t>(sum / static_cast<double>(sent.size()) * ranks);
  return traffic;
}

}  // namespace annulus::cli
