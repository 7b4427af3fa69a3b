#include "kernels/cuda/copies.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <set>
#include <vector>

#include "kernels/cuda/copy_blocks.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/timeline.h"

namespace annulus::cuda {
namespace {

// A block's units are counted in 32 bits even when they are single bytes.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

class CudaEvent final : public DeviceEvent {
 public:
  explicit CudaEvent(int device) : device_(device) {
    const DeviceScope scope(device_);
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event");
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(void* stream) override {
    const DeviceScope scope(device_);
    check(cudaEventRecord(event_, as_stream(stream)), "record an event");
  }
  bool passed() override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "ask for an event");
    return true;
  }
  void wait() override { check(cudaEventSynchronize(event_), "wait for an event"); }

  cudaEvent_t get() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

class PinnedBytes final : public OwnedBytes {
 public:
  explicit PinnedBytes(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    if (bytes > 0)
      check(cudaHostAlloc(&data_, bytes_, cudaHostAllocPortable),
            "pin " + std::to_string(bytes) + " bytes of the host");
  }
  ~PinnedBytes() override {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  std::span<std::byte> bytes() override { return {static_cast<std::byte*>(data_), bytes_}; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class DeviceBytes final : public OwnedBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) : buffer_(static_cast<std::size_t>(bytes)) {}
  std::span<std::byte> bytes() override { return {buffer_.data(), buffer_.bytes()}; }

 private:
  DeviceBuffer buffer_;
};

class Lane {
 public:
  Lane() {
    int lowest = 0, highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "ask for priorities of streams");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "create a stream");
  }
  ~Lane() { cudaStreamDestroy(stream_); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

Divisor divisor(std::int64_t value) {
  const auto d = static_cast<std::uint64_t>(value);
  const auto shift = static_cast<std::uint32_t>(31 + std::bit_width(d - 1));
  const std::uint64_t factor = ((std::uint64_t{1} << shift) + d - 1) / d;
  return {static_cast<std::uint32_t>(d), static_cast<std::uint32_t>(factor), shift};
}

// Lays out a launch after another: as many blocks as the parameters hold.
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  // Returns one behind the last byte written.
  std::byte* add(const StridedBlock& given, std::byte* to) {
    const std::int64_t bytes = given.bytes();
    if (bytes == 0) return to;
    if (bytes > kMostBytes) {
      for (std::int64_t first = 0; first < bytes; first += kMostBytes)
        for (const StridedBlock& part : part_of({&given, 1}, first, std::min(kMostBytes, bytes - first)))
          to = add(part, to);
      return to;
    }
    const StridedBlock block = with_longest_runs(given);
    auto bits = reinterpret_cast<std::uintptr_t>(block.data) | reinterpret_cast<std::uintptr_t>(to) |
                static_cast<std::uintptr_t>(block.run_bytes);
    for (const Axis& axis : block.axes)
      if (axis.count > 1) bits |= static_cast<std::uintptr_t>(axis.stride_bytes);
    CopiedBlock copied;
    copied.from = block.data;
    copied.to = to;
    copied.unit_log2 = static_cast<std::uint32_t>(std::min(std::countr_zero(bits), 4));
    copied.units = static_cast<std::uint32_t>(bytes >> copied.unit_log2);
    copied.run = divisor(block.run_bytes >> copied.unit_log2);
    for (std::size_t i = 0; i < 4; ++i) copied.stride_bytes[i] = block.axes[i].stride_bytes;
    for (std::size_t i = 0; i < 3; ++i) copied.counts[i] = divisor(block.axes[i + 1].count);
    copied.first_tile = tiles_;
    tiles_ += (copied.units + kTileUnits - 1) / kTileUnits;
    blocks_.push_back(copied);
    if (blocks_.size() == ManyBlocks::kMostBlocks) flush();
    return to + bytes;
  }

  void flush() {
    if (blocks_.empty()) return;
    if (blocks_.size() <= FewBlocks::kMostBlocks)
      launch<FewBlocks>();
    else
      launch<ManyBlocks>();
    blocks_.clear();
    tiles_ = 0;
  }

 private:
  template <class List>
  void launch() const {
    List list;
    list.count = static_cast<int>(blocks_.size());
    std::ranges::copy(blocks_, list.blocks);
    launch_copy(list, tiles_, stream_);
  }

  cudaStream_t stream_;
  std::vector<CopiedBlock> blocks_;
  std::uint32_t tiles_ = 0;
};

// Between devices that cannot read each other's memory: the driver takes it through the host, rows at a time.
std::byte* copy_rows(const StridedBlock& given, std::byte* to, cudaStream_t stream) {
  const StridedBlock block = with_longest_runs(given);
  const auto run = static_cast<std::size_t>(block.run_bytes);
  const auto& axes = block.axes;
  for (std::int64_t i0 = 0; i0 < axes[0].count; ++i0)
    for (std::int64_t i1 = 0; i1 < axes[1].count; ++i1)
      for (std::int64_t i2 = 0; i2 < axes[2].count; ++i2)
        for (std::int64_t i3 = 0; i3 < axes[3].count; ++i3, to += run)
          check(cudaMemcpyAsync(to,
                                block.data + i0 * axes[0].stride_bytes + i1 * axes[1].stride_bytes +
                                    i2 * axes[2].stride_bytes + i3 * axes[3].stride_bytes,
                                run, cudaMemcpyDefault, stream),
                "copy between devices");
  return to;
}

class CudaCopies final : public DeviceCopies {
 public:
  CudaCopies(int device, int lanes) : device_(device) {
    const DeviceScope scope(device_);
    load_copy_kernels();
    for (int i = 0; i < lanes; ++i) lanes_.emplace_back();
  }
  ~CudaCopies() override { settle(); }

  int device() const override { return device_; }
  void* lane(int index) override { return stream(index); }
  std::unique_ptr<DeviceEvent> event() override { return std::make_unique<CudaEvent>(device_); }
  void hold(void* waiting, DeviceEvent& event) override {
    const DeviceScope scope(device_);
    check(cudaStreamWaitEvent(as_stream(waiting), static_cast<CudaEvent&>(event).get()), "wait for an event");
  }
  std::unique_ptr<OwnedBytes> host_memory(std::int64_t bytes) override {
    const DeviceScope scope(device_);
    return std::make_unique<PinnedBytes>(bytes);
  }
  std::unique_ptr<OwnedBytes> device_memory(std::int64_t bytes) override {
    const DeviceScope scope(device_);
    return std::make_unique<DeviceBytes>(bytes);
  }

  // Only cudaSetDevice gives a thread a context, even where the device is the thread's already. An error stays for
  // whoever uses the device next.
  int use(int device) noexcept override {
    int before = device;
    cudaGetDevice(&before);
    cudaSetDevice(device);
    return before;
  }

  void reach(int device) override;
  void gather(std::span<const StridedBlock> blocks, int device, std::byte* packed, int lane) override;
  void copy(std::span<const std::byte> from, std::byte* to, int lane) override {
    const DeviceScope scope(device_);
    const Slice slice("copy", static_cast<std::int64_t>(from.size()), stream(lane));
    if (!from.empty())
      check(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyDefault, stream(lane)), "copy staged bytes");
  }
  void settle() noexcept override {
    for (const Lane& lane : lanes_) cudaStreamSynchronize(lane.get());
  }

 private:
  cudaStream_t stream(int lane) const { return lanes_[static_cast<std::size_t>(lane)].get(); }

  int device_;
  std::deque<Lane> lanes_;
  std::set<int> reached_;  // other devices whose memory this one reads
};

// Memory of cudaMalloc and of the device's pool (cudaMallocAsync) opens by a call of its own each.
void CudaCopies::reach(int device) {
  if (device == device_ || reached_.contains(device)) return;
  const DeviceScope scope(device_);
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device_, device), "ask for the way to cuda:" + std::to_string(device));
  if (can == 0) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    check(status, "open the way to cuda:" + std::to_string(device));
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, device), "find the pool of cuda:" + std::to_string(device));
  cudaMemAccessDesc access{};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = device_;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  check(cudaMemPoolSetAccess(pool, &access, 1), "open the pool of cuda:" + std::to_string(device));
  reached_.insert(device);
}

void CudaCopies::gather(std::span<const StridedBlock> blocks, int device, std::byte* packed, int lane) {
  const DeviceScope scope(device_);
  const Slice slice("copy", total_bytes(blocks), stream(lane));
  if (device != device_ && !reached_.contains(device)) {
    for (const StridedBlock& block : blocks) packed = copy_rows(block, packed, stream(lane));
    return;
  }
  if (blocks.size() == 1) {
    const StridedBlock block = with_longest_runs(blocks.front());
    if (block.bytes() == block.run_bytes)  // a copy engine does it, and leaves the processors to others
      return check(cudaMemcpyAsync(packed, block.data, static_cast<std::size_t>(block.run_bytes), cudaMemcpyDefault,
                                   stream(lane)),
                   "copy bytes");
  }
  Launches launches(stream(lane));
  for (const StridedBlock& block : blocks) packed = launches.add(block, packed);
  launches.flush();
}

}  // namespace

std::unique_ptr<DeviceCopies> make_copies(int device, int lanes) { return std::make_unique<CudaCopies>(device, lanes); }

}  // namespace annulus::cuda
