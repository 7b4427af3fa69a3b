// The transport of ranks that are MPI processes.
//
//   MpiProcess process(&argc, &argv);               // outlives everything that uses MPI, and the error messages too
//   auto transport = process.make_transport(options);
//
// MPI moves bytes only inside its calls, so a rank that computes must poll() every millisecond or so (RankAttention
// does). This header needs no MPI: only the library behind it does, annulus::mpi for CMake.
#pragma once

#include <memory>
#include <optional>

#include "annulus/transport.h"

namespace annulus {

// Messages travel in pieces, packed into memory of the transport's own: no MPI request ever points into a caller's
// memory. (What make_staged_transport packs on a GPU goes as it lies there, where MPI is CUDA-aware.) What is in flight
// is limited by the slots for pieces, so a network that moves more than a megabyte between two polls wants more of
// them. The receiver has several times as many as the sender: its word that a slot is free again queues behind what it
// sends itself.
struct MpiOptions {
  std::int64_t piece_bytes = std::int64_t{256} << 10;
  int send_slots = 16;
  int receive_slots = 64;
  // Whether MPI may be given memory of GPUs; the same on all ranks. Unset: as MpiProcess::cuda_aware() says.
  std::optional<bool> cuda_aware = std::nullopt;
};

// What a transport of a group of `size` ranks takes for itself.
std::int64_t mpi_staging_bytes(int size, const MpiOptions& options = {});

struct MpiWorld;  // what the files of this transport share

// MPI in this process, from MPI_Init to MPI_Finalize, or MPI_Abort where that is the only way out.
class MpiProcess {
 public:
  MpiProcess(int* argc, char*** argv);
  // Ends together with all other processes. If a group has failed and some of them do not come within ten seconds or
  // the timeout, calls MPI_Abort: all processes end with exit code 3. So print before this.
  ~MpiProcess();
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  int rank() const;
  int size() const;

  // Whether MPI takes memory of GPUs, on all ranks: as ANNULUS_MPI_CUDA says on each (0 or 1), else as MPI itself does
  // (Open MPI, MPICH and what descends from them can be asked; any other counts as one that does not).
  bool cuda_aware() const;

  // A group of all processes: they make their groups in the same order. Does not wait for anybody.
  std::unique_ptr<Transport> make_transport(const TransportOptions& options = {}, const MpiOptions& mpi = {});

 private:
  std::shared_ptr<MpiWorld> world_;
};

}  // namespace annulus
