#include "api/c_abi_transport.h"

#include <array>
#include <cstdio>

#include "annulus/carrier.h"
#include "kernels/cuda/load.h"
#include "kernels/device.h"

namespace annulus {
namespace {

// Functions of C as a Carrier: their code and sentence become an exception.
class CCarrier final : public Carrier {
 public:
  explicit CCarrier(const annulus_transport_callbacks& callbacks) : callbacks_(callbacks) {}

  void post(const PackedExchange& exchange) override {
    messages(exchange.sends, sends_);
    messages(exchange.receives, receives_);
    exchange_ = {.plan = exchange.plan,
                 .step = exchange.step,
                 .sends = sends_.data(),
                 .send_count = static_cast<std::int64_t>(sends_.size()),
                 .receives = receives_.data(),
                 .receive_count = static_cast<std::int64_t>(receives_.size())};
    call("post", [&](char* message, std::size_t capacity) {
      return callbacks_.post(callbacks_.context, &exchange_, message, capacity);
    });
  }

  void wait() override {
    call("wait",
         [&](char* message, std::size_t capacity) { return callbacks_.wait(callbacks_.context, message, capacity); });
  }

  bool poll() override {
    if (callbacks_.poll != nullptr)
      call("poll",
           [&](char* message, std::size_t capacity) { return callbacks_.poll(callbacks_.context, message, capacity); });
    // A hint without an order: what has arrived is read behind `wait`.
    return callbacks_.arrived != nullptr && __atomic_load_n(callbacks_.arrived, __ATOMIC_RELAXED) != 0;
  }

  void abort(const std::string& text) noexcept override { callbacks_.abort(callbacks_.context, text.c_str()); }

 private:
  static void messages(const std::vector<PackedMessage>& from, std::vector<annulus_message>& to) {
    to.clear();
    for (const PackedMessage& message : from)
      to.push_back({.peer = message.peer,
                    .reserved = 0,
                    .data = message.bytes.data(),
                    .bytes = static_cast<std::int64_t>(message.bytes.size())});
  }

  template <class F>
  static void call(const char* name, F f) {
    std::array<char, 1024> message{};
    const int status = f(message.data(), message.size());
    if (status == 0) return;
    message.back() = '\0';
    if (message[0] == '\0')
      std::snprintf(message.data(), message.size(), "the transport's %s failed with code %d and said no more", name,
                    status);
    throw TransportError(message.data());
  }

  annulus_transport_callbacks callbacks_;
  std::vector<annulus_message> sends_, receives_;
  annulus_exchange exchange_{};
};

std::unique_ptr<Carrier> to_carrier(const annulus_transport_callbacks& callbacks) {
  const bool any =
      callbacks.post != nullptr || callbacks.wait != nullptr || callbacks.poll != nullptr || callbacks.abort != nullptr;
  if (!any) return nullptr;
  if (callbacks.post == nullptr || callbacks.wait == nullptr || callbacks.abort == nullptr)
    throw InvalidArgument(
        "a transport has the functions post, wait and abort; got some of them: give all three, or none to look ahead");
  return std::make_unique<CCarrier>(callbacks);
}

bool looks_ahead(const annulus_transport_callbacks& callbacks) { return callbacks.post == nullptr; }

}  // namespace
}  // namespace annulus

using namespace annulus;  // NOLINT(google-build-using-namespace): what follows is C's

annulus_transport::annulus_transport(const annulus_transport_callbacks& callbacks)
    : callbacks_(callbacks), host_(carried(false)) {}

std::unique_ptr<Transport> annulus_transport::carried(bool for_gpu) const {
  annulus_transport_callbacks callbacks = callbacks_;
  if (!for_gpu) callbacks.arrived = nullptr;  // threads that compute should not run into the caller's `wait`
  return make_carried_transport(callbacks.rank, callbacks.size, to_carrier(callbacks));
}

Transport& annulus_transport::of(const Options& options, const PayloadOptions& payload) {
  if (!parse_device(options.device).is_gpu || looks_ahead(callbacks_)) return *host_;
  const int index = cuda::device_index(options.device);
  std::unique_ptr<Transport>& found = on_gpus_[{index, payload.payload}];
  if (!found) found = make_device_transport(carried(true), index, payload);
  return *found;
}
