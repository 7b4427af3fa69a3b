// The forward kernels as the host sees them. Each says what it takes; forward.cc chooses.
//
// `prepare` is for planning: it loads the kernel, which may allocate, and says how many blocks a multiprocessor holds.
#pragma once

#include <cuda_runtime.h>

#include "annulus/problem.h"
#include "kernels/cuda/forward.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/schedule.h"

namespace annulus::cuda {

inline constexpr int kMaxHeadDim = 512;

// Of the logits, times log2 e.
inline float scale_log2(const Problem& problem) { return static_cast<float>(*problem.scale * 1.442695040888963407); }

// What a launch needs to know of the problem beside Launch.
struct LaunchShape {
  DType dtype = DType::bf16;
  std::int64_t batch = 0;
  std::int64_t kv_heads = 0;
  int sweeps = 0;
  int blocks = 0;  // that the device holds at a time
  // The kernel before it in the stream is one of ours, of sm_90, and this one may start while that one ends. Every
  // kernel that is launched so waits for the one before it (ptx::wait_for_previous) in every block, whatever it does:
  // then the end of the last one is the end of them all.
  bool overlaps = false;
};

// A launch as `overlaps` says. The attribute has to live as long as the configuration.
inline void set_overlap(cudaLaunchConfig_t& config, cudaLaunchAttribute& attribute, bool overlaps) {
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
}

// Hopper: copy engine, wgmma. bf16 and fp16, head sizes 64 and 128, a positive scale; sm_90 alone.
namespace sm90 {
bool takes(const Problem& problem, const DeviceInfo& device);
TileShape tile_shape(const Problem& problem);
int arrivals(const Problem& problem);
int prepare(const Problem& problem);
// Strides and addresses that the copy engine can follow: multiples of 16 bytes.
bool can_address(const Launch& launch, const LaunchShape& shape);
void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream);
}  // namespace sm90

// Tensor cores of sm_80 and newer, by mma.sync. Every type, head sizes up to 256, any strides.
namespace mma {
bool takes(const Problem& problem, const DeviceInfo& device);
TileShape tile_shape(const Problem& problem, const DeviceInfo& device);
int prepare(const Problem& problem, const DeviceInfo& device);
void launch(const Launch& launch, const LaunchShape& shape, cudaStream_t stream);
}  // namespace mma

// Row by row: everything.
namespace rows {
void prepare(DType dtype);
void launch(const RowLaunch& launch, DType dtype, int multiprocessors, cudaStream_t stream);
}  // namespace rows

}  // namespace annulus::cuda
