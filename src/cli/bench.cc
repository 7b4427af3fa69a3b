// annulus bench: how fast, against the peak of the same cores in the same run.
//
// Rounds of the measured pass and of the peak alternate, so both see the same clock, the same neighbours and the same
// heat.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/measurement.h"
#include "cli/progress.h"
#include "cli/rank_report.h"
#include "cli/report.h"
#include "cli/room.h"
#include "cli/trace.h"
#include "cli/workload.h"
#include "exec/schedule.h"
#include "kernels/peak.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

constexpr double kMostOverall = 5;                     // times --min-seconds, rounds and all that lies between them
constexpr double kLeastOverall = 2;                    // seconds
constexpr double kForwardFlopPerPairAndElement = 4;    // two products
constexpr double kBackwardFlopPerPairAndElement = 10;  // five

struct BenchOptions : CommandOptions {
  std::string repeats = "7";
  std::string warmup = "1";
  std::string min_seconds = "1";
};

struct Schedule {
  std::int64_t repeats = 0;
  std::int64_t warmup = 0;
  double min_seconds = 0;
};

Schedule schedule_of(const BenchOptions& options) {
  const Schedule schedule = {parse_size_option("--repeats", options.repeats),
                             parse_size_option("--warmup", options.warmup),
                             parse_number_option("--min-seconds", options.min_seconds)};
  if (schedule.repeats < 1 || schedule.repeats > kMaxRounds)
    throw InvalidArgument("--repeats must lie in [1, " + format_count(kMaxRounds) + "]; got " + options.repeats +
                          ": give another number");
  if (schedule.warmup > kMaxRounds)
    throw InvalidArgument("--warmup must be at most " + format_count(kMaxRounds) + "; got " + options.warmup +
                          ": give a smaller number");
  if (schedule.min_seconds < 0)
    throw InvalidArgument("--min-seconds must be at least 0; got " + options.min_seconds + ": give a larger one");
  return schedule;
}

// Times one pass after the other on all ranks at once. A round takes as long as its slowest rank.
class Bench {
 public:
  Bench(const RankAttention& attention, const Schedule& schedule, Rank& rank, Progress& progress, Trace& trace)
      : attention_(attention), schedule_(schedule), rank_(rank), progress_(progress), trace_(trace) {}

  Measurement measure(Pass pass, double flop_per_pair, Workload& work) {
    const std::string what = pass == Pass::forward ? "forward" : "backward";
    for (std::int64_t i = 0; i < schedule_.warmup; ++i) {
      progress_.step(what + ", warm-up " + std::to_string(i + 1));
      (void)round(pass, work);
    }
    Measurement measurement{what, flop_per_pair * count_pairs(attention_.problem()), {}};
    double total = 0, total_at_peak = 0;
    const auto start = Trace::Clock::now();
    bool enough = false;
    for (std::int64_t i = 0; i < kMaxRounds && (i < schedule_.repeats || !enough); ++i) {
      if (i < schedule_.repeats) progress_.step(what + ", round " + std::to_string(i + 1));
      if (i < schedule_.repeats || total - total_at_peak > kPeakEvery) {
        observe_peak();
        total_at_peak = total;
      }
      const std::int64_t sent_before = rank_.transport.sent_bytes();
      const auto begin = Trace::Clock::now();
      measurement.seconds.push_back(round(pass, work));
      trace_.add_pass(pass, begin);
      count_waits(begin);
      if (i == 0) sent_bytes_ += rank_.transport.sent_bytes() - sent_before;
      total += measurement.seconds.back();
      // What lies between the rounds takes longer than a small problem does, and must not go on for minutes.
      enough = total >= schedule_.min_seconds ||
               slowest(since(start)) >= std::max(kLeastOverall, kMostOverall * schedule_.min_seconds);
    }
    observe_peak();
    std::ranges::sort(measurement.seconds);
    return measurement;
  }

  const Peak& peak() const { return peak_; }  // of all ranks together
  // Of one round of each pass, and of all timed rounds.
  void report_to(RankReport& report) const {
    report.sent_bytes = sent_bytes_;
    report.pass_s = pass_s_;
    report.wait_s = wait_s_;
  }

 private:
  double round(Pass pass, Workload& work) {
    rank_.meet();
    own_s_ = pass == Pass::forward ? work.forward(attention_) : work.backward(attention_);
    return slowest(own_s_);
  }

  static double since(Trace::Clock::time_point begin) {
    return std::chrono::duration<double>(Trace::Clock::now() - begin).count();
  }

  // All ranks get the same number, so that all of them go on or stop.
  double slowest(double seconds) {
    double most = 0;
    for (const std::string& text : rank_.transport.all_gather(number_text(seconds, 17)))
      most = std::max(most, std::stod(text));
    return most;
  }

  void count_waits(Trace::Clock::time_point begin) {
    const std::vector<Event> events = rank_.recorder.events();
    for (auto event = events.rbegin(); event != events.rend() && event->begin >= begin; ++event)
      if (is_waiting(*event)) wait_s_ += std::chrono::duration<double>(event->end - event->begin).count();
    pass_s_ += own_s_;
  }

  // Ranks that share cores must not measure at the same time: the first of them does, with as many threads as all of
  // them have.
  void observe_peak() {
    Peak seen;
    rank_.busy([&] {
      if (rank_.on_gpu()) {
        if (rank_.is_first_on_device) seen = peak_of_gpu(rank_.device, attention_.problem().dtype);
        return;
      }
      const int wanted = attention_.threads() * rank_.neighbours.on_cores;
      if (rank_.neighbours.is_first)
        seen = measure_peak(attention_.instruction_set(), attention_.problem().dtype,
                            std::min(wanted, std::max(rank_.neighbours.cores, attention_.threads())));
    });
    double sum = 0;
    for (const std::string& text : rank_.transport.all_gather(number_text(seen.flop_per_s, 17))) sum += std::stod(text);
    if (sum <= peak_.flop_per_s) return;
    peak_ = {sum, seen.instruction};
  }

  const RankAttention& attention_;
  const Schedule& schedule_;
  Rank& rank_;
  Progress& progress_;
  Trace& trace_;
  Peak peak_;
  double own_s_ = 0, pass_s_ = 0, wait_s_ = 0;
  std::int64_t sent_bytes_ = 0;
};

Json measurement_json(const Measurement& measurement, const Peak& peak) {
  const double rate = measurement.rate(measurement.median());
  return {{"ms",
           {{"median", measurement.median() * 1e3},
            {"best", measurement.best() * 1e3},
            {"worst", measurement.worst() * 1e3}}},
          {"rounds", measurement.seconds.size()},
          {"flop", measurement.flop},
          {"flop_per_s", rate},
          {"peak_flop_per_s", peak.flop_per_s},
          {"peak_fraction", peak.flop_per_s > 0 ? rate / peak.flop_per_s : 0}};
}

std::string fraction_bar(double fraction) {
  constexpr int kCells = 20;
  std::string bar;
  for (int cell = 0; cell < kCells; ++cell) bar += fraction * kCells >= cell + 0.5 ? "█" : "░";
  return bar;
}

std::string measurements_text(const std::vector<Measurement>& measurements, const Peak& peak) {
  std::vector<std::vector<std::string>> rows = {{"", "median", "best", "worst", "rounds", "GFLOP/s", "of peak", ""}};
  for (const Measurement& measurement : measurements) {
    const double rate = measurement.rate(measurement.median());
    const double fraction = peak.flop_per_s > 0 ? rate / peak.flop_per_s : 0;
    rows.push_back({measurement.pass, duration_text(measurement.median()), duration_text(measurement.best()),
                    duration_text(measurement.worst()), std::to_string(measurement.seconds.size()),
                    number_text(rate / 1e9, 4), number_text(fraction * 100) + " %", fraction_bar(fraction)});
  }
  return table_text(rows) + "peak     " + number_text(peak.flop_per_s / 1e9, 4) + " GFLOP/s, " + peak.instruction +
         ", measured between the rounds\n";
}

// At least as many as a recorder must keep to know all waits of one pass. (A branch may go round once more, alone.)
std::size_t events_of_a_pass(const Problem& problem, const RankSetup& setup) {
  const bool streams = setup.options.strategy != Strategy::replicated;
  const annulus::Schedule schedule(problem, setup.sharding, streams ? setup.options.strategy : Strategy::ring, 0,
                                   setup.options.slot_bytes);
  const auto exchanges = static_cast<std::size_t>(schedule.count() + 2 * setup.sharding.ranks + 4);
  return 8 * (problem.pattern.branches.size() + 1) * exchanges;
}

struct BenchJob {
  const BenchOptions& options;
  Schedule schedule;
  Launch launch;
  Problem problem;
  RankSetup setup;
};

int bench_rank(const BenchJob& job, Rank& rank) {
  const BenchOptions& options = job.options;
  const bool backward = options.problem.backward;
  const std::uint64_t seed = make_seed(options.problem);
  check_together(rank, [&] { check_reports(report_paths(options)); });
  const RankOptions rank_options = options_of_rank(job.setup, job.problem, backward, rank);
  const RankAttention attention(job.problem, job.setup.sharding, rank.transport, rank_options);
  check_room(rank, needs_of(attention, backward, rank), "this benchmark");

  Workload work(job.problem, holdings_of(job.setup, job.problem).of(rank.index()));
  work.compute_on(rank.device, rank.transport);
  Trace trace(rank, !options.ranks.trace.empty());
  Progress progress(options.report.quiet || !rank.reports(),
                    (backward ? 2 : 1) * (job.schedule.warmup + job.schedule.repeats + 1));
  Bench timer(attention, job.schedule, rank, progress, trace);
  const auto head_dim = static_cast<double>(job.problem.head_dim);
  progress.step("draw inputs");
  rank.busy([&] { work.draw(seed, threads_of(attention, rank), Pass::forward); });
  std::vector<Measurement> measurements = {
      timer.measure(Pass::forward, kForwardFlopPerPairAndElement * head_dim, work)};
  if (backward) {
    progress.step("draw dout");
    rank.busy([&] { work.draw(seed, threads_of(attention, rank), Pass::backward); });
    measurements.push_back(timer.measure(Pass::backward, kBackwardFlopPerPairAndElement * head_dim, work));
  }
  progress.wipe();
  const Peak peak = timer.peak();
  for (const Measurement& measurement : measurements) check_plausible(measurement, peak);  // alike on all ranks

  RankReport own = make_rank_report(attention, job.setup, work, rank, backward);
  timer.report_to(own);
  const std::vector<RankReport> reports = collect_reports(rank, own);
  if (!options.ranks.trace.empty()) trace.write(options.ranks.trace, job.problem, job.setup.sharding, rank_options);
  if (rank.reports()) {
    const Json communication = communication_json(reports);
    std::ostream& out = text_output(options.report);
    out << describe_machine(attention, rank) << describe_ranks(job.launch, job.setup, rank_options.slot_bytes)
        << measurements_text(measurements, peak) << describe_traffic(reports);
    if (reports.size() > 1)
      out << "exposed  " << number_text(communication["exposed_fraction"].get<double>() * 100)
          << " % of the time waiting for other ranks, "
          << number_text(communication["worst_exposed_fraction"].get<double>() * 100) << " % on the worst rank\n";
    out << describe_memory(reports);
    Json object = {{"problem", problem_of(options, attention, rank)},
                   {"environment", environment_of(attention, job.launch, rank)},
                   {"sharding", ranks_json(job.setup, job.launch, rank_options.slot_bytes)}};
    for (const Measurement& measurement : measurements) object[measurement.pass] = measurement_json(measurement, peak);
    object["peak_instruction"] = peak.instruction;
    object["traffic"] = traffic_json(reports);
    object["memory"] = memory_json(reports);
    object["communication"] = communication;
    write_report(options.report, object);
  }
  rank.meet();
  return kRight;
}

int bench(const BenchOptions& options) {
  const Launch launch = make_launch(options.ranks, process_environment);
  if (uses_gpu(options.machine) && launch.ranks == 1) {
    const Schedule schedule = schedule_of(options);
    return bench_on_cuda(options, {schedule.repeats, schedule.warmup, schedule.min_seconds});
  }
  const Problem problem = make_problem(options.problem, typed_sizes(options));
  const BenchJob job{options, schedule_of(options), launch, problem, make_rank_setup(options, problem, launch)};
  const GroupOptions group =
      make_group_options(options, options.ranks.trace.empty() ? events_of_a_pass(problem, job.setup) : kTracedEvents);
  (void)make_seed(options.problem);
  if (!uses_gpu(options.machine)) (void)Attention(problem, job.setup.options.device);  // refuses before anything begins
  return run_ranks(launch, group, [&](Rank& rank) {
    try {
      return bench_rank(job, rank);
    } catch (const AbovePeak& error) {
      if (rank.reports()) print_error(error.what());
      return kWrongResult;
    }
  });
}

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure time, rate and memory against the machine's peak");
  auto options = std::make_shared<BenchOptions>();
  add_options(*command, *options, {.tokens = "32k", .segments = "2048,4096", .dilations = "1,2"});
  command->add_option("--repeats", options->repeats, "Timed rounds at least (default 7)")->type_name("N");
  command->add_option("--warmup", options->warmup, "Rounds before them (default 1)")->type_name("N");
  command->add_option("--min-seconds", options->min_seconds, "Go on until a pass was timed for so long (default 1)")
      ->type_name("S");
  return {command, [options] { return bench(*options); }};
}

}  // namespace annulus::cli
