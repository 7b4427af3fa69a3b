// mma.sync and nothing else: eight warps, independent accumulators.
#include "kernels/cuda/check.h"
#include "kernels/cuda/peak.h"
#include "kernels/cuda/peak_random.cuh"
#include "kernels/cuda/ptx_mma.cuh"

namespace annulus::cuda::mma {
namespace {

constexpr int kWarpsAtOnce = 8, kChains = 16;

template <class T>
__global__ void __launch_bounds__(kWarpsAtOnce * 32) multiply(int rounds, float* sink) {
  std::uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = hashed_pair<T>(threadIdx.x * 64 + i);
  for (int i = 0; i < 2; ++i) b[i] = hashed_pair<T>(threadIdx.x * 64 + 32 + i);
  float d[kChains][4] = {};
  for (int round = 0; round < rounds; ++round)
#pragma unroll
    for (int i = 0; i < kChains; ++i) ptx::mma_m16n8k16<T>(d[i], a, b[0], b[1]);
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += d[i][0];
  if (sum == 0.123f) *sink = sum;  // never: but the compiler does not know
}

}  // namespace

double queue_products(DType dtype, int multiprocessors, int rounds, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(2 * multiprocessors);
  float* const sink = nullptr;
  if (dtype == DType::fp16)
    multiply<__half><<<blocks, kWarpsAtOnce * 32, 0, stream>>>(rounds, sink);
  else
    multiply<__nv_bfloat16><<<blocks, kWarpsAtOnce * 32, 0, stream>>>(rounds, sink);
  check(cudaGetLastError(), "start the peak loop");
  return 2.0 * 16 * 8 * 16 * kChains * kWarpsAtOnce * 2 * multiprocessors * rounds;
}

}  // namespace annulus::cuda::mma
