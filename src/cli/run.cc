// annulus run: attention, and its gradients, from files or from drawn inputs, to files and checksums.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/cuda.h"
#include "cli/files.h"
#include "cli/picture.h"
#include "cli/progress.h"
#include "cli/rank_report.h"
#include "cli/report.h"
#include "cli/room.h"
#include "cli/trace.h"
#include "numeric/size.h"

namespace annulus::cli {
namespace {

struct RunOptions : CommandOptions {
  FileOptions files;
  Text picture;  // a head
};

// All that is decided before ranks begin.
struct RunJob {
  const RunOptions& options;
  Problem problem;
  InputFiles& inputs;
  RankSetup setup;
  Launch launch;
  std::uint64_t seed = 0;
  std::string picture;
  Pass pass = Pass::forward;
};

// Of the whole tensors, on every rank. A collective.
Json checksums_json(const Workload& work, const Holdings& holdings, Pass pass, int threads, Rank& rank) {
  const std::vector<std::string> names = result_names(pass);
  std::string parts;
  rank.busy([&] {
    for (const std::string& name : names) {
      const ShardMap& own = holdings.owned(is_key_side(name))[static_cast<std::size_t>(rank.index())];
      parts += checksum_text(checksum(work.data(name), size_of(work.dtype(name)), own, work.row_shape(name), threads));
    }
  });
  std::vector<std::uint64_t> sums(names.size(), 0);
  for (const std::string& text : rank.transport.all_gather(parts))
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += std::stoull(text.substr(16 * i, 16), nullptr, 16);
  Json json = Json::object();
  for (std::size_t i = 0; i < sums.size(); ++i) json[names[i]] = checksum_text(sums[i]);
  return json;
}

// The slowest rank's seconds. A collective.
double slowest(Rank& rank, double seconds) {
  double most = 0;
  for (const std::string& text : rank.transport.all_gather(number_text(seconds, 17)))
    most = std::max(most, std::stod(text));
  return most;
}

void print_run(std::ostream& out, const RunJob& job, const std::string& machine, const Json& object) {
  out << machine;
  out << describe_ranks(job.launch, job.setup, object["sharding"]["slot_bytes"]);
  out << "forward  " << duration_text(object["forward_seconds"]) << "\n";
  if (job.options.problem.backward) out << "backward " << duration_text(object["backward_seconds"]) << "\n";
  for (const auto& [tensor, sum] : object["checksum"].items())
    out << (tensor == "out" ? "checksum " : "         ") << tensor << " " << sum.get<std::string>() << "\n";
}

int run_rank(RunJob& job, Rank& rank) {
  const RunOptions& options = job.options;
  const bool backward = options.problem.backward;
  check_together(rank, [&] { check_outputs(options.files, report_paths(options), job.pass); });
  const Holdings holdings = holdings_of(job.setup, job.problem);
  const RankOptions rank_options = options_of_rank(job.setup, job.problem, backward, rank);
  const RankAttention attention(job.problem, job.setup.sharding, rank.transport, rank_options);
  Workload work(job.problem, holdings.of(rank.index()));
  work.compute_on(rank.device, rank.transport);
  Needs needs = needs_of(attention, backward, rank);
  needs.host_bytes -= job.inputs.lent_bytes(work, job.pass);
  check_room(rank, needs, "this run");

  Trace trace(rank, !options.ranks.trace.empty());
  const std::int64_t sent_before = rank.transport.sent_bytes();
  const auto provide = [&](Pass pass) {
    rank.busy([&] {
      if (job.inputs.given())
        job.inputs.lend(work, pass);
      else
        work.draw(job.seed, threads_of(attention, rank), pass);
    });
  };
  const auto timed = [&](Pass pass) {
    rank.meet();  // and begin together
    const auto begin = Trace::Clock::now();
    const double seconds = pass == Pass::forward ? work.forward(attention) : work.backward(attention);
    trace.add_pass(pass, begin);
    return seconds;
  };
  Progress progress(options.report.quiet || !rank.reports(), backward ? 4 : 3);
  progress.step(job.inputs.given() ? "map inputs" : "draw inputs");
  provide(Pass::forward);
  progress.step("forward");
  double forward_s = timed(Pass::forward), backward_s = 0;
  if (backward) {
    progress.step("backward");
    provide(Pass::backward);
    backward_s = timed(Pass::backward);
  }
  const std::int64_t sent = rank.transport.sent_bytes() - sent_before;
  forward_s = slowest(rank, forward_s);
  backward_s = slowest(rank, backward_s);

  progress.step("write results");
  Json object = {{"problem", problem_of(options, attention, rank)},
                 {"environment", environment_of(attention, job.launch, rank)},
                 {"sharding", ranks_json(job.setup, job.launch, rank_options.slot_bytes)},
                 {"seconds", forward_s + backward_s},
                 {"forward_seconds", forward_s}};
  if (backward) object["backward_seconds"] = backward_s;
  RankReport report = make_rank_report(attention, job.setup, work, rank, backward);
  report.sent_bytes = sent;
  const std::vector<RankReport> reports = collect_reports(rank, report);
  const Json checksums = checksums_json(work, holdings, job.pass, threads_of(attention, rank), rank);
  std::vector<std::string> written =
      write_outputs(options.files, rank, holdings, work, job.pass, job.inputs.without_batch());
  if (!options.ranks.trace.empty()) {
    trace.write(options.ranks.trace, job.problem, job.setup.sharding, rank_options);
    written.push_back(options.ranks.trace);
  }
  if (rank.reports()) {
    object["memory"] = memory_json(reports);
    object["traffic"] = traffic_json(reports);
    object["checksum"] = checksums;
    progress.wipe();
    std::ostream& out = text_output(options.report);
    print_run(out, job, describe_machine(attention, rank), object);
    out << describe_traffic(reports) << describe_memory(reports);
    for (const std::string& path : written) out << "wrote    " << path << "\n";
    out << job.picture;
    write_report(options.report, object);
  }
  rank.meet();  // nobody leaves before the files are there
  return kRight;
}

int run(const RunOptions& options) {
  const Launch launch = make_launch(options.ranks, process_environment);
  if (uses_gpu(options.machine) && launch.ranks == 1) return run_on_cuda(options, launch, options.files);
  const GroupOptions group = make_group_options(options, options.ranks.trace.empty() ? 64 : kTracedEvents);
  (void)make_machine(options.machine);
  const Pass pass = options.problem.backward ? Pass::backward : Pass::forward;
  InputFiles inputs(options.files, options.problem);
  const Problem problem = make_problem(options.problem, inputs.given() ? inputs.sizes() : typed_sizes(options));
  RunJob job{options, problem, inputs, make_rank_setup(options, problem, launch), launch, 0, "", pass};
  job.seed = make_seed(options.problem);
  if (options.picture) job.picture = pattern_picture(problem, parse_size_option("--picture", *options.picture));
  if (!uses_gpu(options.machine)) (void)Attention(problem, job.setup.options.device);  // refuses before anything begins
  return run_ranks(launch, group, [&](Rank& rank) { return run_rank(job, rank); });
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
