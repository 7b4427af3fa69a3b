#include "annulus/carrier.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "transport/gather.h"
#include "transport/trouble.h"

namespace annulus {
namespace {

class CarriedTransport final : public Transport {
 public:
  CarriedTransport(int rank, int size, std::unique_ptr<Carrier> carrier)
      : rank_(rank), size_(size), carrier_(std::move(carrier)) {}
  ~CarriedTransport() override {
    if (under_way_ && !failed_) carrier_->abort(left_unfinished(rank_, at_));
  }

  std::string_view name() const override { return carrier_ ? carrier_->name() : "none"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void post(const Exchange& exchange) override;
  bool poll() override;
  void wait() override;
  std::vector<std::string> all_gather(const std::string& text) override;
  void abort(const std::string& reason) noexcept override;

 private:
  void begin(const Exchange& exchange);
  void finish();
  void pack(const Exchange& exchange);
  void check_failure();
  void fail(const std::string& text);
  template <class F>
  void carry(F f);

  int rank_;
  int size_;
  std::vector<std::vector<std::byte>> packed_;  // outlives the carrier, which reads it
  std::unique_ptr<Carrier> carrier_;            // may be null: looks ahead
  std::mutex turn_;                             // one thread of this rank at a time; guards packed_ and what follows
  PackedExchange exchange_;
  std::atomic<bool> under_way_{false};

  std::mutex failure_mutex_;  // taken last: abort() comes while another thread has its turn
  Frame at_;
  std::atomic<bool> failed_{false};
  std::string failure_;
};

void CarriedTransport::post(const Exchange& exchange) {
  check_exchange(exchange, rank_, size_);
  check_host_memory(exchange, name());
  if (!carrier_)
    throw InvalidArgument("a transport without a carrier moves nothing; got an exchange for step " +
                          std::to_string(exchange.step) + ": give it a carrier, or only ask for memory and traffic");
  const std::lock_guard turn(turn_);
  begin(exchange);
  for (const PackedMessage& send : exchange_.sends) sent_bytes_ += static_cast<std::int64_t>(send.bytes.size());
}

void CarriedTransport::begin(const Exchange& exchange) {
  check_failure();
  if (under_way_)
    throw InvalidArgument("one exchange is under way at a time; got step " + std::to_string(exchange.step) +
                          " while step " + std::to_string(at_.step) + " is not finished: call wait() first");
  {
    const std::lock_guard lock(failure_mutex_);
    at_ = {exchange.plan, exchange.step, 0};
  }
  pack(exchange);
  under_way_ = !exchange_.sends.empty() || !exchange_.receives.empty();
  if (under_way_) carry([&] { carrier_->post(exchange_); });
}

// What a rank sends to itself has arrived when this returns.
void CarriedTransport::pack(const Exchange& exchange) {
  packed_.clear();
  exchange_ = {.plan = exchange.plan, .step = exchange.step, .sends = {}, .receives = {}};
  std::span<std::byte> own;
  for (const Receive& receive : exchange.receives) {
    if (receive.peer == rank_)
      own = receive.bytes;
    else if (!receive.bytes.empty())
      exchange_.receives.push_back({receive.peer, receive.bytes});
  }
  const Send* last = nullptr;
  for (const Send& send : exchange.sends) {
    const auto bytes = static_cast<std::size_t>(total_bytes(send.blocks));
    if (bytes == 0) continue;
    PackCursor cursor(send.blocks);
    if (send.peer == rank_) {
      cursor.pack(own);
      continue;
    }
    // What goes to all alike is packed once.
    if (last == nullptr || send.blocks != last->blocks) cursor.pack(packed_.emplace_back(bytes));
    last = &send;
    exchange_.sends.push_back({send.peer, packed_.back()});
  }
}

bool CarriedTransport::poll() {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn) return false;  // another thread of this rank is at it
  check_failure();
  bool arrived = false;
  if (carrier_) carry([&] { arrived = carrier_->poll(); });
  if (arrived) finish();
  return !under_way_;
}

void CarriedTransport::wait() {
  const std::lock_guard turn(turn_);
  finish();
}

void CarriedTransport::finish() {
  check_failure();
  if (!under_way_) return;
  carry([&] { carrier_->wait(); });
  under_way_ = false;
  packed_.clear();
  if (at_.plan == kGatherPlan) return;
  for (const PackedMessage& receive : exchange_.receives)
    received_bytes_ += static_cast<std::int64_t>(receive.bytes.size());
}

std::vector<std::string> CarriedTransport::all_gather(const std::string& text) {
  if (!carrier_) return std::vector(static_cast<std::size_t>(size_), text);
  const std::lock_guard turn(turn_);
  return gather_texts(rank_, size_, text, [this](const Exchange& round) {
    begin(round);
    finish();
  });
}

template <class F>
void CarriedTransport::carry(F f) {
  try {
    f();
  } catch (const TransportError& error) {
    fail(error.what());
    check_failure();
  } catch (const std::exception& error) {  // no memory, say: nobody else knows yet
    abort(error.what());
    check_failure();
  }
  check_failure();  // abort() may have come from another thread meanwhile
}

void CarriedTransport::fail(const std::string& text) {
  const std::lock_guard lock(failure_mutex_);
  if (!failed_) failure_ = text;
  failed_ = true;
}

void CarriedTransport::check_failure() {
  if (!failed_) return;
  under_way_ = false;
  const std::lock_guard lock(failure_mutex_);
  throw TransportError(failure_);
}

void CarriedTransport::abort(const std::string& reason) noexcept {
  try {
    std::string text;
    {
      const std::lock_guard lock(failure_mutex_);
      if (failed_) return;
      failure_ = text = gave_up(rank_, at_, reason);
      failed_ = true;
    }
    if (carrier_) carrier_->abort(text);
  } catch (...) {  // no memory for the text: the others find out by their deadlines
    failed_ = true;
  }
}

}  // namespace

std::unique_ptr<Transport> make_carried_transport(int rank, int size, std::unique_ptr<Carrier> carrier) {
  check_rank(rank, size);
  return std::make_unique<CarriedTransport>(rank, size, std::move(carrier));
}

}  // namespace annulus
