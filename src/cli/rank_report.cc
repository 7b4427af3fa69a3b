#include "cli/rank_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/collection.h"
#include "cli/environment.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

std::int64_t sum_of(const std::vector<RankReport>& reports, std::int64_t RankReport::*member) {
  std::int64_t sum = 0;
  for (const RankReport& report : reports) sum += report.*member;
  return sum;
}

std::int64_t most_of(const std::vector<RankReport>& reports, std::int64_t RankReport::*member) {
  return (*std::ranges::max_element(reports, {}, member)).*member;
}

const RankReport& largest(const std::vector<RankReport>& reports) {
  return *std::ranges::max_element(reports, {}, &RankReport::peak_bytes);
}

Json as_json(const RankReport& report) {
  Json components = Json::object();
  for (const MemoryComponent& component : report.components) components[component.name] = component.bytes;
  return {{"sent", report.sent_bytes},
          {"plan_sent", report.plan_sent_bytes},
          {"minimum", report.minimum_bytes},
          {"ring", report.ring_bytes},
          {"peak", report.peak_bytes},
          {"plan", report.plan_bytes},
          {"process", report.process_peak_bytes},
          {"components", components},
          {"pass_s", report.pass_s},
          {"wait_s", report.wait_s}};
}

RankReport report_of(const Json& json) {
  RankReport report;
  report.sent_bytes = json["sent"];
  report.plan_sent_bytes = json["plan_sent"];
  report.minimum_bytes = json["minimum"];
  report.ring_bytes = json["ring"];
  report.peak_bytes = json["peak"];
  report.plan_bytes = json["plan"];
  report.process_peak_bytes = json["process"];
  for (const auto& [component, bytes] : json["components"].items()) report.components.push_back({component, bytes});
  report.pass_s = json["pass_s"];
  report.wait_s = json["wait_s"];
  return report;
}

double exposed(const RankReport& report) { return report.pass_s > 0 ? report.wait_s / report.pass_s : 0; }

std::string transport_text(const std::string& transport) {
  return transport == "mpi" ? "MPI" : transport == "nccl" ? "NCCL" : transport == "tcp" ? "TCP" : transport;
}

}  // namespace

RankReport make_rank_report(const RankAttention& attention, const RankSetup& setup, const Workload& work,
                            const Rank& rank, bool with_backward) {
  RankReport report;
  const auto sent_by = [&](Strategy strategy) {
    return predict_sent_bytes(attention.problem(), setup.sharding, rank.index(), strategy, with_backward);
  };
  report.plan_sent_bytes = attention.traffic(Pass::forward).sent_bytes;
  if (with_backward) report.plan_sent_bytes += attention.traffic(Pass::backward).sent_bytes;
  report.minimum_bytes = std::min(report.plan_sent_bytes, sent_by(Strategy::exchange));  // dealing out may need fewer
  report.ring_bytes = sent_by(Strategy::ring);
  const std::int64_t staging = rank.transport.staging_bytes(), on_gpu = rank.transport.device_staging_bytes();
  report.peak_bytes = work.ledger().peak_bytes() + staging;
  report.plan_bytes = plan_bytes(attention, with_backward) + staging;
  report.components = work.ledger().components();
  if (staging > on_gpu) report.components.push_back({"transport", staging - on_gpu});
  if (on_gpu > 0) report.components.push_back({"transport_gpu", on_gpu});
  report.process_peak_bytes = process_peak_bytes();
  return report;
}

std::vector<RankReport> collect_reports(Rank& rank, const RankReport& report) {
  std::vector<RankReport> reports;
  for (const std::string& text : collect_texts(rank.transport, as_json(report).dump()))
    reports.push_back(report_of(Json::parse(text)));
  return reports;
}

Json traffic_json(const std::vector<RankReport>& reports) {
  const auto numbers = [&](auto of) -> Json {
    return {{"sent_bytes", of(reports, &RankReport::sent_bytes)},
            {"plan_bytes", of(reports, &RankReport::plan_sent_bytes)},
            {"minimum_bytes", of(reports, &RankReport::minimum_bytes)},
            {"ring_bytes", of(reports, &RankReport::ring_bytes)}};
  };
  Json traffic = numbers(sum_of);
  traffic["largest_rank"] = numbers(most_of);
  return traffic;
}

Json memory_json(const std::vector<RankReport>& reports) {
  const RankReport& most = largest(reports);
  Json components = Json::object();
  for (const MemoryComponent& component : most.components) components[component.name] = component.bytes;
  Json by_rank = Json::array();
  for (const RankReport& report : reports)
    by_rank.push_back({{"peak_bytes", report.peak_bytes},
                       {"plan_bytes", report.plan_bytes},
                       {"process_peak_bytes", report.process_peak_bytes}});
  return {{"peak_bytes", most.peak_bytes},
          {"plan_bytes", most.plan_bytes},
          {"components", components},
          {"process_peak_bytes", most_of(reports, &RankReport::process_peak_bytes)},
          {"by_rank", by_rank}};
}

Json communication_json(const std::vector<RankReport>& reports) {
  double passes = 0, waits = 0, worst = 0;
  for (const RankReport& report : reports) {
    passes += report.pass_s;
    waits += report.wait_s;
    worst = std::max(worst, exposed(report));
  }
  return {{"exposed_fraction", passes > 0 ? waits / passes : 0}, {"worst_exposed_fraction", worst}};
}

std::string describe_memory(const std::vector<RankReport>& reports) {
  const RankReport& most = largest(reports);
  return "memory   " + format_bytes(most.peak_bytes) + " in tensors and workspace" +
         (reports.size() > 1 ? " of the largest rank" : "") + " (plan " + format_bytes(most.plan_bytes) +
         "), process peak " + format_bytes(most_of(reports, &RankReport::process_peak_bytes)) + "\n";
}

std::string describe_traffic(const std::vector<RankReport>& reports) {
  if (reports.size() == 1) return "";
  return "traffic  " + format_bytes(sum_of(reports, &RankReport::sent_bytes)) + " sent (plan " +
         format_bytes(sum_of(reports, &RankReport::plan_sent_bytes)) + ", minimum " +
         format_bytes(sum_of(reports, &RankReport::minimum_bytes)) + ", ring " +
         format_bytes(sum_of(reports, &RankReport::ring_bytes)) + "), at most " +
         format_bytes(most_of(reports, &RankReport::sent_bytes)) + " by one rank\n";
}

std::string describe_ranks(const Launch& launch, const RankSetup& setup, std::int64_t slot_bytes) {
  if (launch.ranks == 1 && launch.launcher.name == "none") return "";
  return std::to_string(launch.ranks) + (launch.ranks == 1 ? " rank" : " ranks") + " by " +
         transport_text(launch.transport) + ", launcher " + launch.launcher.name + ", layout " +
         std::string(name(setup.sharding.layout)) + ", strategy " + strategy_text(setup) + ", slots of " +
         format_bytes(slot_bytes) + "\n";
}

}  // namespace annulus::cli
