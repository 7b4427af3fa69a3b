// Where tiles come from: one function a source file.
#pragma once

#include <optional>
#include <vector>

#include "kernels/cpu/tiles.h"

namespace annulus::cpu {

// Those that this CPU can run, best first; never empty.
std::vector<Tiles> simd_tiles();

// `base` with the forward pass on bf16 dot products; nothing where the CPU or the build has none.
std::optional<Tiles> bf16_tiles(const Tiles& base);

}  // namespace annulus::cpu
