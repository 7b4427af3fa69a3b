// The commands of the tool, one file each. A command adds its options to the parser; `run` is called when it was
// chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace annulus::cli {

// Exit codes; docs/command-line.md.
inline constexpr int kRight = 0;
inline constexpr int kWrongResult = 1;
inline constexpr int kBadUsage = 2;
inline constexpr int kEnvironment = 3;

struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;  // returns an exit code, or throws
};

Command add_info(CLI::App& app);
Command add_run(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_bench(CLI::App& app);

}  // namespace annulus::cli
