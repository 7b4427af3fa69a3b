#include "kernels/cuda/timeline.h"

#include <deque>
#include <stdexcept>

#include "kernels/cuda/memory.h"

namespace annulus::cuda {
namespace {

class CudaTimeline;
thread_local CudaTimeline* recording = nullptr;

class CudaTimeline final : public Timeline {
 public:
  CudaTimeline() {
    check(cudaGetDevice(&device_), "find a CUDA device");
    if (recording != nullptr) throw std::logic_error("a thread has one timeline at a time");
    const Stream stream;
    origin_.record(stream.get());
    stream.wait();
    begin_ = std::chrono::steady_clock::now();
    recording = this;
  }
  ~CudaTimeline() override { recording = nullptr; }

  std::vector<DeviceSlice> slices() override {
    const DeviceScope scope(device_);
    std::vector<DeviceSlice> result;
    const auto time_of = [&](const Event& event) {
      return begin_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                          std::chrono::duration<double, std::milli>(event.ms_since(origin_)));
    };
    for (const Recorded& one : recorded_) result.push_back({one.what, one.bytes, time_of(one.begin), time_of(one.end)});
    return result;
  }

  // Returns the event that is to end it.
  cudaEvent_t begin(const char* what, std::int64_t bytes, cudaStream_t stream) {
    recorded_.emplace_back();
    recorded_.back().what = what;
    recorded_.back().bytes = bytes;
    recorded_.back().begin.record(stream);
    return recorded_.back().end.get();
  }

 private:
  struct Recorded {
    const char* what = "";
    std::int64_t bytes = 0;
    Event begin, end;
  };
  int device_ = 0;
  Event origin_;
  std::chrono::steady_clock::time_point begin_;
  std::deque<Recorded> recorded_;
};

}  // namespace

std::unique_ptr<Timeline> make_timeline() { return std::make_unique<CudaTimeline>(); }

Slice::Slice(const char* what, std::int64_t bytes, cudaStream_t stream) : stream_(stream) {
  if (recording != nullptr) end_ = recording->begin(what, bytes, stream);
}

Slice::~Slice() {
  // A GPU that has failed has no time to tell; whoever waits for it hears why.
  if (end_ != nullptr && recording != nullptr) (void)cudaEventRecord(end_, stream_);
}

}  // namespace annulus::cuda
