#include "kernels/cuda/peak.h"

#include <algorithm>

#include "kernels/cuda/memory.h"

namespace annulus::cuda {

Peak measure_peak(const DeviceInfo& device, DType dtype) {
  constexpr int kLaunches = 8;
  constexpr int kRounds = 20'000;  // a few milliseconds
  const bool hopper = device.compute_capability == 90;
  const bool fp32 = dtype == DType::fp32;
  const DType used = fp32 ? DType::fp16 : dtype;
  const auto queue = hopper ? sm90::queue_products : mma::queue_products;
  const Stream stream;
  Peak peak;
  peak.instruction = (fp32 ? "a third of " : "") + std::string(name(used)) + (hopper ? " wgmma" : " mma.sync");
  queue(used, device.multiprocessors, 1, stream.get());  // loads the kernel
  for (int i = 0; i < kLaunches; ++i) {
    Event begin, end;
    begin.record(stream.get());
    const double flop = queue(used, device.multiprocessors, kRounds, stream.get());
    end.record(stream.get());
    peak.flop_per_s = std::max(peak.flop_per_s, flop / (end.ms_since(begin) * 1e-3));
  }
  if (fp32) peak.flop_per_s /= 3;
  return peak;
}

}  // namespace annulus::cuda
