// The conformance suite on GPU memory: a transport that takes exchanges of the host, as the suite makes them, puts
// their memory on the GPU as it lies, strides and gaps and all, and moves it there by the transport under test.
#pragma once

#include "transport/conformance.h"
#include "transport/conformance_faults.h"
#include "transport/cuda/gpu_copy.h"

namespace annulus {

class OnGpu final : public Transport {
 public:
  OnGpu(std::unique_ptr<Transport> inner, bool blocking) : inner_(std::move(inner)), blocking_(blocking) {}
  ~OnGpu() override { inner_.reset(); }  // before the memory goes

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::int64_t staging_bytes() const override { return inner_->staging_bytes(); }

  void post(const Exchange& exchange) override {
    const std::lock_guard lock(mutex_);
    auto copy = std::make_unique<GpuCopy>(exchange, stream_.get());
    inner_->post(copy->exchange);
    copy_ = std::move(copy);
    sent_bytes_ = inner_->sent_bytes();
    if (blocking_) finish();
  }
  bool poll() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return inner_->poll() && false;
    if (!inner_->poll()) return false;
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
  void finish() {
    inner_->wait();
    received_bytes_ = inner_->received_bytes();
    if (copy_) copy_->bring_back(stream_.get());
    copy_.reset();
  }

  std::mutex mutex_;
  cuda::Stream stream_;
  std::unique_ptr<Transport> inner_;
  bool blocking_;
  std::unique_ptr<GpuCopy> copy_;
};

// Ranks that are threads of this process, whatever moves their memory.
class GpuThreadRanks final : public Ranks {
 public:
  using Make = std::function<std::vector<std::unique_ptr<Transport>>(const TransportOptions&)>;

  GpuThreadRanks(int size, Make make) : size_(size), make_(std::move(make)) {}
  int size() const override { return size_; }

  void run(const TransportOptions& options, const Body& body) override {
    auto transports = make_(options);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank)
      threads.emplace_back([&, rank, own = std::move(transports[static_cast<std::size_t>(rank)])]() mutable {
        try {
          body(std::make_unique<OnGpu>(std::move(own), options.blocking));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int size_;
  Make make_;
};

}  // namespace annulus
