// A transport of the host for processes that nothing else brings together: they meet at an address or in a file, and
// talk over TCP, a connection for every pair. It is the control beside NCCL (device_transports.h), and a transport for
// tensors too.
//
//   auto control = make_rendezvous_transport(rank, size, "tcp:node7:29400");   // rank 0 runs on node7
//   auto control = make_rendezvous_transport(rank, size, "file:/shared/job/meet");
//
// Rank 0 writes its address into the file, over what an earlier job may have left, and removes it when all have come.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "annulus/transport.h"

namespace annulus {

// What it takes, of `size` ranks: two pieces of 64 KiB a connection.
std::int64_t tcp_staging_bytes(int size);

// A collective with the deadline of the options: throws TransportError that names the ranks that have not come.
std::unique_ptr<Transport> make_rendezvous_transport(int rank, int size, const std::string& place,
                                                     const TransportOptions& options = {});

}  // namespace annulus
