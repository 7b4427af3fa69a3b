// annulus run: attention, and its gradients, from files or from drawn inputs, to files and checksums.
#include <iostream>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/files.h"
#include "cli/picture.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

struct RunOptions : CommandOptions {
  FileOptions files;
  Text picture;  // a head
};

struct Seconds {
  double forward = 0;
  double backward = 0;
};

Json checksums_json(const Workload& work, Pass pass, int threads) {
  Json sums = Json::object();
  for (const std::string& name : result_names(pass))
    sums[name] = checksum_text(checksum(work.data(name), size_of(work.dtype(name)), work.elements(name), threads));
  return sums;
}

Json run_json(const RunOptions& options, const Attention& attention, const Workload& work, Seconds seconds) {
  Json object = {{"problem", problem_json(options, attention.problem())},
                 {"environment", environment_json(attention.instruction_set(), attention.threads())},
                 {"seconds", seconds.forward + seconds.backward},
                 {"forward_seconds", seconds.forward}};
  if (options.problem.backward) object["backward_seconds"] = seconds.backward;
  object["memory"] = memory_json(work.ledger(), plan_bytes(attention, options.problem.backward));
  object["traffic"] = traffic_json();
  object["checksum"] =
      checksums_json(work, options.problem.backward ? Pass::backward : Pass::forward, attention.threads());
  return object;
}

void print_run(std::ostream& out, const RunOptions& options, const Attention& attention, const Json& object) {
  out << describe(attention.problem(), attention.instruction_set(), attention.threads());
  out << "forward  " << duration_text(object["forward_seconds"]) << "\n";
  if (options.problem.backward) out << "backward " << duration_text(object["backward_seconds"]) << "\n";
  for (const auto& [tensor, sum] : object["checksum"].items())
    out << (tensor == "out" ? "checksum " : "         ") << tensor << " " << sum.get<std::string>() << "\n";
}

int run(const RunOptions& options) {
  const Options machine = make_machine(options.machine);
  if (options.machine.device == "cuda") return run_on_cuda(options, options.files);
  const bool backward = options.problem.backward;
  const Pass pass = backward ? Pass::backward : Pass::forward;
  InputFiles inputs(options.files, options.problem);
  const Problem problem = make_problem(options.problem, inputs.given() ? inputs.sizes() : typed_sizes(options.problem));
  const std::uint64_t seed = make_seed(options.problem);
  std::string picture;
  if (options.picture) picture = pattern_picture(problem, parse_size_option("--picture", *options.picture));
  const Attention attention(problem, machine);
  check_outputs(options.files, options.report, pass);

  Workload work(problem);
  std::int64_t mapped_bytes = 0;
  if (inputs.given())
    for (const std::string& name : input_names(pass)) mapped_bytes += work.bytes(name);
  check_memory(plan_bytes(attention, backward) - mapped_bytes, "this run");

  const auto provide = [&](Pass needed) {
    if (inputs.given())
      inputs.lend(work, needed);
    else
      work.draw(seed, attention.threads(), needed);
  };
  Seconds seconds;
  std::vector<std::string> written;
  Json object;
  {
    Progress progress(options.report.quiet, backward ? 4 : 3);
    progress.step(inputs.given() ? "map inputs" : "draw inputs");
    provide(Pass::forward);
    progress.step("forward");
    seconds.forward = work.forward(attention);
    if (backward) {
      progress.step("backward");
      provide(Pass::backward);
      seconds.backward = work.backward(attention);
    }
    progress.step("write results");
    object = run_json(options, attention, work, seconds);
    written = write_outputs(options.files, work, pass, inputs.without_batch());
  }
  std::ostream& out = text_output(options.report);
  print_run(out, options, attention, object);
  out << describe_memory(work.ledger(), plan_bytes(attention, backward));
  for (const std::string& path : written) out << "wrote    " << path << "\n";
  out << picture;
  write_report(options.report, object);
  return kRight;
}

}  // namespace

Command add_run(CLI::App& app) {
  CLI::App* command = app.add_subcommand("run", "Compute attention from files or from drawn inputs");
  auto options = std::make_shared<RunOptions>();
  add_options(*command, *options, {.tokens = "4k", .segments = "2048,4096", .dilations = "1,2"});
  add_file_options(*command, options->files);
  add_text(*command, "--picture", options->picture, "Draw the pattern of one head (default 0)")
      ->type_name("HEAD")
      ->expected(0, 1)
      ->default_str("0");
  return {command, [options] { return run(*options); }};
}

}  // namespace annulus::cli
