// A transport that breaks at a chosen call: what a rank does that runs out of memory, hangs up or never comes.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "annulus/transport.h"

namespace annulus::support {

enum class Fault { none, throws, leaves, sleeps };

// Counts calls of post and wait; the fault happens in call `at`, counted from 0.
class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> transport, Fault fault, int at)
      : transport_(std::move(transport)), fault_(fault), at_(at) {}

  std::string_view name() const override { return transport_->name(); }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void post(const Exchange& exchange) override {
    break_if_due();
    last_post_ = calls_ - 1;
    transport_->post(exchange);
  }
  bool poll() override { return transport_ == nullptr || transport_->poll(); }
  void wait() override {
    break_if_due();
    transport_->wait();
  }
  std::vector<std::string> all_gather(const std::string& text) override { return transport_->all_gather(text); }
  void abort(const std::string& reason) noexcept override {
    if (transport_ != nullptr) transport_->abort(reason);
  }

  int calls() const { return calls_; }
  int last_post() const { return last_post_; }

 private:
  void break_if_due() {
    if (calls_++ != at_) return;
    if (fault_ == Fault::throws) throw OutOfMemory("no memory for call " + std::to_string(at_));
    if (fault_ == Fault::leaves) {
      transport_.reset();
      throw std::runtime_error("left");
    }
    if (fault_ == Fault::sleeps) std::this_thread::sleep_for(std::chrono::seconds(2));
  }

  std::unique_ptr<Transport> transport_;
  int rank_ = transport_->rank();
  int size_ = transport_->size();
  Fault fault_;
  int at_;
  int calls_ = 0;
  int last_post_ = -1;
};

}  // namespace annulus::support
