// The commands of the tool, one file each. A command adds its options to the parser; `run` is called when it was
// chosen.
#pragma once

#include <functional>

#include "cli/failure.h"

namespace CLI {
class App;
}  // namespace CLI

namespace annulus::cli {

struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;  // returns an exit code, or throws
};

Command add_info(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_run(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_report(CLI::App& app);

}  // namespace annulus::cli
