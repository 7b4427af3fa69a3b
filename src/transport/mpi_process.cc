// How an MPI process begins and ends. MPI_Finalize waits for all processes, and a rank that is lost never comes: so
// after a failure the processes say goodbye first, and if one does not answer, MPI_Abort ends the job.
#include <cstdio>
#include <iostream>
#include <thread>

#include "annulus/mpi.h"
#include "transport/mpi_world.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGoodbyeTag = 0;
constexpr int kExitCode = 3;  // of the tool: the environment failed, a rank is lost
constexpr std::chrono::milliseconds kMostPatience{10'000};
constexpr std::chrono::milliseconds kPatienceWithLostRanks{1'000};

// Whether every process is at its end. Lost ranks may have come back, and get a moment to say so.
bool all_said_goodbye(const MpiWorld& world) {
  std::vector<MPI_Request> sends, receives;
  std::vector<int> peers;
  for (int peer = 0; peer < world.size; ++peer) {
    if (peer == world.rank) continue;
    MPI_Isend(nullptr, 0, MPI_BYTE, peer, kGoodbyeTag, world.comm, &sends.emplace_back());
    MPI_Irecv(nullptr, 0, MPI_BYTE, peer, kGoodbyeTag, world.comm, &receives.emplace_back());
    peers.push_back(peer);
  }
  const auto start = Clock::now();
  for (;;) {
    bool lost_only = true;
    bool all = true;
    for (std::size_t i = 0; i < peers.size(); ++i) {
      int here = 0;
      MPI_Test(&receives[i], &here, MPI_STATUS_IGNORE);
      all = all && here != 0;
      lost_only = lost_only && (here != 0 || world.lost.count(peers[i]) > 0);
    }
    if (all) break;
    const auto waited = Clock::now() - start;
    if (waited > std::min(world.patience, kMostPatience) || (lost_only && waited > kPatienceWithLostRanks))
      return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  MPI_Waitall(static_cast<int>(sends.size()), sends.data(), MPI_STATUSES_IGNORE);  // all are there to receive
  return true;
}

}  // namespace

MpiProcess::MpiProcess(int* argc, char*** argv) : world_(std::make_shared<MpiWorld>()) {
  int initialized = 0;
  int level = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) {
    MPI_Query_thread(&level);
  } else {
    MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &level);
    world_->owns_mpi = true;
  }
  if (level < MPI_THREAD_SERIALIZED)
    throw Unsupported(
        "MPI must allow calls from more than one thread in turn (MPI_THREAD_SERIALIZED); this one does not");
  MPI_Comm_dup(MPI_COMM_WORLD, &world_->comm);
  MPI_Comm_set_errhandler(world_->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world_->comm, &world_->rank);
  MPI_Comm_size(world_->comm, &world_->size);
}

MpiProcess::~MpiProcess() {
  if (world_->failed && !all_said_goodbye(*world_)) {
    std::cout.flush();
    std::cerr.flush();
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, kExitCode);
  }
  if (!world_->failed) MPI_Comm_free(&world_->comm);  // after a failure, messages may still be on their way
  if (world_->owns_mpi) MPI_Finalize();
}

int MpiProcess::rank() const { return world_->rank; }
int MpiProcess::size() const { return world_->size; }

}  // namespace annulus
