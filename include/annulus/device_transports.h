// Transports that move memory of GPUs: of ranks that are threads, of processes over a transport of their hosts, of
// processes over NCCL. An exchange says that its memory is a GPU's by naming a stream (transport.h); all others are the
// host's, and move as ever.
//
//   auto ranks = make_device_thread_group(4, {0, 1, 2, 3}, {.timeout = 10s});  // rank r on cuda:r
//
// This header needs no CUDA. The functions load the CUDA backend, and throw DeviceError where there is none.
#pragma once

#include <memory>
#include <vector>

#include "annulus/transport.h"

namespace annulus {

// Ranks that are threads of one process, as in thread_group.h; devices[rank] is the CUDA device of each. Several ranks
// may share a device. The receiver's GPU reads straight from the sender's memory, and threads only wait for each other,
// never for a GPU.
std::vector<std::unique_ptr<Transport>> make_device_thread_group(int size, const std::vector<int>& devices,
                                                                 const TransportOptions& options = {});

struct StagingOptions {
  std::int64_t piece_bytes = std::int64_t{4} << 20;  // the same on all ranks; memory for four of them is taken
  bool blocking = false;                             // as in TransportOptions
};

// GPU memory over a transport of the host (MPI, a carrier): packed, moved and unpacked piece by piece, all three at the
// same time, through pinned memory: MPI needs to know nothing of CUDA. Where it is CUDA-aware
// (MpiProcess::cuda_aware()) pieces are packed on the GPU and MPI is given those: name() is then "CUDA-aware mpi"
// instead of "staged mpi". The pieces move inside poll() and wait().
std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> host, int device,
                                                 const StagingOptions& options = {});
// What it takes beside the host's transport, known without one: pinned memory, or the GPU's where MPI is CUDA-aware.
std::int64_t staged_staging_bytes(int size, const StagingOptions& options = {});

struct NcclOptions {
  std::chrono::milliseconds timeout{60'000};            // as control's
  std::int64_t staging_bytes = std::int64_t{64} << 20;  // of the GPU, to pack in; the same on all ranks
  bool blocking = false;                                // as in TransportOptions
};

// GPU memory over NCCL, opened when this is called. `control` is any transport of the host, MPI or rendezvous.h: it
// brings the ranks together, and says who is lost, slow or of another mind, as it does for its own exchanges. A
// collective: all ranks call it. Throws Unsupported where there is no NCCL, or where two ranks have one GPU.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, int device,
                                               const NcclOptions& options = {});
// What it takes of the GPU, known without one.
std::int64_t nccl_staging_bytes(int size, const NcclOptions& options = {});

enum class Payload {
  automatic,  // NCCL where all ranks have it and no two of them share a GPU, else staged
  staged,
  nccl,
};

struct PayloadOptions {
  Payload payload = Payload::automatic;       // the same on all ranks
  std::chrono::milliseconds timeout{60'000};  // NCCL's
};

// One of the two above. A collective in which the ranks decide together; throws on all of them, or on none.
std::unique_ptr<Transport> make_device_transport(std::unique_ptr<Transport> control, int device,
                                                 const PayloadOptions& options = {});

}  // namespace annulus
