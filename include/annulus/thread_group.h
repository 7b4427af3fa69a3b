// The transport of ranks that are threads of one process: the receiver copies straight out of the sender's memory.
//
//   auto ranks = make_thread_group(4, {.timeout = 10s});
//   std::jthread rank_2([transport = std::move(ranks[2])] { ... });
//
// Give each rank's transport to the rank's thread. A rank that destroys its transport has left; if another still needs
// it, the group fails. A group that failed harms nothing else in the process, and a new one can be made.
#pragma once

#include <memory>
#include <vector>

#include "annulus/transport.h"

namespace annulus {

std::vector<std::unique_ptr<Transport>> make_thread_group(int size, const TransportOptions& options = {});

}  // namespace annulus
