// Launchers by their variables, and what the options make of them.
#include "cli/launcher.h"

#include <gtest/gtest.h>

#include <map>

#include "annulus/errors.h"

namespace annulus::cli {
namespace {

Environment with(std::map<std::string, std::string> variables) {
  return [variables](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

const Environment kAlone = with({});
const Environment kMpirun = with({{"OMPI_COMM_WORLD_SIZE", "4"},
                                  {"OMPI_COMM_WORLD_RANK", "2"},
                                  {"SLURM_STEP_ID", "0"},  // mpirun inside a Slurm job
                                  {"SLURM_STEP_NUM_TASKS", "1"}});
const Environment kSrun = with({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "3"}, {"SLURM_PROCID", "1"}});
const Environment kTorchrun = with({{"TORCHELASTIC_RUN_ID", "x"},
                                    {"WORLD_SIZE", "2"},
                                    {"RANK", "1"},
                                    {"MASTER_ADDR", "node7"},
                                    {"MASTER_PORT", "29500"}});

template <class F>
std::string refusal(F f) {
  try {
    (void)f();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

#define EXPECT_PART(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Launcher, IsKnownByItsVariables) {
  EXPECT_EQ(detect_launcher(kAlone).name, "none");
  const Launcher mpirun = detect_launcher(kMpirun);
  EXPECT_EQ(mpirun.name, "mpirun");
  EXPECT_EQ(mpirun.processes, 4);
  EXPECT_EQ(mpirun.process, 2);
  EXPECT_EQ(detect_launcher(kSrun).name, "srun");
  EXPECT_EQ(detect_launcher(kSrun).process, 1);
  EXPECT_EQ(detect_launcher(kTorchrun).name, "torchrun");
  EXPECT_EQ(detect_launcher(with({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}})).processes, 2);
  const Launcher by_mpirun = detect_launcher(with({{"OMPI_COMM_WORLD_SIZE", "2"},
                                                   {"OMPI_COMM_WORLD_RANK", "1"},
                                                   {"TORCHELASTIC_RUN_ID", "x"},
                                                   {"WORLD_SIZE", "16"},
                                                   {"RANK", "9"}}));
  EXPECT_EQ(by_mpirun.name, "torchrun") << "one on each of two hosts";
  EXPECT_EQ(by_mpirun.process, 9);
  for (const auto& [agents, name] : {std::pair("2", "torchrun"), {"1", "mpirun"}})
    EXPECT_EQ(detect_launcher(with({{"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_RANK", "1"},
                                    {"TORCHELASTIC_RUN_ID", "x"},
                                    {"GROUP_WORLD_SIZE", agents},
                                    {"WORLD_SIZE", "2"},
                                    {"RANK", "0"}}))
                  .name,
              name)
        << "mpirun started torchrun's agents, or a process of torchrun mpirun";
}

TEST(Launcher, WordsThatOthersSetTooDoNotCount) {
  EXPECT_EQ(detect_launcher(with({{"WORLD_SIZE", "8"}, {"RANK", "1"}})).name, "none");
  EXPECT_EQ(detect_launcher(with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}})).name, "none");  // a batch script
  EXPECT_EQ(detect_launcher(with({{"OMPI_COMM_WORLD_SIZE", "many"}})).name, "none");
  EXPECT_EQ(detect_launcher(with({{"TORCHELASTIC_RUN_ID", "x"}, {"WORLD_SIZE", "2"}})).name, "none") << "no rank";
  EXPECT_EQ(detect_launcher(with({{"PMI_SIZE", "2"}, {"PMI_RANK", "2"}})).name, "none") << "no such rank";
}

// Options by their names; g++ 12 takes plain assignments to optional texts for reads of what is not there.
RankTexts typed(std::map<std::string, std::string> options) {
  RankTexts texts;
  const auto take = [&](const char* name, Text& text) {
    if (const auto found = options.find(name); found != options.end()) text.emplace(found->second);
  };
  take("ranks", texts.ranks);
  take("transport", texts.transport);
  take("rendezvous", texts.rendezvous);
  if (const auto found = options.find("launcher"); found != options.end()) texts.launcher = found->second;
  return texts;
}

TEST(Launch, RanksAreThreadsUnlessThereAreProcesses) {
  EXPECT_EQ(make_launch({}, kAlone).ranks, 1);
  EXPECT_EQ(make_launch({}, kAlone).transport, "threads");
  EXPECT_EQ(make_launch(typed({{"ranks", "8"}}), kAlone).ranks, 8);
  EXPECT_EQ(make_launch(typed({{"ranks", "8"}}), with({{"OMPI_COMM_WORLD_SIZE", "1"}})).ranks, 8);
  if (!built_with_mpi()) GTEST_SKIP() << "built without MPI";
  EXPECT_EQ(make_launch({}, kMpirun).transport, "mpi");
  EXPECT_EQ(make_launch({}, kMpirun).ranks, 4);
  EXPECT_TRUE(make_launch({}, kMpirun).by_mpi());
  EXPECT_EQ(make_launch({}, kSrun).ranks, 3);
  EXPECT_TRUE(make_launch(typed({{"transport", "nccl"}}), kSrun).by_mpi());
}

// Without MPI, at a place that torchrun or the user names.
TEST(Launch, ProcessesMeetWithoutMpi) {
  const Launch tcp = make_launch({}, kTorchrun);
  EXPECT_EQ(tcp.transport, "tcp");
  EXPECT_EQ(tcp.ranks, 2);
  EXPECT_EQ(tcp.rendezvous, "tcp:node7:29501") << "its agent listens at MASTER_PORT";
  EXPECT_FALSE(tcp.by_mpi());
  EXPECT_EQ(make_launch(typed({{"transport", "nccl"}}), kTorchrun).rendezvous, "tcp:node7:29501");
  EXPECT_EQ(make_launch(typed({{"rendezvous", "file:/x"}}), kTorchrun).rendezvous, "file:/x");
  EXPECT_EQ(make_launch(typed({{"rendezvous", "file:/x"}}), kSrun).transport, "tcp");
  const Launch nccl = make_launch(typed({{"transport", "nccl"}, {"rendezvous", "tcp:a:1"}}), kMpirun);
  EXPECT_EQ(nccl.ranks, 4);
  EXPECT_FALSE(nccl.by_mpi());
  const Launch alone = make_launch(typed({{"rendezvous", "file:/x"}}),
                                   with({{"TORCHELASTIC_RUN_ID", "x"}, {"WORLD_SIZE", "1"}, {"RANK", "0"}}));
  EXPECT_EQ(alone.transport, "tcp") << "scripts that go down to one process";
  EXPECT_EQ(alone.ranks, 1);
  const Environment last_port =
      with({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "65535"}});
  EXPECT_EQ(make_launch(typed({{"launcher", "torchrun"}}), last_port).rendezvous, "tcp:a:65534");
}

TEST(Launch, RefusesWhatCannotBe) {
  const auto refused = [](std::map<std::string, std::string> options, const Environment& environment) {
    return refusal([&] { return make_launch(typed(std::move(options)), environment); });
  };
  EXPECT_PART(refused({{"transport", "pigeons"}}, kAlone), "threads, mpi, tcp, nccl; got 'pigeons'");
  EXPECT_PART(refused({{"transport", "threads"}}, kMpirun), "mpirun started 4 processes");
  EXPECT_PART(refused({{"transport", "threads"}}, kTorchrun), "torchrun started 2 processes");
  EXPECT_PART(refused({{"ranks", "0"}}, kAlone), "--ranks must lie in [1, ");
  EXPECT_PART(refused({{"ranks", "3"}}, kTorchrun), "--ranks 3 and 2 processes");
  EXPECT_PART(refused({{"ranks", "3"}}, kTorchrun), "torchrun --no-python --nproc-per-node 3");
  EXPECT_PART(refused({{"transport", "tcp"}}, kAlone), "none is known to have started");
  EXPECT_PART(refused({{"transport", "tcp"}, {"ranks", "3"}}, kAlone), "ranks are then threads");
  EXPECT_PART(refused({{"transport", "tcp"}}, kSrun), "got none from srun");
  EXPECT_PART(refused({{"launcher", "torchrun"}}, with({{"RANK", "0"}, {"WORLD_SIZE", "2"}})),
              "got none from torchrun");
  EXPECT_PART(refused({{"rendezvous", "file:/x"}}, kAlone), "--launcher torchrun");
  EXPECT_PART(refused({{"rendezvous", "file:/x"}, {"transport", "nccl"}}, kAlone), "RANK and WORLD_SIZE");
  EXPECT_PART(refused({{"rendezvous", "file:/x"}, {"launcher", "none"}}, kTorchrun), "none is known to have started");
  EXPECT_PART(refused({{"rendezvous", "file:/x"}, {"transport", "threads"}}, kAlone),
              "--transport threads: leave it out");
  EXPECT_PART(refused({{"rendezvous", "file:/x"}, {"transport", "mpi"}}, kMpirun), "--transport mpi: leave it out");
  EXPECT_PART(refused({{"rendezvous", ""}}, kTorchrun), "tcp:HOST:PORT");
  EXPECT_PART(refused({{"rendezvous", "node7"}}, kMpirun), "got 'node7'");
  if (!built_with_mpi()) GTEST_SKIP() << "built without MPI";
  EXPECT_PART(refused({{"ranks", "3"}}, kMpirun), "--ranks 3 and 4 processes");
}

TEST(Launch, TheLauncherCanBeForced) {
  EXPECT_EQ(make_launch(typed({{"launcher", "none"}}), kTorchrun).ranks, 1);
  const auto refused = [](const char* launcher) {
    return refusal([&] { return make_launch(typed({{"launcher", launcher}}), kAlone); });
  };
  EXPECT_PART(refused("srun"), "--launcher srun");
  EXPECT_PART(refused("ssh"), "auto, none, mpirun, srun, torchrun; got 'ssh'");
}

TEST(Launch, APlanTakesAnyNumberOfRanks) {
  EXPECT_EQ(make_launch_of_plan(typed({{"ranks", "1024"}}), kTorchrun).ranks, 1024);
  EXPECT_FALSE(make_launch_of_plan(typed({{"ranks", "1024"}, {"transport", "tcp"}}), kAlone).by_mpi());
  EXPECT_EQ(make_launch_of_plan(typed({{"ranks", "64"}, {"rendezvous", "file:/x"}}), kAlone).transport, "tcp");
  if (!built_with_mpi()) GTEST_SKIP() << "built without MPI";
  EXPECT_EQ(make_launch_of_plan(typed({{"ranks", "1024"}}), kMpirun).ranks, 1024);
}

}  // namespace
}  // namespace annulus::cli
