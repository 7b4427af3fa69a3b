// Who started this process, and what follows for its ranks: threads of this process, or processes of an MPI job.
//
// A launcher is known by the variables that it sets. That needs no MPI, so wrong options are refused before MPI begins.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "cli/options.h"

namespace annulus::cli {

struct Launcher {
  std::string name = "none";  // none, mpirun, srun, torchrun
  int processes = 1;
  int process = 0;  // this one
};

// A variable's text; nothing where it is not set.
using Environment = std::function<std::optional<std::string>(const char*)>;
std::optional<std::string> process_environment(const char* variable);

Launcher detect_launcher(const Environment& environment);

struct Launch {
  Launcher launcher;
  std::string transport;  // threads, mpi, nccl
  int ranks = 1;
};

// What the options ask for, within what the launcher allows. Throws InvalidArgument or Unsupported.
Launch make_launch(const RankTexts& typed, const Environment& environment);
// The same for `plan`, which starts nothing: any number of ranks goes with any launcher.
Launch make_launch_of_plan(const RankTexts& typed, const Environment& environment);

// Ranks as threads of this process.
Launch launch_threads(int ranks);

bool built_with_mpi();

}  // namespace annulus::cli
