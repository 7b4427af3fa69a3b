// The peak of a pretend GPU, which has none.
#include "kernels/cuda/peak.h"

#include <chrono>
#include <thread>

#include "support/pretend_gpu.h"

namespace annulus::cuda {
namespace sm90 {
double queue_products(DType, int, int rounds, cudaStream_t stream) {  // beyond what the kernels here can do
  support::PretendStream::at(stream).queue([] { std::this_thread::sleep_for(std::chrono::microseconds(100)); });
  return 1e8 * rounds;
}
}  // namespace sm90
namespace mma {
double queue_products(DType dtype, int multiprocessors, int rounds, cudaStream_t stream) {
  return sm90::queue_products(dtype, multiprocessors, rounds, stream);
}
}  // namespace mma
}  // namespace annulus::cuda
