// Who started this process, and what follows for its ranks: threads of this process, processes of an MPI job, or
// processes that meet at a place of their own.
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
// Of processes that it started, where no option says otherwise.
std::string usual_transport(const Launcher& launcher);

struct Launch {
  Launcher launcher;
  std::string transport;   // threads, mpi, tcp, nccl
  std::string rendezvous;  // where processes meet (annulus/rendezvous.h); empty: MPI brings them together
  int ranks = 1;

  bool by_mpi() const { return transport != "threads" && rendezvous.empty(); }
};

// What the options ask for, within what the launcher allows. Throws InvalidArgument or Unsupported.
Launch make_launch(const RankTexts& typed, const Environment& environment);
// The same for `plan`, which starts nothing: any number of ranks goes with any launcher.
Launch make_launch_of_plan(const RankTexts& typed, const Environment& environment);

// Ranks as threads of this process.
Launch launch_threads(int ranks);

bool built_with_mpi();

}  // namespace annulus::cli
