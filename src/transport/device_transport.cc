#include "transport/device_transport.h"

#include <algorithm>
#include <thread>

namespace annulus {

DeviceTransport::DeviceTransport(std::unique_ptr<Transport> host, std::unique_ptr<DeviceCopies> copies, bool blocking)
    : host_(std::move(host)), copies_(std::move(copies)), posted_(copies_->event()), blocking_(blocking) {}

// Failures leave nothing under way. Those of the host's transport are known to all; others are told to all. What is
// refused is no failure.
template <class F>
auto DeviceTransport::guarded(F f) {
  const auto give_up = [&] {
    drop();
    under_way_ = false;
    held_ = true;
  };
  try {
    return f();
  } catch (const InvalidArgument&) {
    throw;
  } catch (const TransportError&) {
    give_up();
    throw;
  } catch (const std::exception& error) {
    host_->abort(error.what());
    give_up();
    throw;
  }
}

void DeviceTransport::post(const Exchange& exchange) {
  check_exchange(exchange, rank(), size());
  const OnDevice on_device(*copies_);
  {
    const std::lock_guard turn(turn_);
    if (under_way_)
      throw InvalidArgument("one exchange is under way at a time; got step " + std::to_string(exchange.step) +
                            " while step " + std::to_string(exchange_.step) + " is not finished: call wait() first");
    if (!held_) finish(true);
    if (exchange.stream == nullptr) {
      guarded([&] { host_->post(exchange); });
      passes_through_ = true;
      return count_host();
    }
    // Nothing to move, but from here on the host's transport names this step.
    guarded([&] { host_->post({.plan = exchange.plan, .step = exchange.step}); });
    passes_through_ = false;
    exchange_ = exchange;
    std::erase_if(exchange_.sends, [](const Send& send) { return total_bytes(send.blocks) == 0; });
    std::erase_if(exchange_.receives, [](const Receive& receive) { return receive.bytes.empty(); });
    guarded([&] {
      posted_->record(exchange_.stream);
      begin();
    });
    under_way_ = true;
    held_ = false;
    for (const Send& send : exchange_.sends)
      if (send.peer != rank()) sent_bytes_ += total_bytes(send.blocks);
  }
  if (blocking_) wait();
}

bool DeviceTransport::poll() {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn) return false;  // another thread of this rank is at it
  const OnDevice on_device(*copies_);
  if (under_way_) return finish(false);
  const bool idle = guarded([&] { return host_->poll(); });
  count_host();
  return idle;
}

void DeviceTransport::wait() {
  const OnDevice on_device(*copies_);
  const std::lock_guard turn(turn_);
  guarded([&] { host_->poll(); });  // a failure may have come since all was moved
  if (under_way_ || !held_) {
    finish(true);
  } else {
    guarded([&] { host_->wait(); });
    count_host();
  }
}

bool DeviceTransport::finish(bool may_wait) {
  return guarded([&] {
    if (under_way_ && !advance(may_wait)) return false;
    under_way_ = false;
    if (!may_wait || held_) return true;
    hold();
    held_ = true;
    if (blocking_) copies_->settle();
    return true;
  });
}

void DeviceTransport::count_host() {
  const std::int64_t sent = host_->sent_bytes(), received = host_->received_bytes();
  if (passes_through_) {
    sent_bytes_ += sent - host_sent_;
    received_bytes_ += received - host_received_;
  }
  host_sent_ = sent;
  host_received_ = received;
}

std::vector<std::string> DeviceTransport::all_gather(const std::string& text) {
  const OnDevice on_device(*copies_);
  const std::lock_guard turn(turn_);
  if (under_way_)
    throw InvalidArgument("texts are gathered between exchanges; step " + std::to_string(exchange_.step) +
                          " is not finished: call wait() first");
  return guarded([&] { return host_->all_gather(text); });
}

void DeviceTransport::abort(const std::string& reason) noexcept {
  const OnDevice on_device(*copies_);
  host_->abort(reason);  // another thread of this rank that waits hears of it, and lets go
  const std::lock_guard turn(turn_);
  drop();
  under_way_ = false;
  held_ = true;
}

void DeviceTransport::close() noexcept {
  const OnDevice on_device(*copies_);
  const std::lock_guard turn(turn_);
  if (!under_way_) return;
  host_->abort(left_unfinished(rank(), {exchange_.plan, exchange_.step, 0}));
  drop();
}

// Busy for a moment, then with pauses that grow.
void DeviceTransport::nap() {
  host_->poll();
  naps_ = std::min(naps_ + 1, 1000);
  if (naps_ < 200)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(naps_ / 10));
}

}  // namespace annulus
