#include "kernels/cpu/tile_sources.h"
namespace annulus::cpu { std::optional<Tiles> bf16_tiles(const Tiles&) { return {}; } }
