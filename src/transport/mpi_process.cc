// How an MPI process begins and ends. MPI_Finalize waits for all processes, and a rank that is lost never comes: so
// after a failure the processes say goodbye first, and if one does not answer, MPI_Abort ends the job.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <thread>

#include "annulus/mpi.h"
#include "transport/mpi_world.h"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGoodbyeTag = 0;
constexpr int kExitCode = 3;  // of the tool: the environment failed, a rank is lost
constexpr std::chrono::milliseconds kMostPatience{10'000};
constexpr std::chrono::milliseconds kPatienceWithLostRanks{1'000};

// The library that is loaded is asked, which need not be the one that this was built with.
bool says_cuda_aware() {
#if defined(OMPI_HAVE_MPI_EXT_CUDA)
  return MPIX_Query_cuda_support() != 0;
#elif defined(MPIX_GPU_SUPPORT_CUDA)
  int answer = 0;
  return MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA, &answer) == MPI_SUCCESS && answer != 0;
#else
  return false;
#endif
}

// What is true of every rank: environments may differ, and hosts may have different libraries. Throws on all ranks, or
// on none.
bool cuda_aware_everywhere(const MpiWorld& world) {
  const char* const given = std::getenv("ANNULUS_MPI_CUDA");  // NOLINT(concurrency-mt-unsafe): nobody sets it
  const std::string_view text = given == nullptr ? "" : given;
  const bool is_wrong = !text.empty() && text != "0" && text != "1";
  int least = is_wrong ? -1 : text.empty() ? static_cast<int>(says_cuda_aware()) : static_cast<int>(text == "1");
  MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, world.comm);
  if (least < 0)
    throw InvalidArgument("ANNULUS_MPI_CUDA must be 0 or 1, or unset; got " +
                          (is_wrong ? "'" + std::string(text) + "' on rank " + std::to_string(world.rank)
                                    : std::string("something else on another rank")) +
                          ": 1 where MPI takes memory of GPUs, 0 where it must not be given any");
  return least > 0;
}

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
  try {
    world_->cuda_aware = cuda_aware_everywhere(*world_);
  } catch (const InvalidArgument&) {
    if (world_->owns_mpi) MPI_Finalize();
    throw;
  }
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
bool MpiProcess::cuda_aware() const { return world_->cuda_aware; }

}  // namespace annulus
