// How processes that know but a place find each other: rank 0 listens there, the others come and say where they listen
// themselves, rank 0 tells everybody, and each pair connects.
#pragma once

#include <string>
#include <vector>

#include "annulus/transport.h"
#include "transport/sockets.h"

namespace annulus {

// A socket for every rank, in order; the own one is not open. `place` is tcp:HOST:PORT or file:PATH.
std::vector<Socket> meet(int rank, int size, const std::string& place, const TransportOptions& options);
// Throws InvalidArgument where it is neither.
void check_place(const std::string& place);

}  // namespace annulus
