// The arithmetic of one mma.sync, and of one wgmma for the 16 rows of a warp.
#pragma once

#include "pretend_lanes/machine.h"

namespace annulus::machine {

struct LaneRegisters {
  float* d;
  const std::uint32_t *a, *b;
};
void multiply(Number number, const LaneRegisters* lanes);

struct Fragments {  // where the lanes' registers are
  float* d[32];
  const std::uint32_t* a[32];
  int first_row = 0;  // of A, where it is in shared memory: 0, 16, 32 or 48
};
void multiply(const Product& product, const Fragments& fragments);

}  // namespace annulus::machine
