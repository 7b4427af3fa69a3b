// The conformance suite on a GPU that is not one (support/pretend_gpu.h): a transport that takes exchanges of the host,
// as the suite makes them. What is sent is written by a slow stream, and what is received is read by one.
#pragma once

#include "support/pretend_gpu.h"
#include "transport/conformance.h"
#include "transport/conformance_faults.h"

namespace annulus {

// Its stream writes what is sent to where the transport under test reads it, wrecks it after wait(), and hands out what
// has been received.
class OnPretendGpu final : public Transport {
 public:
  OnPretendGpu(std::unique_ptr<Transport> inner, bool blocking) : inner_(std::move(inner)), blocking_(blocking) {}
  ~OnPretendGpu() override {
    inner_.reset();
    stream_.wait();
  }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::int64_t staging_bytes() const override { return inner_->staging_bytes(); }

  void post(const Exchange& exchange) override {
    const std::lock_guard lock(mutex_);
    auto memory = std::make_unique<std::deque<Bytes>>();
    Exchange moved = exchange;
    moved.stream = &stream_;
    for (Send& send : moved.sends)
      for (StridedBlock& block : send.blocks) block.data = written_late(block, *memory);
    for (Receive& receive : moved.receives) receive.bytes = memory->emplace_back(receive.bytes.size());
    try {
      inner_->post(moved);
    } catch (...) {
      stream_.wait();  // which writes what goes now
      throw;
    }
    memory_ = std::move(memory);
    host_ = exchange.receives;
    moved_ = moved.receives;
    sent_bytes_ = inner_->sent_bytes();
    if (blocking_) finish();
  }
  bool poll() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!inner_->poll() || !lock) return false;
    finish();
    return true;
  }
  void wait() override {
    const std::lock_guard lock(mutex_);
    finish();
  }
  std::vector<std::string> all_gather(const std::string& text) override { return inner_->all_gather(text); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  const std::byte* written_late(const StridedBlock& block, std::deque<Bytes>& memory) {
    if (block.bytes() == 0) return nullptr;
    std::int64_t extent = block.run_bytes;
    for (const Axis& axis : block.axes) extent += (axis.count - 1) * axis.stride_bytes;
    Bytes& late = memory.emplace_back(static_cast<std::size_t>(extent), std::byte{0xee});
    stream_.queue([from = Bytes(block.data, block.data + extent), &late] {
      std::this_thread::sleep_for(50us);
      std::ranges::copy(from, late.begin());
    });
    return late.data();
  }

  void finish() {
    inner_->wait();
    received_bytes_ = inner_->received_bytes();
    if (!memory_) return;
    stream_.queue([this] {
      for (std::size_t i = 0; i < host_.size(); ++i) std::ranges::copy(moved_[i].bytes, host_[i].bytes.begin());
      for (Bytes& bytes : *memory_) std::ranges::fill(bytes, std::byte{0xdd});
    });
    stream_.wait();
    memory_.reset();
  }

  std::mutex mutex_;
  std::unique_ptr<std::deque<Bytes>> memory_;
  std::vector<Receive> host_, moved_;
  support::PretendStream stream_;
  std::unique_ptr<Transport> inner_;
  bool blocking_;
};

}  // namespace annulus
