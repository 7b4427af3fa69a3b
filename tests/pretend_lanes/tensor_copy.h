// Bulk tensor copies, as the copy engine makes them.
#pragma once

#include <cuda.h>

#include <array>

#include "pretend_lanes/machine.h"

namespace annulus::machine {

// `at`: element, row, residue, head, batch. What lies outside of the tensor arrives as zeros.
void copy_tensor(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, const std::array<int, 5>& at);

}  // namespace annulus::machine
