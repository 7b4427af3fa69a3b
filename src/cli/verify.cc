// annulus verify: the product against the fp64 reference and against itself, forward and backward; one problem or the
// whole grid.
#include <algorithm>
#include <iostream>
#include <iterator>

#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/grid.h"
#include "cli/progress.h"
#include "cli/report.h"
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

struct Failure {
  std::string command;
  std::vector<VerifyCheck> checks;
};

VerifySettings settings_of(const CommandOptions& options) {
  const Options machine = make_machine(options.machine);
  VerifySettings settings;
  settings.threads = machine.threads;
  settings.seed = make_seed(options.problem);
  settings.instruction_sets =
      machine.instruction_set == "auto" ? instruction_sets() : std::vector<std::string>{machine.instruction_set};
  return settings;
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

int verify_one_on_cuda(const VerifyOptions& options) {
  const Problem problem = make_problem(options.problem, typed_sizes(options.problem));
  const std::unique_ptr<cuda::Backend> backend = load_cuda();
  check_report(options.report);
  check_memory(verify_bytes(problem), "this verification");
  std::vector<VerifyCheck> checks;
  {
    Progress progress(options.report.quiet, kCudaVerifySteps);
    checks = verify_on_cuda(*backend, problem, options.machine.kernel, make_seed(options.problem),
                            [&](const std::string& what) { progress.step(what); });
  }
  const bool passed = all_passed(checks);
  std::ostream& out = text_output(options.report);
  out << describe_on_cuda(*backend, problem, options.machine.kernel) << checks_text(checks);
  out << (passed ? "passed: " : "WRONG: ") << checks.size() << " checks\n";
  write_report(options.report, {{"problem", problem_json(options, problem)},
                                {"environment", cuda_environment(*backend, options.machine.kernel)},
                                {"passed", passed},
                                {"checks", checks_json(checks)}});
  return passed ? kRight : kWrongResult;
}

int verify_one(const VerifyOptions& options) {
  if (options.machine.device == "cuda") return verify_one_on_cuda(options);
  const VerifySettings settings = settings_of(options);
  const Problem problem = make_problem(options.problem, typed_sizes(options.problem));
  const Attention attention(problem,
                            {.threads = settings.threads, .instruction_set = settings.instruction_sets.front()});
  check_report(options.report);
  check_memory(verify_bytes(problem), "this verification");
  std::vector<VerifyCheck> checks;
  {
    Progress progress(options.report.quiet, verify_steps(settings));
    checks = verify(problem, settings, [&](const std::string& what) { progress.step(what); });
  }
  const bool passed = all_passed(checks);
  std::ostream& out = text_output(options.report);
  out << describe(problem, attention.instruction_set(), attention.threads()) << checks_text(checks);
  out << (passed ? "passed: " : "WRONG: ") << checks.size() << " checks\n";
  write_report(options.report, {{"problem", problem_json(options, problem)},
                                {"environment", environment_json(attention.instruction_set(), attention.threads())},
                                {"passed", passed},
                                {"checks", checks_json(checks)}});
  return passed ? kRight : kWrongResult;
}

// The very words that a failure is printed with, through the very parser that will read them again.
Problem grid_problem(const Words& words) {
  CLI::App parser;
  CommandOptions options;
  add_options(parser, options, kDefaults);
  parser.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them last first
  return make_problem(options.problem, typed_sizes(options.problem));
}

void check_grid_options(const VerifyOptions& options) {
  const ProblemOptions& typed = options.problem;
  const std::pair<const char*, bool> given[] = {{"--tokens", typed.tokens.has_value()},
                                                {"--batch", typed.batch.has_value()},
                                                {"--heads", typed.heads.has_value()},
                                                {"--kv-heads", typed.kv_heads.has_value()},
                                                {"--head-dim", typed.head_dim.has_value()},
                                                {"--dtype", typed.dtype.has_value()},
                                                {"--segments", typed.segments.has_value()},
                                                {"--dilations", typed.dilations.has_value()},
                                                {"--head-ranges", typed.head_ranges.has_value()},
                                                {"--preset", typed.preset.has_value()},
                                                {"--phase", typed.phase.has_value()},
                                                {"--classes", typed.classes.has_value()},
                                                {"--gradient", typed.gradient.has_value()},
                                                {"--cu-seqlens", typed.cu_seqlens.has_value()},
                                                {"--scale", typed.scale.has_value()},
                                                {"--pad-like-torchscale", typed.pad_like_torchscale},
                                                {"--causal", typed.causal}};
  for (const auto& [option, typed_too] : given)
    if (typed_too)
      throw InvalidArgument("--grid has its own problems; got " + std::string(option) +
                            " beside it: leave out one of them");
}

int verify_grid(const VerifyOptions& options) {
  check_grid_options(options);
  const VerifySettings settings = settings_of(options);
  std::optional<std::int64_t> samples;
  if (options.grid_samples) samples = parse_size_option("--grid-samples", *options.grid_samples);
  check_report(options.report);
  const std::vector<Words> cases = grid_cases(samples, settings.seed);
  const std::unique_ptr<cuda::Backend> gpu = options.machine.device == "cuda" ? load_cuda() : nullptr;
  std::ostream& out = text_output(options.report);
  WorstChecks worst;
  std::vector<Failure> failures;
  {
    Progress progress(options.report.quiet, static_cast<std::int64_t>(cases.size()));
    for (const Words& words : cases) {
      Words full = words;
      full.insert(full.end(), {"--seed", std::to_string(settings.seed)});
      progress.step(command_line(full).substr(15));
      const auto silent = [](const std::string&) {};
      const Problem problem = grid_problem(words);
      const std::vector<VerifyCheck> checks =
          gpu ? verify_on_cuda(*gpu, problem, options.machine.kernel, settings.seed, silent)
              : verify(problem, settings, silent);
      worst.add(checks);
      if (all_passed(checks)) continue;
      failures.push_back({command_line(full), {}});
      std::ranges::copy_if(checks, std::back_inserter(failures.back().checks),
                           [](const VerifyCheck& check) { return !check.passed; });
      progress.wipe();
      out << "WRONG: " << failures.back().command << "\n" << checks_text(failures.back().checks) << std::flush;
    }
  }
  const Attention probe(grid_problem(cases.empty() ? Words{} : cases.front()),
                        {.threads = settings.threads, .instruction_set = settings.instruction_sets.front()});
  out << "annulus " << version() << ", " << cases.size() << " problems; of each check the one closest to its bound:\n"
      << checks_text(worst.list());
  out << (failures.empty() ? "passed: " : "WRONG: ") << cases.size() - failures.size() << " of " << cases.size()
      << " problems\n";
  Json failed = Json::array();
  for (const Failure& failure : failures)
    failed.push_back({{"command", failure.command}, {"checks", checks_json(failure.checks)}});
  write_report(options.report, {{"problem", {{"grid", true}, {"cases", cases.size()}, {"seed", settings.seed}}},
                                {"environment", gpu ? cuda_environment(*gpu, options.machine.kernel)
                                                    : environment_json(probe.instruction_set(), probe.threads())},
                                {"passed", failures.empty()},
                                {"checks", checks_json(worst.list())},
                                {"failed", failed}});
  return failures.empty() ? kRight : kWrongResult;
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
