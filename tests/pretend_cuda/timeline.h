// What pretend GPUs did, and when: as kernels/cuda/timeline.h, a thread records what it queues.
#pragma once

#include <memory>
#include <mutex>

#include "kernels/cuda/backend.h"
#include "support/pretend_gpu.h"

namespace annulus::pretend {

struct Slices {
  std::mutex mutex;
  std::vector<cuda::DeviceSlice> all;
};

// Of the calling thread; null: nobody records.
inline std::shared_ptr<Slices>& recorded_slices() {
  thread_local std::shared_ptr<Slices> slices;
  return slices;
}

class PretendTimeline final : public cuda::Timeline {
 public:
  PretendTimeline() { recorded_slices() = slices_; }
  ~PretendTimeline() override { recorded_slices() = nullptr; }

  std::vector<cuda::DeviceSlice> slices() override {
    support::PretendStream::wait_for_all();
    const std::lock_guard lock(slices_->mutex);
    return slices_->all;
  }

 private:
  std::shared_ptr<Slices> slices_ = std::make_shared<Slices>();
};

inline void queue_slice(support::PretendStream& stream, const char* what, std::int64_t bytes,
                        std::function<void()> work) {
  const std::shared_ptr<Slices> slices = recorded_slices();
  if (slices == nullptr) return stream.queue(std::move(work));
  const std::lock_guard lock(slices->mutex);
  slices->all.push_back({what, bytes, {}, {}});
  stream.queue([slices, i = slices->all.size() - 1, work = std::move(work)] {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::lock_guard now(slices->mutex);
    slices->all[i].begin = begin;
    slices->all[i].end = std::chrono::steady_clock::now();
  });
}

}  // namespace annulus::pretend
