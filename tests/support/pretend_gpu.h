// A GPU for machines that have none: memory of the host, streams that are threads, events as CUDA has them. Slow on
// purpose here and there, so that whoever does not wait for an event meets unfinished work.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "transport/device_copies.h"
#include "transport/device_link.h"

namespace annulus::support {

class PretendStream {
 public:
  PretendStream() : thread_([state = state_](const std::stop_token& stop) { state->run(stop); }) {
    const std::lock_guard lock(all().mutex);
    all().states.push_back(state_);
  }
  ~PretendStream() {
    wait();
    const std::lock_guard lock(all().mutex);
    std::erase(all().states, state_);
  }

  void queue(std::function<void()> work) { state_->queue(std::move(work)); }
  void wait() { state_->wait(); }

  // What is queued on any stream now is done.
  static void wait_for_all() {
    std::vector<std::shared_ptr<State>> states;
    {
      const std::lock_guard lock(all().mutex);
      states = all().states;
    }
    for (const auto& state : states) state->wait();
  }
  // As CUDA names them: null and 1 are the stream that is always there.
  static PretendStream& at(void* stream) {
    static PretendStream always;
    return stream == nullptr || stream == reinterpret_cast<void*>(1) ? always : *static_cast<PretendStream*>(stream);
  }

 private:
  class State {
   public:
    void queue(std::function<void()> work) {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
      ++queued_;
      news_.notify_all();
    }
    void wait() {
      std::unique_lock lock(mutex_);
      news_.wait(lock, [&, until = queued_] { return done_ >= until; });
    }
    void run(const std::stop_token& stop) {
      std::unique_lock lock(mutex_);
      while (news_.wait(lock, stop, [&] { return !queue_.empty(); })) {
        auto work = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        work();
        work = nullptr;  // and with it what it kept
        lock.lock();
        ++done_;
        news_.notify_all();
      }
    }

   private:
    std::mutex mutex_;
    std::condition_variable_any news_;
    std::deque<std::function<void()>> queue_;
    std::int64_t queued_ = 0, done_ = 0;
  };
  struct All {
    std::mutex mutex;
    std::vector<std::shared_ptr<State>> states;
  };
  static All& all() {
    static auto& all = *new All;  // streams may outlive whatever ends before them
    return all;
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::jthread thread_;  // last: it uses the other
};

class PretendEvent final : public DeviceEvent {
 public:
  void record(void* stream) override {
    const std::lock_guard lock(state_->mutex);
    PretendStream::at(stream).queue([state = state_, moment = ++state_->recorded] { state->pass(moment); });
  }
  bool passed() override {
    const std::lock_guard lock(state_->mutex);
    return state_->passed >= state_->recorded;
  }
  void wait() override { state_->wait(recorded()); }
  void hold(PretendStream& stream) const {
    stream.queue([state = state_, moment = recorded()] { state->wait(moment); });
  }

 private:
  struct State {
    void pass(std::int64_t moment) {
      const std::lock_guard lock(mutex);
      passed = std::max(passed, moment);
      news.notify_all();
    }
    void wait(std::int64_t moment) {
      std::unique_lock lock(mutex);
      news.wait(lock, [&] { return passed >= moment; });
    }
    std::mutex mutex;
    std::condition_variable news;
    std::int64_t recorded = 0, passed = 0;
  };
  std::int64_t recorded() const {
    const std::lock_guard lock(state_->mutex);
    return state_->recorded;
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class PretendBytes final : public OwnedBytes {
 public:
  explicit PretendBytes(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {}
  std::span<std::byte> bytes() override { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class PretendCopies final : public DeviceCopies {
 public:
  explicit PretendCopies(int lanes, int device = 0) : device_(device), lanes_(static_cast<std::size_t>(lanes)) {}
  ~PretendCopies() override { settle(); }

  static inline thread_local int current_device = -1;  // of the calling thread

  int device() const override { return device_; }
  int use(int device) noexcept override { return std::exchange(current_device, device); }
  void* lane(int index) override { return &lanes_[static_cast<std::size_t>(index)]; }
  std::unique_ptr<DeviceEvent> event() override { return std::make_unique<PretendEvent>(); }
  void hold(void* stream, DeviceEvent& event) override {
    static_cast<PretendEvent&>(event).hold(PretendStream::at(stream));
  }
  std::unique_ptr<OwnedBytes> host_memory(std::int64_t bytes) override { return std::make_unique<PretendBytes>(bytes); }
  std::unique_ptr<OwnedBytes> device_memory(std::int64_t bytes) override {
    return std::make_unique<PretendBytes>(bytes);
  }
  void reach(int) override {}

  void gather(std::span<const StridedBlock> blocks, int, std::byte* packed, int lane) override {
    queue(lane, [blocks = std::vector(blocks.begin(), blocks.end()), packed]() mutable {
      for (const StridedBlock& block : blocks) packed = pack(block, packed);
    });
  }
  void copy(std::span<const std::byte> from, std::byte* to, int lane) override {
    queue(lane, [from, to] { std::ranges::copy(from, to); });
  }
  void settle() noexcept override {
    for (PretendStream& lane : lanes_) lane.wait();
  }

 private:
  void queue(int lane, std::function<void()> work) {
    lanes_[static_cast<std::size_t>(lane)].queue([work = std::move(work), slow = ++queued_ % 7 == 0] {
      if (slow) std::this_thread::sleep_for(std::chrono::microseconds(200));
      work();
    });
  }

  int device_;
  std::deque<PretendStream> lanes_;
  std::atomic<int> queued_{0};
};

// The wires between the GPUs of a group.
struct PretendWires {
  std::mutex mutex;
  std::condition_variable news;
  std::set<std::pair<int, int>> called;                                        // [from, to]
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> messages;  // [from, to]
};

// As with NCCL, two ranks are connected when both first have something for each other, and nothing of a group moves
// before all of its ranks are.
class PretendLink final : public DeviceLink {
 public:
  PretendLink(std::shared_ptr<PretendWires> wires, int rank) : wires_(std::move(wires)), rank_(rank) {}
  ~PretendLink() override { cut(); }

  bool ready() override { return ++asked_ % 3 != 0; }  // takes a moment now and then
  void queue(std::span<const LinkMessage> sends, std::span<const LinkMessage> receives, void* stream) override {
    static_cast<PretendStream*>(stream)->queue([wires = wires_, is_cut = cut_, rank = rank_,
                                                sends = std::vector(sends.begin(), sends.end()),
                                                receives = std::vector(receives.begin(), receives.end())] {
      std::unique_lock lock(wires->mutex);
      for (const auto* const messages : {&sends, &receives})
        for (const LinkMessage& message : *messages) wires->called.emplace(rank, message.peer);
      wires->news.notify_all();
      for (const auto* const messages : {&sends, &receives})
        for (const LinkMessage& message : *messages)
          wires->news.wait(lock, [&] { return *is_cut || wires->called.contains({message.peer, rank}); });
      if (*is_cut) return;
      for (const auto& [peer, data, bytes] : sends) wires->messages[{rank, peer}].emplace_back(data, data + bytes);
      wires->news.notify_all();
      for (const auto& [peer, data, bytes] : receives) {
        auto& messages = wires->messages[{peer, rank}];
        wires->news.wait(lock, [&] { return *is_cut || !messages.empty(); });
        if (*is_cut) return;
        std::ranges::copy(messages.front(), data);
        messages.pop_front();
      }
    });
  }
  void cut() noexcept override {
    const std::lock_guard lock(wires_->mutex);
    *cut_ = true;
    wires_->news.notify_all();
  }

 private:
  std::shared_ptr<PretendWires> wires_;
  int rank_;
  int asked_ = 0;
  std::shared_ptr<bool> cut_ = std::make_shared<bool>(false);
};

}  // namespace annulus::support
