// Tests under mpirun: every process runs the same ones at the same time. Failures are added up over ranks, and a
// failure says on which rank it was.
#pragma once

#include <gtest/gtest.h>

#include <iostream>

#include "annulus/mpi.h"
#include "transport/mpi_world.h"

namespace annulus {

inline MpiProcess* process = nullptr;  // this one, while tests run

// Rank 0 prints everything, the others their failures.
class FailurePrinter final : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed())
      std::cerr << "rank " << process->rank() << ": " << result.file_name() << ":" << result.line_number() << ": "
                << result.message() << std::endl;
  }
};

inline int run_all_tests(MpiProcess& own) {
  process = &own;
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (process->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new FailurePrinter);
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return failed;
}

}  // namespace annulus
