// annulus verify: the product against the fp64 reference and against itself, forward and backward; one problem or the
// whole grid.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/grid.h"
#include "cli/progress.h"
#include "cli/rank_report.h"
#include "cli/report.h"
#include "cli/room.h"
#include "cli/verification.h"
#include "cli/workload.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

const ProblemDefaults kDefaults = {.tokens = "1000", .segments = "64,256", .dilations = "1,4"};

struct VerifyOptions : CommandOptions {
  bool grid = false;
  Text grid_samples;
};

struct WrongProblem {
  std::string command;
  std::vector<VerifyCheck> checks;
};

VerifySettings settings_of(const CommandOptions& options, const Problem& problem, const Launch& launch) {
  VerifySettings settings;
  settings.setup = make_rank_setup(options, problem, launch);
  settings.seed = make_seed(options.problem);
  const Options& device = settings.setup.options.device;
  const std::string& set = device.instruction_set;
  const bool on_gpu = uses_gpu(options.machine);
  settings.instruction_sets = set != "auto" ? std::vector{set}
                              : on_gpu      ? std::vector{set, std::string("mma")}
                                            : instruction_sets();
  // What the CPU cannot do is refused before anything begins; ranks on GPUs see to it themselves.
  if (!on_gpu) (void)Attention(problem, {.threads = 1, .instruction_set = settings.instruction_sets.front()});
  return settings;
}

// Rank 0 knows; all ranks end alike. A collective.
int code_of_all(Rank& rank, bool passed) {
  return rank.transport.all_gather(passed ? "passed" : "wrong").front() == "passed" ? kRight : kWrongResult;
}

int threads_of(const VerifySettings& settings, const Rank& rank) {
  const int threads = settings.setup.options.device.threads;
  return threads > 0 ? threads : rank.default_threads();
}

Json checks_json(const std::vector<VerifyCheck>& checks) {
  Json list = Json::array();
  for (const VerifyCheck& check : checks)
    list.push_back({{"what", check.what},
                    {"tensor", check.tensor},
                    {"max_error", check.max_error},
                    {"bound", check.bound},
                    {"passed", check.passed}});
  return list;
}

// Tensors of one bitwise check that are all the same share a line.
std::string checks_text(const std::vector<VerifyCheck>& checks) {
  std::vector<std::vector<std::string>> rows = {{"check", "tensor", "error", "bound", ""}};
  for (const VerifyCheck& check : checks) {
    std::vector<std::string> row = {check.what, check.tensor, number_text(check.max_error), number_text(check.bound),
                                    check.passed ? "ok" : "WRONG"};
    const bool same_bits =
        check.bound == 0 && check.max_error == 0 && rows.back()[0] == row[0] && rows.back()[2] == row[2];
    if (same_bits)
      rows.back()[1] += " " + check.tensor;
    else
      rows.push_back(std::move(row));
  }
  return table_text(rows, 2);
}

// For every (what, tensor) the check that came closest to its bound, or went furthest beyond it.
class WorstChecks {
 public:
  void add(const std::vector<VerifyCheck>& checks) {
    for (const VerifyCheck& check : checks) {
      const auto known = std::ranges::find_if(
          worst_, [&](const VerifyCheck& other) { return other.what == check.what && other.tensor == check.tensor; });
      if (known == worst_.end())
        worst_.push_back(check);
      else if (closer(check, *known))
        *known = check;
    }
  }

  const std::vector<VerifyCheck>& list() const { return worst_; }

 private:
  static bool closer(const VerifyCheck& a, const VerifyCheck& b) {
    if (a.passed != b.passed) return !a.passed;
    return a.max_error * b.bound > b.max_error * a.bound;
  }

  std::vector<VerifyCheck> worst_;
};

int verify_rank(const VerifyOptions& options, const Problem& problem, const VerifySettings& settings,
                const Launch& launch, Rank& rank) {
  check_together(rank, [&] { check_reports(report_paths(options)); });
  check_room(rank, {.host_bytes = rank.reports() ? verify_bytes(problem) : 0}, "this verification");
  std::optional<Trace> trace;
  if (!options.ranks.trace.empty()) trace.emplace(rank, true);
  std::vector<VerifyCheck> checks;
  {
    Progress progress(options.report.quiet || !rank.reports(), verify_steps(settings));
    checks = verify(
        problem, settings, rank, [&](const std::string& what) { progress.step(what); }, trace ? &*trace : nullptr);
  }
  if (trace)
    trace->write(options.ranks.trace, problem, settings.setup.sharding,
                 options_of_rank(settings.setup, problem, true, rank));
  const bool passed = all_passed(checks);
  if (rank.reports()) {
    const std::string& set = settings.instruction_sets.front();
    std::ostream& out = text_output(options.report);
    out << describe(problem, set, threads_of(settings, rank))
        << describe_ranks(launch, settings.setup, settings.setup.options.slot_bytes) << checks_text(checks);
    out << (passed ? "passed: " : "WRONG: ") << checks.size() << " checks\n";
    write_report(options.report, {{"problem", problem_json(options, problem, launch.ranks)},
                                  {"environment", environment_json(set, threads_of(settings, rank), launch)},
                                  {"sharding", ranks_json(settings.setup, launch, settings.setup.options.slot_bytes)},
                                  {"passed", passed},
                                  {"checks", checks_json(checks)}});
  }
  return code_of_all(rank, passed);
}

VerifyOnGpu gpu_settings(const VerifyOptions& options) {
  return {.kernel = options.machine.kernel,
          .deterministic = options.problem.deterministic,
          .seed = make_seed(options.problem)};
}

int verify_one_on_cuda(const VerifyOptions& options) {
  const Problem problem = make_problem(options.problem, typed_sizes(options));
  const Gpu gpu(options.machine);
  check_reports(report_paths(options));
  std::vector<VerifyCheck> checks;
  {
    Progress progress(options.report.quiet, kCudaVerifySteps);
    checks = verify_on_cuda(gpu, problem, gpu_settings(options), [&](const std::string& what) { progress.step(what); });
  }
  const bool passed = all_passed(checks);
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(gpu, problem, options.machine.kernel) << checks_text(checks);
  out << (passed ? "passed: " : "WRONG: ") << checks.size() << " checks\n";
  write_report(options.report, {{"problem", problem_json(options, problem, 1)},
                                {"environment", cuda_environment(gpu, options.machine.kernel)},
                                {"passed", passed},
                                {"checks", checks_json(checks)}});
  return passed ? kRight : kWrongResult;
}

int verify_one(const VerifyOptions& options) {
  const Launch launch = make_launch(options.ranks, process_environment);
  if (uses_gpu(options.machine) && launch.ranks == 1) return verify_one_on_cuda(options);
  const GroupOptions group = make_group_options(options, options.ranks.trace.empty() ? 64 : kTracedEvents);
  const Problem problem = make_problem(options.problem, typed_sizes(options));
  const VerifySettings settings = settings_of(options, problem, launch);
  return run_ranks(launch, group, [&](Rank& rank) { return verify_rank(options, problem, settings, launch, rank); });
}

// The very words that a failure is printed with, through the very parser that will read them again.
Problem grid_problem(const Words& words) {
  CLI::App parser;
  CommandOptions options;
  add_options(parser, options, kDefaults);
  parser.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them last first
  return make_problem(options.problem, typed_sizes(options));
}

void check_grid_options(const VerifyOptions& options) {
  const ProblemOptions& typed = options.problem;
  const std::pair<const char*, bool> given[] = {{"--batch", typed.batch.has_value()},
                                                {"--head-ranges", typed.head_ranges.has_value()},
                                                {"--preset", typed.preset.has_value()},
                                                {"--classes", typed.classes.has_value()},
                                                {"--scale", typed.scale.has_value()},
                                                {"--boundaries", options.ranks.boundaries.has_value()},
                                                {"--memory-limit", options.ranks.memory_limit.has_value()},
                                                {"--trace", !options.ranks.trace.empty()},
                                                {"--pad-like-torchscale", typed.pad_like_torchscale}};
  for (const auto& [option, typed_too] : given)
    if (typed_too)
      throw InvalidArgument("--grid has its own problems; got " + std::string(option) +
                            " beside it: leave out one of them");
}

// Options that pick problems of the grid, as its words.
std::vector<Words> wanted_words(const ProblemOptions& typed) {
  const std::pair<const char*, const Text&> given[] = {
      {"--tokens", typed.tokens},        {"--heads", typed.heads},         {"--kv-heads", typed.kv_heads},
      {"--head-dim", typed.head_dim},    {"--dtype", typed.dtype},         {"--segments", typed.segments},
      {"--phase", typed.phase},          {"--dilations", typed.dilations}, {"--gradient", typed.gradient},
      {"--cu-seqlens", typed.cu_seqlens}};
  std::vector<Words> wanted;
  for (const auto& [option, text] : given)
    if (text) wanted.push_back({option, *text});
  if (typed.causal) wanted.push_back({"--causal"});
  return wanted;
}

std::vector<Words> chosen_cases(const VerifyOptions& options) {
  std::optional<std::int64_t> samples;
  if (options.grid_samples) samples = parse_size_option("--grid-samples", *options.grid_samples);
  const std::vector<Words> wanted = wanted_words(options.problem);
  std::vector<Words> cases = grid_cases(wanted, samples, make_seed(options.problem));
  if (!cases.empty() || samples == 0) return cases;
  std::string text;
  for (const Words& option : wanted)
    for (const std::string& word : option) text += " " + word;
  throw InvalidArgument("options beside --grid pick problems from it, by the grid's own values; got" + text +
                        ", which none has: leave some out, or leave out --grid");
}

// The options of ranks, as words that repeat them.
Words rank_words(const RankTexts& typed, const Launch& launch, bool reproducible) {
  Words words;
  if (launch.ranks > 1) words.insert(words.end(), {"--ranks", std::to_string(launch.ranks)});
  const std::pair<const char*, const Text&> given[] = {
      {"--layout", typed.layout}, {"--strategy", typed.strategy}, {"--slot-size", typed.slot_size}};
  for (const auto& [option, text] : given)
    if (text) words.insert(words.end(), {option, *text});
  if (reproducible) words.emplace_back("--reproducible");
  return words;
}

void report_grid(const VerifyOptions& options, const Launch& launch, std::size_t cases,
                 const std::vector<VerifyCheck>& worst, const std::vector<WrongProblem>& failures, int threads) {
  std::ostream& out = text_output(options.report);
  out << "annulus " << version() << ", " << cases << " problems; of each check the one closest to its bound:\n"
      << checks_text(worst);
  out << (failures.empty() ? "passed: " : "WRONG: ") << cases - failures.size() << " of " << cases << " problems\n";
  Json failed = Json::array();
  for (const WrongProblem& failure : failures)
    failed.push_back({{"command", failure.command}, {"checks", checks_json(failure.checks)}});
  const std::string set = make_machine(options.machine).instruction_set;
  write_report(options.report,
               {{"problem", {{"grid", true}, {"cases", cases}, {"seed", make_seed(options.problem)}}},
                {"environment", environment_json(set == "auto" ? instruction_sets().front() : set, threads, launch)},
                {"passed", failures.empty()},
                {"checks", checks_json(worst)},
                {"failed", failed}});
}

int grid_rank(const VerifyOptions& options, const Launch& launch, const std::vector<Words>& cases, Rank& rank) {
  check_together(rank, [&] { check_reports(report_paths(options)); });
  std::optional<Gpu> gpu;
  if (uses_gpu(options.machine) && launch.ranks == 1) gpu.emplace(options.machine);
  WorstChecks worst;
  std::vector<WrongProblem> failures;
  int threads = rank.default_threads();
  {
    Progress progress(options.report.quiet || !rank.reports(), static_cast<std::int64_t>(cases.size()));
    for (const Words& words : cases) {
      Words full = words;
      for (const std::string& word : rank_words(options.ranks, launch, options.problem.reproducible))
        full.push_back(word);
      full.insert(full.end(), {"--seed", std::to_string(make_seed(options.problem))});
      progress.step(command_line(full).substr(15));
      const Problem problem = grid_problem(words);
      const auto silent = [](const std::string&) {};
      std::vector<VerifyCheck> checks;
      if (gpu) {
        checks = verify_on_cuda(*gpu, problem, gpu_settings(options), silent);
      } else {
        const VerifySettings settings = settings_of(options, problem, launch);
        threads = threads_of(settings, rank);
        checks = verify(problem, settings, rank, silent);
      }
      worst.add(checks);
      if (all_passed(checks)) continue;
      failures.push_back({command_line(full), {}});
      std::ranges::copy_if(checks, std::back_inserter(failures.back().checks),
                           [](const VerifyCheck& check) { return !check.passed; });
      progress.wipe();
      text_output(options.report) << "WRONG: " << failures.back().command << "\n"
                                  << checks_text(failures.back().checks) << std::flush;
    }
  }
  if (rank.reports()) report_grid(options, launch, cases.size(), worst.list(), failures, threads);
  return code_of_all(rank, failures.empty());
}

int verify_grid(const VerifyOptions& options) {
  check_grid_options(options);
  const Launch launch = make_launch(options.ranks, process_environment);
  const GroupOptions group = make_group_options(options, 64);
  if (!uses_gpu(options.machine)) (void)settings_of(options, grid_problem({}), launch);
  const std::vector<Words> cases = chosen_cases(options);
  return run_ranks(launch, group, [&](Rank& rank) { return grid_rank(options, launch, cases, rank); });
}

}  // namespace

Command add_verify(CLI::App& app) {
  CLI::App* command = app.add_subcommand("verify", "Compare with the fp64 reference, forward and backward");
  auto options = std::make_shared<VerifyOptions>();
  add_options(*command, *options, kDefaults);
  command->add_flag("--grid", options->grid, "Many awkward problems instead of one");
  add_text(*command, "--grid-samples", options->grid_samples, "Only so many of them, chosen by --seed")->type_name("N");
  return {command, [options] {
            if (options->grid_samples && !options->grid)
              throw InvalidArgument("--grid-samples belongs to --grid; got it alone: add --grid");
            options->problem.backward = true;  // always both
            return options->grid ? verify_grid(*options) : verify_one(*options);
          }};
}

}  // namespace annulus::cli
