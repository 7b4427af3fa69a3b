// annulus: the command line tool. Parses, runs one command, and turns whatever went wrong into one line and an exit
// code.
#include <algorithm>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "cli/commands.h"

namespace annulus::cli {
namespace {

// One line, whatever the message contains.
int fail(int code, std::string message) {
  std::ranges::replace(message, '\n', ' ');
  std::cout.flush();
  std::cerr << "annulus: " << message << std::endl;
  return code;
}

int run_command(const std::vector<Command>& commands) {
  try {
    const auto chosen = std::ranges::find_if(commands, [](const Command& command) { return command.app->parsed(); });
    const int code = chosen->run();  // the parser requires a command
    if (!std::cout.flush())
      throw DeviceError("what there is to say must reach stdout; writing failed: check where stdout goes");
    return code;
  } catch (const InvalidArgument& error) {
    return fail(kBadUsage, error.what());
  } catch (const Unsupported& error) {
    return fail(kBadUsage, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kEnvironment,
                "out of memory: the system refused an allocation; give smaller sizes or use a larger machine");
  } catch (
      const std::exception& error) {  // OutOfMemory, DeviceError, TransportError and what the standard library throws
    return fail(kEnvironment, error.what());
  }
}

int main_of(int argc, char** argv) {
  CLI::App app("Exact dilated attention for very long sequences.", "annulus");
  app.set_version_flag("--version", "annulus " + version());
  app.require_subcommand(1);
  const std::vector<Command> commands = {add_info(app), add_run(app), add_verify(app), add_bench(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    const std::string rule = app.get_subcommands().empty()
                                 ? "the first word is a command, one of info, run, verify, bench; got " +
                                       (argc > 1 ? "'" + std::string(argv[1]) + "'" : "none")
                                 : std::string(error.what());
    return fail(kBadUsage, rule + "; see annulus --help or annulus COMMAND --help");
  }
  return run_command(commands);
}

}  // namespace
}  // namespace annulus::cli

int main(int argc, char** argv) { return annulus::cli::main_of(argc, argv); }
