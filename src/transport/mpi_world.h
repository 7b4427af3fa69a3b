// What the MPI files share: the communicator, what is known about how it will end, and errors of MPI as exceptions.
#pragma once

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "annulus/errors.h"

namespace annulus {

struct MpiWorld {
  MPI_Comm comm = MPI_COMM_NULL;  // our own, so that tags are ours
  int rank = 0;
  int size = 1;
  bool owns_mpi = false;    // and must finalize it
  int groups = 0;           // made so far; tags keep their messages apart
  bool cuda_aware = false;  // on all ranks
  // After a failure the processes end differently.
  bool failed = false;
  std::set<int> lost;                     // ranks that will hardly come to the end
  std::chrono::milliseconds patience{0};  // with the others
};

// For MPI libraries that return errors. Open MPI 4 ends the job itself instead in nearly all cases.
inline void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw TransportError(std::string(call) + " failed: " + std::string(text, static_cast<std::size_t>(length)));
}

// Memory that MPI may still use after a failure: kept until the process ends.
inline void keep_for_mpi(std::shared_ptr<const void> memory) {
  static auto& kept = *new std::vector<std::shared_ptr<const void>>;
  kept.push_back(std::move(memory));
}

}  // namespace annulus
