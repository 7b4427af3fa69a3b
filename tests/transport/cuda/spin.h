// A stream that takes its time, for tests of who waits for whom.
#pragma once

#include <chrono>
#include <thread>

#include "kernels/cuda/memory.h"

namespace annulus {

inline void spin(cudaStream_t stream, int microseconds) {
  const auto sleep = [](void* time) {
    std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<std::intptr_t>(time)));
  };
  cuda::check(cudaLaunchHostFunc(stream, sleep, reinterpret_cast<void*>(std::intptr_t{microseconds})), "take time");
}

}  // namespace annulus
