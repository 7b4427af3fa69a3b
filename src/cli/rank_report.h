// What a rank has to say about its run, and what rank 0 makes of all of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/group.h"
#include "cli/prediction.h"
#include "cli/rank_setup.h"
#include "cli/report.h"
#include "cli/workload.h"

namespace annulus::cli {

// What one rank held and moved, in one forward and perhaps one backward pass.
struct RankReport {
  std::int64_t sent_bytes = 0;
  std::int64_t plan_sent_bytes = 0;
  std::int64_t minimum_bytes = 0;  // with only the rows that are needed: `exchange`
  std::int64_t ring_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t plan_bytes = 0;
  std::int64_t process_peak_bytes = 0;
  std::vector<MemoryComponent> components;
  double pass_s = 0;  // of all passes that were timed
  double wait_s = 0;  // of that, waiting for other ranks
};

RankReport make_rank_report(const RankAttention& attention, const RankSetup& setup, const Workload& work,
                            const Rank& rank, bool with_backward);

// Of all ranks, on rank 0; nothing elsewhere. A collective.
std::vector<RankReport> collect_reports(Rank& rank, const RankReport& report);

Json traffic_json(const std::vector<RankReport>& reports);
// The largest rank's, and in short every rank's.
Json memory_json(const std::vector<RankReport>& reports);
Json communication_json(const std::vector<RankReport>& reports);

std::string describe_memory(const std::vector<RankReport>& reports);
std::string describe_traffic(const std::vector<RankReport>& reports);  // empty for one rank
std::string describe_ranks(const Launch& launch, const RankSetup& setup, std::int64_t slot_bytes);

}  // namespace annulus::cli
