// Every CUDA call goes through here.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "annulus/errors.h"

namespace annulus::cuda {

// Throws when a call failed; `what` completes "could not ...".
inline void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  const std::string got = std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
  cudaGetLastError();  // a refused allocation is no reason for the next call to fail
  if (status == cudaErrorMemoryAllocation)
    throw OutOfMemory("the GPU's memory must hold the problem; could not " + what + ", got " + got +
                      ": give smaller sizes or free memory on the device");
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver)
    throw DeviceError("device cuda needs an NVIDIA GPU and a driver as new as this library's CUDA; got " + got +
                      ": look at nvidia-smi, or use device cpu");
  throw DeviceError("the GPU must do what it is asked; could not " + what + ", got " + got +
                    ": look at nvidia-smi and at the driver's version, or use device cpu instead of cuda");
}

}  // namespace annulus::cuda
