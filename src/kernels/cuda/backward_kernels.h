// The backward kernels as the host sees them. Each says what it takes; backward.cc chooses.
//
// `prepare` is for planning: it loads kernels, which may allocate, and says how many blocks a multiprocessor holds.
#pragma once

#include "kernels/cuda/forward_kernels.h"
#include "kernels/cuda/gradient_launch.h"

namespace annulus::cuda {

// LSE and Delta in the order of the sums of dq (sum_plan.h): how many numbers a copy of each has, 0 where none is
// needed; and where they lie, in these copies or where they are.
std::int64_t copied_numbers(const Problem& problem);
void place_numbers(GradientLaunch& launch, float* lse, float* delta);

// Delta of eq. 7, at the rate of memory.
namespace delta {
// delta = rowsum(dout * out) * out_factor, and its copy and that of lse in the order of the sums, where they are
// wanted; dq_sums, where there are any, and the counters become 0.
void launch(const GradientLaunch& launch, DType dtype, cudaStream_t stream);
}  // namespace delta

// Hopper: copy engine, wgmma. bf16 and fp16, head sizes 64 and 128, a positive scale within fp32's range; sm_90 alone.
// All gradients by tiles of keys, dq added up in dq_sums, tile after tile where there is tiles_added; or, without
// dq_sums, dk and dv alone, and dq by tiles of queries.
namespace sm90 {
bool takes_gradient(const Problem& problem, const DeviceInfo& device);
bool can_address(const GradientLaunch& launch, const LaunchShape& shape);
int gradient_arrivals();
TileShape gradient_tile_shape(const Problem& problem);
int prepare_gradient(const Problem& problem);
void launch_gradient(const GradientLaunch& launch, const LaunchShape& shape, cudaStream_t stream);
TileShape dq_tile_shape(const Problem& problem);
int prepare_dq(const Problem& problem);
void launch_dq(const GradientLaunch& launch, const LaunchShape& shape, cudaStream_t stream);
}  // namespace sm90

// Tensor cores of sm_80 and newer, by mma.sync. Every type, head sizes up to 256, any strides. A pass for each result,
// or one for dk and dv together.
namespace mma {
enum class Part { deltas, dq, dk_dv, dk, dv };
bool takes_gradient(const Problem& problem, const DeviceInfo& device);
TileShape gradient_tile_shape(const Problem& problem);
bool has_room_for_both(const Problem& problem);  // dk and dv in one pass
int prepare_gradient(const Problem& problem, Part part);
void launch_gradient(const GradientLaunch& launch, const LaunchShape& shape, Part part, cudaStream_t stream);
}  // namespace mma

// Row by row: everything.
namespace rows {
enum class GradientRows { deltas, results };
void prepare_gradient(DType dtype);
// `shape` gives the type, and whether the launch overlaps the one before.
void launch_gradient(const GradientRowLaunch& launch, GradientRows what, const LaunchShape& shape, int multiprocessors,
                     cudaStream_t stream);
}  // namespace rows

}  // namespace annulus::cuda
