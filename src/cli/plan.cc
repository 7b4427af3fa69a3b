// annulus plan: what a run on any number of ranks would take, move and wait for, before anything is allocated.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/environment.h"
#include "cli/matrix_picture.h"
#include "cli/prediction.h"
#include "cli/rank_report.h"
#include "cli/report.h"
#include "exec/forecast.h"
#include "kernels/device.h"
#include "kernels/thread_pool.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

struct PlanJob {
  Problem problem;
  Launch launch;
  RankSetup setup;
  RankOptions options;  // with the threads and slots that a run would have
  Staging staging;
  std::optional<Gpu> gpu;  // none: the CPU
  bool backward = false;
  double choice_ms = 0;  // what choosing strategies took
};

// What is known of the ranks that were looked at.
struct Outlook {
  std::vector<Prediction> ranks;
  std::vector<SentBy> sent;
  Traffic plan, minimum, ring;
  std::int64_t forward_steps = 0, backward_steps = 0;
  bool is_sample = false;
  double rank_ms = 0;  // what planning a rank took, at most

  // By the pass, since the tensors that it needs decide.
  const Prediction& largest(Pass pass) const {
    return *std::ranges::max_element(ranks, {}, [&](const Prediction& p) { return total_bytes(p.memory(pass)); });
  }
};

// Milliseconds that f takes.
template <class F>
double milliseconds(F f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// Whether it fits, and into what.
struct Room {
  std::int64_t needed_bytes = 0;
  std::optional<std::int64_t> available_bytes;
  std::string what;
  bool fits = true;
};

// Threads on this machine would share its cores; ranks that are processes are taken to have a machine like this each.
int threads_of(const PlanJob& job) {
  if (job.setup.options.device.threads > 0) return job.setup.options.device.threads;
  return job.launch.transport != "threads" ? usable_cores() : std::max(1, usable_cores() / job.launch.ranks);
}

// With --memory-limit: slots with which the largest of the ranks looked at keeps it, or the smallest ones there are.
std::int64_t slots_of(const PlanJob& job, const std::vector<int>& ranks) {
  std::int64_t slots = job.options.slot_bytes;
  if (!job.setup.memory_limit) return slots;
  for (const int rank : ranks) {
    RankOptions options = job.options;
    options.slot_bytes = slots;
    const Fit fit =
        fit_slots(job.problem, job.setup.sharding, rank, options, job.staging, job.backward, *job.setup.memory_limit);
    if (fit.slot_bytes == 0) return slots;  // the text says that it does not fit
    slots = std::min(slots, fit.slot_bytes);
  }
  return slots;
}

Outlook look_ahead(const PlanJob& job, const std::vector<int>& ranks) {
  Outlook outlook;
  const Plan plan = make_plan(job.problem);
  // Those two have everybody send to everybody, once and, for results, once more.
  const std::int64_t others = job.launch.ranks - 1;
  if (job.options.strategy == Strategy::replicated)
    outlook.forward_steps = outlook.backward_steps = 2 * others;
  else if (job.options.reproducible)
    outlook.forward_steps = outlook.backward_steps = others;
  std::vector<std::int64_t> sent, minimum, ring;
  for (const int rank : ranks) {
    outlook.rank_ms =
        std::max(outlook.rank_ms, milliseconds([&] {
                   outlook.ranks.push_back(predict(job.problem, job.setup.sharding, rank, job.options, job.staging));
                 }));
    sent.push_back(outlook.ranks.back().sent_bytes(job.backward));
    const auto sent_by = [&](Strategy strategy) {
      return predict_sent_bytes(job.problem, job.setup.sharding, rank, strategy, job.backward);
    };
    minimum.push_back(std::min(sent.back(), sent_by(Strategy::exchange)));  // dealing out may need fewer still
    ring.push_back(sent_by(Strategy::ring));
    if (job.options.strategy == Strategy::replicated || job.options.reproducible) continue;
    const Forecast forecast(job.problem, plan, job.setup.sharding, rank, job.options);
    SentBy by{rank, forecast.sent_to(Pass::forward)};
    if (job.backward) {
      const std::vector<std::int64_t> more = forecast.sent_to(Pass::backward);
      for (std::size_t i = 0; i < more.size(); ++i) by.bytes[i] += more[i];
    }
    outlook.sent.push_back(std::move(by));
    // Segments that are dealt out go out and come home.
    const std::int64_t dealing = forecast.resharding().empty() ? 0 : 2;
    outlook.forward_steps = std::max(outlook.forward_steps, forecast.count_exchanges(Pass::forward) + dealing);
    outlook.backward_steps = std::max(outlook.backward_steps, forecast.count_exchanges(Pass::backward) + dealing);
  }
  outlook.plan = traffic_of(sent, job.launch.ranks);
  outlook.minimum = traffic_of(minimum, job.launch.ranks);
  outlook.ring = traffic_of(ring, job.launch.ranks);
  outlook.is_sample = ranks.size() < static_cast<std::size_t>(job.launch.ranks);
  return outlook;
}

// Threads take the GPUs of this machine in turn, or all the one that --device names.
Room room_on_gpus(const PlanJob& job, const Outlook& outlook) {
  const cuda::Backend& backend = job.gpu->backend();
  std::int64_t largest = 0;
  for (const Prediction& rank : outlook.ranks) largest = std::max(largest, rank.gpu_bytes(job.backward));
  if (job.launch.transport != "threads")
    return {largest, job.gpu->info().free_bytes, "a rank, with a GPU like this one", true};
  const bool is_named = parse_device(job.options.device.device).index.has_value();
  const int gpus = is_named ? 1 : std::min(backend.device_count(), job.launch.ranks);
  std::vector<std::int64_t> needed(static_cast<std::size_t>(gpus), 0);
  for (int rank = 0; rank < job.launch.ranks; ++rank)  // of those that were not looked at, as much as of the largest
    needed[static_cast<std::size_t>(rank % gpus)] +=
        outlook.is_sample ? largest : outlook.ranks[static_cast<std::size_t>(rank)].gpu_bytes(job.backward);
  std::int64_t available = job.gpu->info().free_bytes;
  for (int i = 0; !is_named && i < gpus; ++i) available = std::min(available, backend.info(i).free_bytes);
  const int sharers = (job.launch.ranks + gpus - 1) / gpus;
  const std::string who = sharers == 1 ? "a rank" : std::to_string(sharers) + " ranks";
  return {std::ranges::max(needed), available, who + ", on one of " + std::to_string(gpus) + " GPUs", true};
}

Room room_for(const PlanJob& job, const Outlook& outlook) {
  Room room;
  std::int64_t largest = 0;
  std::vector<std::int64_t> all;
  for (const Prediction& rank : outlook.ranks) all.push_back(rank.bytes(job.backward));
  largest = *std::ranges::max_element(all);
  if (job.setup.memory_limit) {
    room = {largest, job.setup.memory_limit, "a rank, by --memory-limit", true};
  } else if (job.gpu) {
    room = room_on_gpus(job, outlook);
  } else if (job.launch.transport != "threads") {
    room = {largest, available_memory_bytes(), "a rank, with a machine like this one", true};
  } else {
    room = {traffic_of(all, job.launch.ranks).total, available_memory_bytes(), "all ranks, on this machine", true};
  }
  room.fits = !room.available_bytes || room.needed_bytes <= *room.available_bytes;
  return room;
}

// ---- for machines

Json memory_of(const Prediction& rank, Pass pass) {
  Json components = Json::object();
  for (const MemoryComponent& component : rank.memory(pass))
    if (component.bytes > 0) components[component.name] = component.bytes;
  return {{"rank", rank.rank}, {"bytes", total_bytes(rank.memory(pass))}, {"components", components}};
}

Json plan_json(const CommandOptions& options, const PlanJob& job, const Outlook& outlook, const Room& room) {
  const auto traffic = [&](std::int64_t Traffic::*member) -> Json {
    return {{"plan_bytes", outlook.plan.*member},
            {"minimum_bytes", outlook.minimum.*member},
            {"ring_bytes", outlook.ring.*member}};
  };
  Json traffic_json = traffic(&Traffic::total);
  traffic_json["largest_rank"] = traffic(&Traffic::largest);
  Json peers = Json::array();
  for (const SentBy& sender : outlook.sent)
    for (std::size_t to = 0; to < sender.bytes.size(); ++to)
      if (sender.bytes[to] > 0) peers.push_back({{"from", sender.rank}, {"to", to}, {"bytes", sender.bytes[to]}});
  traffic_json["peers"] = peers;
  Json strategies = Json::array();
  for (std::size_t i = 0; i < job.setup.choice.branches.size(); ++i)
    strategies.push_back({{"branch", i},
                          {"strategy", name(job.setup.choice.branches[i].strategy)},
                          {"why", job.setup.choice.branches[i].why}});
  Json memory = {{"forward", memory_of(outlook.largest(Pass::forward), Pass::forward)}};
  if (job.backward) memory["backward"] = memory_of(outlook.largest(Pass::backward), Pass::backward);
  memory["plan_bytes"] = room.needed_bytes;
  memory["available_bytes"] = room.available_bytes ? Json(*room.available_bytes) : Json(nullptr);
  Json rows = Json::array();
  std::vector<int> predicted;
  for (const Prediction& rank : outlook.ranks) predicted.push_back(rank.rank);
  for (const Prediction& rank : outlook.ranks) rows.push_back(rank.rows);
  Json steps = {{"forward", outlook.forward_steps}};
  if (job.backward) steps["backward"] = outlook.backward_steps;
  return {
      {"problem", problem_json(options, job.problem, job.launch.ranks)},
      {"environment", job.gpu ? cuda_environment(*job.gpu, outlook.ranks.front().kernel, job.launch)
                              : environment_json(outlook.ranks.front().kernel, job.options.device.threads, job.launch)},
      {"sharding", ranks_json(job.setup, job.launch, job.options.slot_bytes)},
      {"fits", room.fits},
      {"ranks_planned", predicted},
      {"rows", rows},
      {"memory", memory},
      {"traffic", traffic_json},
      {"strategy", strategies},
      {"why", job.setup.choice.why},
      {"steps", steps},
      {"planning_ms", {{"choice", job.choice_ms}, {"rank", outlook.rank_ms}}}};
}

// ---- for people

std::string memory_text(const PlanJob& job, const Outlook& outlook) {
  std::vector<std::vector<std::string>> rows = {{"memory of the largest rank", "forward"}};
  if (job.backward) rows.front().push_back("backward");
  const Prediction& forward = outlook.largest(Pass::forward);
  const Prediction& backward = outlook.largest(Pass::backward);
  const auto bytes_of = [](const std::vector<MemoryComponent>& memory, const std::string& name) {
    for (const MemoryComponent& component : memory)
      if (component.name == name) return format_bytes(component.bytes);
    return std::string("-");
  };
  for (const MemoryComponent& component : job.backward ? backward.backward : forward.forward) {
    if (component.bytes == 0) continue;
    rows.push_back({"  " + component.name, bytes_of(forward.forward, component.name)});
    if (job.backward) rows.back().push_back(format_bytes(component.bytes));
  }
  rows.push_back({"  in all", format_bytes(total_bytes(forward.forward))});
  if (job.backward) rows.back().push_back(format_bytes(total_bytes(backward.backward)));
  return table_text(rows);
}

std::string traffic_text(const Outlook& outlook) {
  return "sent     " + format_bytes(outlook.plan.total) + (outlook.is_sample ? " or so" : "") + " in all, " +
         format_bytes(outlook.plan.largest) + " by the rank that sends most\n" + "         minimum " +
         format_bytes(outlook.minimum.total) + " in all, " + format_bytes(outlook.minimum.largest) + " by one; ring " +
         format_bytes(outlook.ring.total) + " in all, " + format_bytes(outlook.ring.largest) + " by one\n";
}

void print_plan(std::ostream& out, const PlanJob& job, const Outlook& outlook, const Room& room) {
  const std::string& kernel = outlook.ranks.front().kernel;
  out << (job.gpu ? describe_on_cuda(*job.gpu, job.problem, kernel)
                  : describe(job.problem, kernel, job.options.device.threads))
      << describe_ranks(job.launch, job.setup, job.options.slot_bytes);
  const auto [least, most] = std::ranges::minmax(outlook.ranks, {}, &Prediction::rows);
  out << "rows     " << format_count(least.rows) << (least.rows == most.rows ? "" : " to " + format_count(most.rows))
      << " a rank\n";
  if (outlook.is_sample) {
    out << "looked at ranks";
    for (const Prediction& rank : outlook.ranks) out << " " << rank.rank;
    out << " of " << format_count(job.launch.ranks) << "; totals are estimates\n";
  }
  out << "steps    " << format_count(outlook.forward_steps) << " exchanges forward";
  if (job.backward) out << ", " << format_count(outlook.backward_steps) << " backward";
  out << "\nwhy      " << job.setup.choice.why << "\n";
  for (std::size_t i = 0; i < job.setup.choice.branches.size(); ++i)
    out << "branch " << i << " by " << name(job.setup.choice.branches[i].strategy) << ": "
        << job.setup.choice.branches[i].why << "\n";
  out << "planned  strategies in " << number_text(job.choice_ms) << " ms, a rank in " << number_text(outlook.rank_ms)
      << " ms\n";
  out << traffic_text(outlook) << memory_text(job, outlook);
  if (job.launch.ranks > 1) out << matrix_picture(outlook.sent);
  out << (room.fits ? "fits: " : "DOES NOT FIT: ") << room.what << ", needs " << format_bytes(room.needed_bytes)
      << " of " << (room.available_bytes ? format_bytes(*room.available_bytes) : "an unknown amount") << "\n";
}

int plan(const CommandOptions& options) {
  PlanJob job;
  job.launch = make_launch_of_plan(options.ranks, process_environment);
  if (job.launch.launcher.process > 0) return kRight;  // one process speaks for the job
  job.problem = make_problem(options.problem, typed_sizes(options));
  if (uses_gpu(options.machine)) job.gpu.emplace(options.machine);
  job.staging = staging_of(job.launch, job.gpu.has_value());
  job.choice_ms = milliseconds([&] { job.setup = make_rank_setup(options, job.problem, job.launch); });
  job.backward = options.problem.backward;
  (void)make_group_options(options, 0);
  if (!options.ranks.trace.empty())
    throw InvalidArgument("a trace shows what has run; got --trace " + options.ranks.trace +
                          " with plan, which runs nothing: give it to run, verify or bench");
  check_reports(report_paths(options));
  job.options = job.setup.options;
  job.options.device.threads = threads_of(job);
  const std::vector<int> ranks = sample_ranks(job.setup.sharding, job.problem.tokens);
  job.options.slot_bytes = slots_of(job, ranks);
  const Outlook outlook = look_ahead(job, ranks);
  const Room room = room_for(job, outlook);
  print_plan(text_output(options.report), job, outlook, room);
  write_report(options.report, plan_json(options, job, outlook, room));
  return room.fits ? kRight : kEnvironment;
}

}  // namespace

Command add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Say what a run on any number of ranks would take, without running");
  auto options = std::make_shared<CommandOptions>();
  add_options(*command, *options, {.tokens = "32k", .segments = "2048,4096", .dilations = "1,2"});
  return {command, [options] { return plan(*options); }};
}

}  // namespace annulus::cli
