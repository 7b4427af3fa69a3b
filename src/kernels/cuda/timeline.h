// Timeline: what a GPU did, and when, by its own clock; for traces. While a timeline lives, what its thread queues is
// recorded: a rank has a thread of its own.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "kernels/cuda/backend.h"

namespace annulus::cuda {

std::unique_ptr<Timeline> make_timeline();  // of the current device

// Work that is queued on a stream while this lives. Costs nothing where nobody records.
class Slice {
 public:
  Slice(const char* what, std::int64_t bytes, cudaStream_t stream);
  ~Slice();
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;

 private:
  cudaStream_t stream_;
  cudaEvent_t end_ = nullptr;  // null: nobody records
};

}  // namespace annulus::cuda
