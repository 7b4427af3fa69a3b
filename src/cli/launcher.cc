#include "cli/launcher.h"

#include <charconv>
#include <cstdlib>

#include "transport/meeting.h"

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
  const auto processes = number(environment, size), process = number(environment, rank);
  if (!processes || !process || *process >= *processes) return std::nullopt;
  return Launcher{name, *processes, *process};
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
  const std::string transport = typed.transport.value_or(typed.rendezvous ? "tcp" : usual_transport(launcher));
  if (transport != "threads" && transport != "mpi" && transport != "tcp" && transport != "nccl")
    throw InvalidArgument("--transport must be one of threads, mpi, tcp, nccl; got '" + transport +
                          "': choose one of them");
  if (typed.rendezvous && (transport == "threads" || transport == "mpi"))
    throw InvalidArgument("--rendezvous is where processes meet for --transport tcp or nccl; got it with --transport " +
                          transport + ": leave it out, or choose one of these");
  return transport;
}

// torchrun's agent listens at the port that it names, so rank 0 takes the next one.
std::optional<std::string> place_of_torchrun(const Environment& environment) {
  const auto host = environment("MASTER_ADDR");
  const auto port = number(environment, "MASTER_PORT");
  if (!host || !port || *port < 1 || *port > 65535) return std::nullopt;
  return "tcp:" + *host + ":" + std::to_string(*port == 65535 ? *port - 1 : *port + 1);
}

// Where processes meet that MPI does not bring together; empty: it does. Nothing: nobody said where.
std::optional<std::string> rendezvous_of(const RankTexts& typed, const Launch& launch, const Environment& environment) {
  if (typed.rendezvous) return *typed.rendezvous;
  const bool is_torchrun = launch.launcher.name == "torchrun";
  if (launch.transport != "tcp" && !(launch.transport == "nccl" && is_torchrun)) return "";
  return is_torchrun ? place_of_torchrun(environment) : std::nullopt;
}

// By the options, for a command that starts ranks or not.
Launch begin_launch(const RankTexts& typed, const Environment& environment) {
  Launch launch;
  launch.launcher = forced_launcher(typed.launcher, environment);
  launch.transport = transport_of(typed, launch.launcher);
  if (typed.rendezvous) check_place(*typed.rendezvous);
  launch.rendezvous = rendezvous_of(typed, launch, environment).value_or("unknown");
  return launch;
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
  // From the inside out: torchrun may have been started by mpirun, a process a host, and mpirun inside a Slurm job;
  // each leaves the others' variables in place. torchrun's are plain words that people also set by hand, so its own
  // mark is asked for.
  const auto mpirun = launcher_by(environment, "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
  const auto agents =
      number(environment, "GROUP_WORLD_SIZE");  // of torchrun; unless mpirun started these, it came later
  if (environment("TORCHELASTIC_RUN_ID") && !(mpirun && agents && mpirun->processes != *agents))
    if (const auto torchrun = launcher_by(environment, "torchrun", "WORLD_SIZE", "RANK")) return *torchrun;
  if (mpirun) return *mpirun;
  // A batch script has SLURM_NTASKS as well; only a step of srun has SLURM_STEP_ID, and is one of several processes.
  if (environment("SLURM_STEP_ID"))
    if (const auto srun = launcher_by(environment, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")) return *srun;
  if (const auto hydra = launcher_by(environment, "mpirun", "PMI_SIZE", "PMI_RANK")) return *hydra;
  return {};
}

std::string usual_transport(const Launcher& launcher) {
  return launcher.processes == 1 ? "threads" : launcher.name == "torchrun" ? "tcp" : "mpi";
}

Launch make_launch(const RankTexts& typed, const Environment& environment) {
  Launch launch = begin_launch(typed, environment);
  const Launcher& launcher = launch.launcher;
  const std::string processes =
      std::to_string(launcher.processes) + (launcher.processes == 1 ? " process" : " processes");
  if (launch.transport == "threads") {
    if (launcher.processes > 1)
      throw InvalidArgument("--transport threads has all ranks in one process; " + launcher.name + " started " +
                            processes + ": leave --transport out, or start one process");
    launch.ranks = typed_ranks(typed, 1, kMostThreadRanks);
    return launch;
  }
  if (launcher.name == "none" && !launch.by_mpi())  // each of several would take itself for the only one
    throw InvalidArgument(
        "with --transport " + launch.transport +
        " processes of a launcher meet; got a process that none is known to have started: start it by "
        "torchrun or srun, or by hand with RANK and WORLD_SIZE set, --launcher torchrun and "
        "--rendezvous; or leave out --transport and --rendezvous: ranks are then threads");
  launch.ranks = typed_ranks(typed, launcher.processes, kMostRanks);
  if (launch.ranks != launcher.processes) {
    const std::string count = std::to_string(launch.ranks);
    throw InvalidArgument("every rank is a process of its own with --transport " + launch.transport + "; got --ranks " +
                          count + " and " + processes + ": start mpirun -n " + count +
                          " or torchrun --no-python --nproc-per-node " + count + ", or leave --ranks out");
  }
  if (launch.by_mpi() && !built_with_mpi())
    throw Unsupported("--transport " + launch.transport +
                      " needs a build with MPI; this one has none: build with libopenmpi-dev installed, or let "
                      "processes meet elsewhere: --transport tcp or nccl, with --rendezvous");
  if (!rendezvous_of(typed, launch, environment))
    throw InvalidArgument("--transport " + launch.transport + " needs a place where processes meet; got none from " +
                          launcher.name +
                          ": give --rendezvous tcp:HOST:PORT, where rank 0 listens, or --rendezvous file:PATH");
  return launch;
}

Launch make_launch_of_plan(const RankTexts& typed, const Environment& environment) {
  Launch launch = begin_launch(typed, environment);
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
