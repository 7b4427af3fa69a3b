#include "cli/room.h"

#include <algorithm>
#include <optional>

#include "cli/environment.h"
#include "cli/report.h"
#include "cli/workload.h"
#include "kernels/cuda/load.h"
#include "kernels/device.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

// Of all ranks that name the same place. A collective.
std::int64_t sum_of_sharers(Rank& rank, const std::string& place, std::int64_t bytes) {
  std::int64_t sum = 0;
  for (const std::string& text : rank.transport.all_gather(place + " " + std::to_string(bytes))) {
    const auto blank = text.rfind(' ');
    if (text.substr(0, blank) == place) sum += std::stoll(text.substr(blank));
  }
  return sum;
}

}  // namespace

Needs needs_of(const RankAttention& attention, bool backward, const Rank& rank) {
  const std::int64_t bytes = plan_bytes(attention, backward);
  if (!rank.on_gpu()) return {bytes, 0};
  std::int64_t of_tensors = 0;
  for (const MemoryComponent& part : attention.memory(backward ? Pass::backward : Pass::forward))
    if (is_tensor(part.name)) of_tensors += part.bytes;
  return {of_tensors, bytes};
}

void check_room(Rank& rank, const Needs& needs, const std::string& what) {
  // Every rank asks before any of them allocates.
  const std::optional<std::int64_t> on_host = available_memory_bytes();
  const std::int64_t on_gpu =
      rank.on_gpu() ? cuda::load_backend().info(*parse_device(rank.device).index).free_bytes : 0;
  const std::string& host = rank.neighbours.host;
  const std::int64_t host_bytes = sum_of_sharers(rank, host, needs.host_bytes);
  const std::int64_t gpu_bytes = sum_of_sharers(rank, host + " " + rank.gpu, needs.gpu_bytes);
  const std::string where = rank.transport.size() > 1 ? " on " + host : "";
  std::string trouble;
  if (on_host && host_bytes > *on_host)
    trouble = what + " must fit into the memory that is left; it needs " + format_bytes(host_bytes) + " and " +
              format_bytes(*on_host) + " are available" + where + ": give smaller sizes or use a larger machine";
  else if (gpu_bytes > on_gpu)
    trouble = what + " must fit into the memory of the GPUs; its ranks on " + rank.device + " need " +
              format_bytes(gpu_bytes) + " and " + format_bytes(on_gpu) + " are free" + where +
              ": give smaller sizes or use more GPUs";
  for (const std::string& text : rank.transport.all_gather(trouble))
    if (!text.empty()) throw OutOfMemory(text);
}

}  // namespace annulus::cli
