// An exchange becomes a list of legs, exchanges of the host's transport that move a piece each: in leg (d, i) a rank
// sends piece i of its message to rank + d and receives piece i of the message from rank - d. Both ends know a
// message's size, so they cut it alike. All ranks go through their legs in the order of (d, i): of all legs that are
// not finished, the ranks that share the first one have no other before it, so somebody always moves on.
//
// Leg i uses slot i % 2 in both directions: while the host's transport moves it, the GPU packs what leg i + 1 sends on
// one lane and unpacks what leg i - 1 brought on the other.
//
// The slots are pinned memory of the host, from where any transport takes them on. One that takes memory of GPUs is
// lent slots there, and bytes then never see the host: it gets a slot only when the GPU has packed or unpacked it, as
// ever, and only slots, since after a failure it may be at them for longer than a caller keeps its memory.
#include "transport/staged.h"

#include <algorithm>
#include <array>

#include "transport/borrower.h"
#include "transport/device_transport.h"

namespace annulus {
namespace {

constexpr int kPackLane = 0, kUnpackLane = 1;

struct Leg {
  const Send* send = nullptr;  // none
  std::int64_t send_bytes = 0;
  const Receive* receive = nullptr;  // none
  std::int64_t receive_bytes = 0;
  std::int64_t first = 0;  // where the piece begins in either message
};

Borrower* borrower_of(Transport& host) {
  auto* const borrower = dynamic_cast<Borrower*>(&host);
  return borrower != nullptr && borrower->takes_device_memory() ? borrower : nullptr;
}

class StagedTransport final : public DeviceTransport {
 public:
  StagedTransport(std::unique_ptr<Transport> host, std::unique_ptr<DeviceCopies> copies, const StagingOptions& options)
      : DeviceTransport(std::move(host), std::move(copies), options.blocking),
        borrower_(borrower_of(*host_)),
        name_((borrower_ != nullptr ? "CUDA-aware " : "staged ") + std::string(host_->name())),
        piece_bytes_(options.piece_bytes) {
    const std::int64_t bytes = staged_staging_bytes(size(), options);
    memory_ = borrower_ != nullptr ? copies_->device_memory(bytes) : copies_->host_memory(bytes);
    if (borrower_ != nullptr) borrower_->borrow(memory_);
    for (std::size_t i = 0; i < 2; ++i) {
      packed_[i] = copies_->event();
      unpacked_[i] = copies_->event();
      ended_[i] = copies_->event();
    }
  }
  ~StagedTransport() override {
    close();
    const OnDevice on_device(*copies_);
    copies_->settle();
    if (host_->size() > 1) host_.reset();  // before the memory that it may be reading
  }

  std::string_view name() const override { return name_; }
  std::int64_t staging_bytes() const override {
    return host_->staging_bytes() + static_cast<std::int64_t>(memory_->bytes().size());
  }
  std::int64_t device_staging_bytes() const override {
    return borrower_ != nullptr ? static_cast<std::int64_t>(memory_->bytes().size()) : 0;
  }

 private:
  void begin() override;
  bool advance(bool may_wait) override;
  void hold() override;

  void add_legs(const Send* send, const Receive* receive);
  void pack_ahead();
  void post_leg();
  void finish_leg();
  std::span<std::byte> slot(std::size_t leg, std::size_t direction) {
    const auto bytes = static_cast<std::size_t>(piece_bytes_);
    return memory_->bytes().subspan((leg % 2 * 2 + direction) * bytes, bytes);
  }
  std::span<std::byte> send_slot(std::size_t leg) { return slot(leg, 0); }
  std::span<std::byte> receive_slot(std::size_t leg) { return slot(leg, 1); }

  Borrower* borrower_;  // the host's transport, where it takes memory of GPUs
  std::string name_;
  std::int64_t piece_bytes_;
  std::shared_ptr<OwnedBytes> memory_;
  std::array<std::unique_ptr<DeviceEvent>, 2> packed_, unpacked_;  // [slot]
  std::array<std::unique_ptr<DeviceEvent>, 2> ended_;              // [lane]: all that the exchange queued there
  std::vector<Leg> legs_;
  std::size_t packed_legs_ = 0;  // packing is queued for these
  std::size_t leg_ = 0;          // the next, or the one that the host's transport moves
  bool moving_ = false;
};

void StagedTransport::begin() {
  legs_.clear();
  packed_legs_ = leg_ = 0;
  moving_ = false;
  for (const int lane : {kPackLane, kUnpackLane}) copies_->hold(copies_->lane(lane), *posted_);

  const auto size = static_cast<std::size_t>(this->size()), own = static_cast<std::size_t>(rank());
  std::vector<const Send*> sends(size);
  std::vector<const Receive*> receives(size);
  for (const Send& send : exchange_.sends) sends[static_cast<std::size_t>(send.peer)] = &send;
  for (const Receive& receive : exchange_.receives) receives[static_cast<std::size_t>(receive.peer)] = &receive;
  if (sends[own] != nullptr)
    copies_->gather(sends[own]->blocks, copies_->device(), receives[own]->bytes.data(), kPackLane);
  for (std::size_t distance = 1; distance < size; ++distance)
    add_legs(sends[(own + distance) % size], receives[(own + size - distance) % size]);
  pack_ahead();
}

void StagedTransport::add_legs(const Send* send, const Receive* receive) {
  const std::int64_t sent = send == nullptr ? 0 : total_bytes(send->blocks);
  const std::int64_t received = receive == nullptr ? 0 : static_cast<std::int64_t>(receive->bytes.size());
  for (std::int64_t first = 0; first < std::max(sent, received); first += piece_bytes_) {
    Leg leg{.first = first};
    if (first < sent) leg.send = send, leg.send_bytes = std::min(piece_bytes_, sent - first);
    if (first < received) leg.receive = receive, leg.receive_bytes = std::min(piece_bytes_, received - first);
    legs_.push_back(leg);
  }
}

// The slot of leg i is free when leg i - 2 is finished.
void StagedTransport::pack_ahead() {
  for (; packed_legs_ < std::min(legs_.size(), leg_ + 2); ++packed_legs_) {
    const Leg& leg = legs_[packed_legs_];
    if (leg.send == nullptr) continue;
    copies_->gather(part_of(leg.send->blocks, leg.first, leg.send_bytes), copies_->device(),
                    send_slot(packed_legs_).data(), kPackLane);
    packed_[packed_legs_ % 2]->record(copies_->lane(kPackLane));
  }
}

bool StagedTransport::advance(bool may_wait) {
  while (leg_ < legs_.size()) {
    if (moving_) {
      if (!may_wait && !host_->poll()) return false;
      host_->wait();
      finish_leg();
    } else if (packed_[leg_ % 2]->passed() && unpacked_[leg_ % 2]->passed()) {
      post_leg();
    } else if (may_wait) {
      nap();
    } else {
      host_->poll();
      return false;
    }
  }
  return true;
}

void StagedTransport::post_leg() {
  const Leg& leg = legs_[leg_];
  Exchange exchange{.plan = exchange_.plan, .step = exchange_.step, .sends = {}, .receives = {}};
  if (leg.send != nullptr)
    exchange.sends = {{leg.send->peer, {{.data = send_slot(leg_).data(), .run_bytes = leg.send_bytes}}}};
  if (leg.receive != nullptr)
    exchange.receives = {{leg.receive->peer, receive_slot(leg_).first(static_cast<std::size_t>(leg.receive_bytes))}};
  host_->post(exchange);
  moving_ = true;
}

void StagedTransport::finish_leg() {
  const Leg& leg = legs_[leg_];
  moving_ = false;
  if (leg.receive != nullptr) {
    copies_->copy(receive_slot(leg_).first(static_cast<std::size_t>(leg.receive_bytes)),
                  leg.receive->bytes.data() + leg.first, kUnpackLane);
    unpacked_[leg_ % 2]->record(copies_->lane(kUnpackLane));
    received_bytes_ += leg.receive_bytes;
  }
  ++leg_;
  pack_ahead();
}

void StagedTransport::hold() {
  for (const int lane : {kPackLane, kUnpackLane}) {
    DeviceEvent& ended = *ended_[static_cast<std::size_t>(lane)];
    ended.record(copies_->lane(lane));
    copies_->hold(exchange_.stream, ended);
  }
}

}  // namespace

std::int64_t staged_staging_bytes(int size, const StagingOptions& options) {
  return size > 1 ? 4 * options.piece_bytes : 0;
}

std::unique_ptr<Transport> make_staged_transport(std::unique_ptr<Transport> host, std::unique_ptr<DeviceCopies> copies,
                                                 const StagingOptions& options) {
  if (options.piece_bytes < 1 || options.piece_bytes > (std::int64_t{1} << 30))
    throw InvalidArgument("pieces have 1 to 2^30 bytes; got " + std::to_string(options.piece_bytes));
  return std::make_unique<StagedTransport>(std::move(host), std::move(copies), options);
}

}  // namespace annulus
