#include "cli/launcher.h"

#include <charconv>
#include <cstdlib>

namespace annulus::cli {
namespace {

constexpr std::int64_t kMostThreadRanks = 4096;
constexpr std::int64_t kMostRanks = 1 << 20;

std::optional<int> number(const Environment& environment, const char* variable) {
  const auto text = environment(variable);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < 0) return std::nullopt;
  return value;
}

std::optional<Launcher> launcher_by(const Environment& environment, const char* name, const char* size,
                                    const char* rank) {
  const auto processes = number(environment, size);
  if (!processes || *processes < 1) return std::nullopt;
  return Launcher{name, *processes, number(environment, rank).value_or(0)};
}

// The launcher that --launcher forces, as far as its variables say how many processes there are.
Launcher forced_launcher(const std::string& name, const Environment& environment) {
  if (name == "none") return {};
  const Launcher detected = detect_launcher(environment);
  if (name == "auto" || detected.name == name) return detected;
  std::optional<Launcher> forced;
  if (name == "mpirun") {
    forced = launcher_by(environment, "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
    if (!forced) forced = launcher_by(environment, "mpirun", "PMI_SIZE", "PMI_RANK");
  } else if (name == "srun") {
    forced = launcher_by(environment, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID");
    if (!forced) forced = launcher_by(environment, "srun", "SLURM_NTASKS", "SLURM_PROCID");
  } else if (name == "torchrun") {
    forced = launcher_by(environment, "torchrun", "WORLD_SIZE", "RANK");
  } else {
    throw InvalidArgument("--launcher must be one of auto, none, mpirun, srun, torchrun; got '" + name +
                          "': choose one of them");
  }
  if (!forced)
    throw InvalidArgument("--launcher " + name + " needs a process that " + name + " started; got one without its " +
                          "variables: leave --launcher out or start the tool by " + name);
  return *forced;
}

std::string transport_of(const RankTexts& typed, const Launcher& launcher) {
  const std::string transport = typed.transport.value_or(
      (launcher.name == "mpirun" || launcher.name == "srun") && launcher.processes > 1 ? "mpi" : "threads");
  if (transport != "threads" && transport != "mpi" && transport != "nccl")
    throw InvalidArgument("--transport must be one of threads, mpi, nccl; got '" + transport + "': choose one of them");
  if (transport != "threads" && !built_with_mpi())
    throw Unsupported("--transport " + transport +
                      " needs a build with MPI; this one has none: build with libopenmpi-dev installed");
  return transport;
}

int typed_ranks(const RankTexts& typed, int otherwise, std::int64_t most) {
  if (!typed.ranks) return otherwise;
  const std::int64_t ranks = parse_size_option("--ranks", *typed.ranks);
  if (ranks < 1 || ranks > most)
    throw InvalidArgument("--ranks must lie in [1, " + std::to_string(most) + "]; got " + *typed.ranks +
                          ": give another number");
  return static_cast<int>(ranks);
}

}  // namespace

std::optional<std::string> process_environment(const char* variable) {
  const char* text = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe): before any thread begins
  return text == nullptr ? std::nullopt : std::optional<std::string>(text);
}

Launcher detect_launcher(const Environment& environment) {
  // mpirun first: inside a Slurm job it leaves Slurm's variables in place, too. torchrun's are plain words that people
  // also set by hand, so its own mark is asked for.
  if (const auto mpirun = launcher_by(environment, "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
    return *mpirun;
  if (environment("TORCHELASTIC_RUN_ID"))
    if (const auto torchrun = launcher_by(environment, "torchrun", "WORLD_SIZE", "RANK")) return *torchrun;
  // A batch script has SLURM_NTASKS as well; only a step of srun has SLURM_STEP_ID, and is one of several processes.
  if (environment("SLURM_STEP_ID"))
    if (const auto srun = launcher_by(environment, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")) return *srun;
  if (const auto hydra = launcher_by(environment, "mpirun", "PMI_SIZE", "PMI_RANK")) return *hydra;
  return {};
}

Launch make_launch(const RankTexts& typed, const Environment& environment) {
  Launch launch;
  launch.launcher = forced_launcher(typed.launcher, environment);
  const Launcher& launcher = launch.launcher;
  const std::string started = launcher.name + " started " + std::to_string(launcher.processes) + " processes";
  if (launcher.name == "torchrun" && launcher.processes > 1)
    throw Unsupported("ranks are threads of one process or processes of an MPI job; " + started +
                      ": start the tool by mpirun -n " + std::to_string(launcher.processes) +
                      ", or once with --ranks " + std::to_string(launcher.processes));
  launch.transport = transport_of(typed, launcher);
  if (launch.transport == "threads") {
    if (launcher.processes > 1)
      throw InvalidArgument("--transport threads has all ranks in one process; " + started +
                            ": leave --transport out, or start one process");
    launch.ranks = typed_ranks(typed, 1, kMostThreadRanks);
    return launch;
  }
  launch.ranks = typed_ranks(typed, launcher.processes, kMostRanks);
  if (launch.ranks != launcher.processes)
    throw InvalidArgument("every rank is a process of its own with --transport " + launch.transport + "; got --ranks " +
                          std::to_string(launch.ranks) + " and " + std::to_string(launcher.processes) +
                          (launcher.processes == 1 ? " process" : " processes") + ": start mpirun -n " +
                          std::to_string(launch.ranks) + ", or leave --ranks out");
  return launch;
}

Launch make_launch_of_plan(const RankTexts& typed, const Environment& environment) {
  Launch launch;
  launch.launcher = forced_launcher(typed.launcher, environment);
  launch.transport = transport_of(typed, launch.launcher);
  launch.ranks = typed_ranks(typed, launch.launcher.processes, kMostRanks);
  return launch;
}

Launch launch_threads(int ranks) {
  Launch launch;
  launch.transport = "threads";
  launch.ranks = ranks;
  return launch;
}

#ifdef ANNULUS_WITH_MPI
bool built_with_mpi() { return true; }
#else
bool built_with_mpi() { return false; }
#endif

}  // namespace annulus::cli
