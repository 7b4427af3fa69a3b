// annulus: the command line tool. Parses, runs one command, and turns whatever went wrong into one line and an exit
// code.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "cli/commands.h"
#include "cli/launcher.h"

namespace annulus::cli {
namespace {

int fail(int code, const std::string& message) {
  print_error(message);
  return code;
}

// Before ranks begin, each process of a job speaks for itself.
int fail(const std::exception_ptr& error) {
  const Failure failure = failure_of(error);
  const Launcher launcher = detect_launcher(process_environment);
  const std::string who = launcher.processes > 1 ? "rank " + std::to_string(launcher.process) + ": " : "";
  return fail(failure.code, who + failure.message);
}

int run_command(const std::vector<Command>& commands) {
  try {
    const auto chosen = std::ranges::find_if(commands, [](const Command& command) { return command.app->parsed(); });
    const int code = chosen->run();  // the parser requires a command
    if (!std::cout.flush())
      throw DeviceError("what there is to say must reach stdout; writing failed: check where stdout goes");
    return code;
  } catch (const Reported& reported) {
    return reported.code;
  } catch (const std::exception&) {
    return fail(std::current_exception());
  }
}

int main_of(int argc, char** argv) {
  CLI::App app("Exact dilated attention for very long sequences.", "annulus");
  app.set_version_flag("--version", "annulus " + version());
  app.require_subcommand(1);
  const std::vector<Command> commands = {add_info(app),   add_plan(app),  add_run(app),
                                         add_verify(app), add_bench(app), add_report(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    const std::string rule = app.get_subcommands().empty()
                                 ? "the first word is a command, one of info, plan, run, verify, bench, report; got " +
                                       (argc > 1 ? "'" + std::string(argv[1]) + "'" : "none")
                                 : std::string(error.what());
    return fail(kBadUsage, rule + "; see annulus --help or annulus COMMAND --help");
  }
  return run_command(commands);
}

}  // namespace
}  // namespace annulus::cli

int main(int argc, char** argv) { return annulus::cli::main_of(argc, argv); }
