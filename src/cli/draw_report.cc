// annulus report: a page for people from what the other commands wrote with --json.
#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/page.h"
#include "io/atomic_file.h"
#include "io/mapped_file.h"

namespace annulus::cli {
namespace {

constexpr std::size_t kMostBytes = 64 << 20;  // the largest report, of a grid that failed everywhere, has a few MB

struct PageOptions {
  std::vector<std::string> inputs;
  std::string output = "annulus-report.html";
  std::string title = "Annulus";
  ReportOptions report;
};

NamedReport read_report(const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  if (bytes.size() > kMostBytes)
    throw InvalidArgument("a JSON report has at most 64 MiB; got " + path + " with " + std::to_string(bytes.size()) +
                          " bytes: give what a command wrote with --json");
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  NamedReport report{path, Json::parse(text, nullptr, false)};
  if (command_of(report.object).empty())
    throw InvalidArgument("a page is made of JSON that info, plan, run, verify or bench wrote; got " + path +
                          ", which none of them did: give what a command wrote with --json");
  return report;
}

int draw(const PageOptions& options) {
  if (detect_launcher(process_environment).process > 0) return kRight;  // one process speaks for the job
  check_reports({options.output});
  std::vector<NamedReport> reports;
  for (const std::string& path : options.inputs) reports.push_back(read_report(path));
  const std::string page = draw_page(options.title, reports);
  AtomicFile file(options.output);
  file.write(page);
  file.commit();
  std::ostream& out = text_output(options.report);
  for (const NamedReport& report : reports) out << command_of(report.object) << "  " << report.name << "\n";
  out << "drawn in " << options.output << "\n";
  return kRight;
}

}  // namespace

Command add_report(CLI::App& app) {
  CLI::App* command = app.add_subcommand("report", "Draw a page from what other commands wrote with --json");
  auto options = std::make_shared<PageOptions>();
  command->add_option("FILES", options->inputs, "JSON of info, plan, run, verify and bench, in the order of the page")
      ->required()
      ->type_name("");
  command->add_option("--output", options->output, "The page, HTML (default annulus-report.html)")->type_name("FILE");
  command->add_option("--title", options->title, "Its heading (default Annulus)")->type_name("TEXT");
  command->add_flag("--quiet", options->report.quiet, "Print nothing but errors");
  return {command, [options] { return draw(*options); }};
}

}  // namespace annulus::cli
