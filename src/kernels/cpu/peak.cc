#include "kernels/peak.h"

#include <algorithm>
#include <chrono>

#include "kernels/cpu/tiles.h"
#include "kernels/thread_pool.h"

namespace annulus {

Peak measure_peak(const std::string& instruction_set, DType dtype, int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRounds = 5;
  constexpr std::int64_t kChainLength = 1'000'000;  // a few milliseconds
  const cpu::Tiles& tiles = cpu::find_tiles(instruction_set);
  const bool dot = dtype == DType::bf16 && tiles.bf16_chains != nullptr;
  const auto chains = dot ? tiles.bf16_chains : tiles.fma_chains;
  Peak peak;
  peak.instruction = std::string(tiles.name) + (dot ? " bf16 dot product" : " fp32 FMA");
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> flop(static_cast<std::size_t>(threads));
    const auto start = Clock::now();
    ThreadPool::shared().run(threads, threads,
                             [&](std::int64_t i, int) { flop[static_cast<std::size_t>(i)] = chains(kChainLength); });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    double total = 0;
    for (const double x : flop) total += x;
    peak.flop_per_s = std::max(peak.flop_per_s, total / seconds);
  }
  return peak;
}

}  // namespace annulus
