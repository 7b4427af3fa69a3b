#include "kernels/cpu/tiles.h"

#include "annulus/errors.h"
#include "kernels/cpu/tile_sources.h"

namespace annulus::cpu {

const std::vector<const Tiles*>& available_tiles() {
  static const std::vector<Tiles> all = [] {
    std::vector<Tiles> tiles = simd_tiles();
    if (std::optional<Tiles> bf16 = bf16_tiles(tiles.front())) tiles.insert(tiles.begin(), *bf16);
    return tiles;
  }();
  static const std::vector<const Tiles*> pointers = [] {
    std::vector<const Tiles*> result;
    for (const Tiles& tiles : all) result.push_back(&tiles);
    return result;
  }();
  return pointers;
}

const Tiles& find_tiles(std::string_view instruction_set) {
  const auto& available = available_tiles();
  if (instruction_set.empty() || instruction_set == "auto") return *available.front();
  std::string known;
  for (const Tiles* tiles : available) {
    if (tiles->name == instruction_set) return *tiles;
    known += ", " + std::string(tiles->name);
  }
  throw InvalidArgument("the instruction set must be one that this build has and this CPU can run: auto" + known +
                        "; got '" + std::string(instruction_set) + "'");
}

}  // namespace annulus::cpu
