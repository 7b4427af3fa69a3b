// annulus bench: how fast, against the peak of the same cores in the same run.
//
// Rounds of the measured pass and of the peak alternate, so both see the same clock, the same neighbours and the same
// heat.
#include <algorithm>
#include <iostream>

#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/measurement.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/workload.h"
#include "kernels/peak.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

constexpr std::int64_t kMaxRounds = 1'000'000;
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

class Bench {
 public:
  Bench(const Attention& attention, const Schedule& schedule, Progress& progress)
      : attention_(attention), schedule_(schedule), progress_(progress) {}

  template <class Call>
  Measurement measure(const std::string& pass, double flop_per_pair, const Call& call) {
    for (std::int64_t i = 0; i < schedule_.warmup; ++i) {
      progress_.step(pass + ", warm-up " + std::to_string(i + 1));
      call();
    }
    Measurement measurement{pass, flop_per_pair * count_pairs(attention_.problem()), {}};
    double total = 0;
    for (std::int64_t i = 0; i < kMaxRounds && (i < schedule_.repeats || total < schedule_.min_seconds); ++i) {
      if (i < schedule_.repeats) progress_.step(pass + ", round " + std::to_string(i + 1));
      observe_peak();
      measurement.seconds.push_back(call());
      total += measurement.seconds.back();
    }
    observe_peak();
    std::ranges::sort(measurement.seconds);
    return measurement;
  }

  const Peak& peak() const { return peak_; }

 private:
  void observe_peak() {
    const Peak seen = measure_peak(attention_.instruction_set(), attention_.problem().dtype, attention_.threads());
    if (seen.flop_per_s > peak_.flop_per_s) peak_ = seen;
  }

  const Attention& attention_;
  const Schedule& schedule_;
  Progress& progress_;
  Peak peak_;
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

int bench(const BenchOptions& options) {
  const Schedule schedule = schedule_of(options);
  const Options machine = make_machine(options.machine);
  if (options.machine.device == "cuda")
    return bench_on_cuda(options, {schedule.repeats, schedule.warmup, schedule.min_seconds});
  const std::uint64_t seed = make_seed(options.problem);
  const bool backward = options.problem.backward;
  const Problem problem = make_problem(options.problem, typed_sizes(options.problem));
  const Attention attention(problem, machine);
  check_report(options.report);
  check_memory(plan_bytes(attention, backward), "this benchmark");

  Workload work(problem);
  std::vector<Measurement> measurements;
  Peak peak;
  {
    const std::int64_t passes = backward ? 2 : 1;
    Progress progress(options.report.quiet, passes * (schedule.warmup + schedule.repeats + 1));
    Bench timer(attention, schedule, progress);
    const auto head_dim = static_cast<double>(problem.head_dim);
    progress.step("draw inputs");
    work.draw(seed, attention.threads(), Pass::forward);
    measurements.push_back(
        timer.measure("forward", kForwardFlopPerPairAndElement * head_dim, [&] { return work.forward(attention); }));
    if (backward) {
      progress.step("draw dout");
      work.draw(seed, attention.threads(), Pass::backward);
      measurements.push_back(timer.measure("backward", kBackwardFlopPerPairAndElement * head_dim,
                                           [&] { return work.backward(attention); }));
    }
    peak = timer.peak();
  }
  for (const Measurement& measurement : measurements) check_plausible(measurement, peak);

  std::ostream& out = text_output(options.report);
  out << describe(problem, attention.instruction_set(), attention.threads()) << measurements_text(measurements, peak)
      << describe_memory(work.ledger(), plan_bytes(attention, backward));
  Json object = {{"problem", problem_json(options, problem)},
                 {"environment", environment_json(attention.instruction_set(), attention.threads())}};
  for (const Measurement& measurement : measurements) object[measurement.pass] = measurement_json(measurement, peak);
  object["peak_instruction"] = peak.instruction;
  object["traffic"] = traffic_json();
  object["memory"] = memory_json(work.ledger(), plan_bytes(attention, backward));
  object["communication"] = {{"exposed_fraction", 0.0}};
  write_report(options.report, object);
  return kRight;
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
  return {command, [options] {
            try {
              return bench(*options);
            } catch (const AbovePeak& error) {
              std::cerr << "annulus: " << error.what() << std::endl;
              return kWrongResult;
            }
          }};
}

}  // namespace annulus::cli
