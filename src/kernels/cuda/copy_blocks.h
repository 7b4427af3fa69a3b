// Strided blocks -> dense bytes, by one kernel for a list of blocks.
//
// The list travels as the kernel's parameter: nothing has to be uploaded, kept or waited for. Blocks come with their
// strides in units of 1 to 16 bytes, the largest that all their addresses and sizes allow, and with at most 2^31 - 1
// units each, so that 32-bit arithmetic finds a unit; divisions are multiplications by numbers that the host works out.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace annulus::cuda {

// n / d for n < 2^31: n * factor >> shift, with shift = 31 + ceil(log2 d) and factor = ceil(2^shift / d) < 2^32.
struct Divisor {
  std::uint32_t value = 1;
  std::uint32_t factor = std::uint32_t{1} << 31;
  std::uint32_t shift = 31;
};

struct CopiedBlock {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t stride_bytes[4] = {};  // outermost first
  Divisor counts[3];                  // of the inner three axes
  Divisor run;                        // units of a run
  std::uint32_t units = 0;            // in all
  std::uint32_t unit_log2 = 0;        // bytes of a unit: 1, 2, 4, 8 or 16
  std::uint32_t first_tile = 0;       // thread blocks before those of this one
};

inline constexpr int kCopyThreads = 256;
inline constexpr int kCopyUnits = 8;  // in flight a thread: 32 KiB a thread block
inline constexpr std::uint32_t kTileUnits = kCopyThreads * kCopyUnits;

template <std::size_t kMost>
struct CopiedBlocks {
  static constexpr std::size_t kMostBlocks = kMost;
  int count = 0;
  CopiedBlock blocks[kMost];
};
using FewBlocks = CopiedBlocks<8>;     // the usual list
using ManyBlocks = CopiedBlocks<290>;  // as many as parameters may have, 32,764 bytes
static_assert(sizeof(ManyBlocks) <= 32'764);

// Loads the kernels for the current device: a first launch would do that, and wait for all that runs there.
void load_copy_kernels();

void launch_copy(const FewBlocks& list, std::uint32_t tiles, cudaStream_t stream);
void launch_copy(const ManyBlocks& list, std::uint32_t tiles, cudaStream_t stream);

}  // namespace annulus::cuda
