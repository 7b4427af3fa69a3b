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
const Environment kTorchrun = with({{"TORCHELASTIC_RUN_ID", "x"}, {"WORLD_SIZE", "2"}, {"RANK", "1"}});

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
}

TEST(Launcher, WordsThatOthersSetTooDoNotCount) {
  EXPECT_EQ(detect_launcher(with({{"WORLD_SIZE", "8"}, {"RANK", "1"}})).name, "none");
  EXPECT_EQ(detect_launcher(with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}})).name, "none");  // a batch script
  EXPECT_EQ(detect_launcher(with({{"OMPI_COMM_WORLD_SIZE", "many"}})).name, "none");
}

TEST(Launch, RanksAreThreadsUnlessThereAreProcesses) {
  EXPECT_EQ(make_launch({}, kAlone).ranks, 1);
  EXPECT_EQ(make_launch({}, kAlone).transport, "threads");
  RankTexts typed;
  typed.ranks = "8";
  EXPECT_EQ(make_launch(typed, kAlone).ranks, 8);
  EXPECT_EQ(make_launch(typed, with({{"OMPI_COMM_WORLD_SIZE", "1"}})).ranks, 8);
  if (!built_with_mpi()) GTEST_SKIP() << "built without MPI";
  EXPECT_EQ(make_launch({}, kMpirun).transport, "mpi");
  EXPECT_EQ(make_launch({}, kMpirun).ranks, 4);
  EXPECT_EQ(make_launch({}, kSrun).ranks, 3);
}

TEST(Launch, RefusesWhatCannotBe) {
  RankTexts typed;
  EXPECT_PART(refusal([&] { return make_launch(typed, kTorchrun); }), "torchrun started 2 processes");
  EXPECT_PART(refusal([&] { return make_launch(typed, kTorchrun); }), "mpirun -n 2");
  typed.transport = "pigeons";
  EXPECT_PART(refusal([&] { return make_launch(typed, kAlone); }), "threads, mpi, nccl; got 'pigeons'");
  typed.transport = "threads";
  EXPECT_PART(refusal([&] { return make_launch(typed, kMpirun); }), "mpirun started 4 processes");
  typed = {};
  typed.ranks = "0";
  EXPECT_PART(refusal([&] { return make_launch(typed, kAlone); }), "--ranks must lie in [1, ");
  if (!built_with_mpi()) GTEST_SKIP() << "built without MPI";
  typed.ranks = "3";
  EXPECT_PART(refusal([&] { return make_launch(typed, kMpirun); }), "--ranks 3 and 4 processes");
}

TEST(Launch, TheLauncherCanBeForced) {
  RankTexts typed;
  typed.launcher = "none";
  EXPECT_EQ(make_launch(typed, kTorchrun).ranks, 1);
  typed.launcher = "srun";
  EXPECT_PART(refusal([&] { return make_launch(typed, kAlone); }), "--launcher srun");
  typed.launcher = "ssh";
  EXPECT_PART(refusal([&] { return make_launch(typed, kAlone); }), "auto, none, mpirun, srun, torchrun; got 'ssh'");
}

TEST(Launch, APlanTakesAnyNumberOfRanks) {
  RankTexts typed;
  typed.ranks = "1024";
  EXPECT_EQ(make_launch_of_plan(typed, kMpirun).ranks, 1024);
  EXPECT_EQ(make_launch_of_plan(typed, kTorchrun).ranks, 1024);
}

}  // namespace
}  // namespace annulus::cli
