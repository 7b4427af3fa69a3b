#include "kernels/cuda/copy_blocks.h"

#include "kernels/cuda/start.h"

namespace annulus::cuda {
namespace {

__device__ std::uint32_t divided(std::uint32_t n, const Divisor& by) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(n) * by.factor >> by.shift);
}

template <class Unit>
__device__ const Unit* place_of(const CopiedBlock& block, std::uint32_t unit) {
  std::uint32_t index = divided(unit, block.run);
  std::int64_t offset = static_cast<std::int64_t>(unit - index * block.run.value) * sizeof(Unit);
#pragma unroll
  for (int axis = 3; axis > 0; --axis) {
    const Divisor& count = block.counts[axis - 1];
    const std::uint32_t outer = divided(index, count);
    offset += static_cast<std::int64_t>(index - outer * count.value) * block.stride_bytes[axis];
    index = outer;
  }
  offset += static_cast<std::int64_t>(index) * block.stride_bytes[0];
  return reinterpret_cast<const Unit*>(block.from + offset);
}

// Consecutive threads take consecutive units; all loads of a thread are under way before its first store.
template <class Unit>
__device__ void copy_tile(const CopiedBlock& block, std::uint32_t first) {
  Unit units[kCopyUnits];
  Unit* const to = reinterpret_cast<Unit*>(block.to);
#pragma unroll
  for (int i = 0; i < kCopyUnits; ++i) {
    const std::uint32_t unit = first + i * kCopyThreads + threadIdx.x;
    if (unit < block.units) units[i] = *place_of<Unit>(block, unit);
  }
#pragma unroll
  for (int i = 0; i < kCopyUnits; ++i) {
    const std::uint32_t unit = first + i * kCopyThreads + threadIdx.x;
    if (unit < block.units) to[unit] = units[i];
  }
}

template <class List>
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ List list) {
  int low = 0;
  for (int high = list.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (list.blocks[middle].first_tile <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  const CopiedBlock& block = list.blocks[low];
  const std::uint32_t first = (blockIdx.x - block.first_tile) * kTileUnits;
  switch (block.unit_log2) {
    case 4:
      return copy_tile<uint4>(block, first);
    case 3:
      return copy_tile<std::uint64_t>(block, first);
    case 2:
      return copy_tile<std::uint32_t>(block, first);
    case 1:
      return copy_tile<std::uint16_t>(block, first);
    default:
      return copy_tile<std::uint8_t>(block, first);
  }
}

template <class List>
void launch(const List& list, std::uint32_t tiles, cudaStream_t stream) {
  start(copy_kernel<List>, tiles, kCopyThreads, stream, "start a copy of strided blocks", list);
}

template <class List>
void load() {
  cudaFuncAttributes ignored;
  check(cudaFuncGetAttributes(&ignored, copy_kernel<List>), "load the kernel that copies strided blocks");
}

}  // namespace

void load_copy_kernels() {
  load<FewBlocks>();
  load<ManyBlocks>();
}

void launch_copy(const FewBlocks& list, std::uint32_t tiles, cudaStream_t stream) { launch(list, tiles, stream); }
void launch_copy(const ManyBlocks& list, std::uint32_t tiles, cudaStream_t stream) { launch(list, tiles, stream); }

}  // namespace annulus::cuda
