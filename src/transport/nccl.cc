// An exchange has three parts. First the ranks tell each other over `control` what they are about to send and expect:
// nothing moves on which they disagree, and no GPU spins for a rank that has not come. Then the link moves the bytes.
// Last they tell each other that they are through. Whoever does not get through in a while asks its peers too, so that
// a rank that died in the middle is found where all lost ranks are found, by control, and named; then the link is cut,
// which ends whatever still waits on the GPU.
//
// The link moves groups of pieces. Group (j, i) of a rank has piece i of all messages to rank + d and from rank - d
// with d in the j-th eight; as in staged.cc, ranks that go through their groups in this order never wait in a circle.
// Pieces that are not dense are packed, two groups in turn, each behind the group before the last.
#include "transport/nccl.h"

#include <algorithm>
#include <array>
#include <thread>

#include "transport/device_transport.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPackLane = 0, kLinkLane = 1;
constexpr std::size_t kDistancesAtOnce = 8;
// Rounds in a timeout, and how many may close while nothing moves: then it is the link that does not work. Rounds, not
// time: a round waits for peers that wait for a slow rank, and none closes for those beside it. (A rank far from it may
// close one for each rank between them.)
constexpr int kRoundsAtRest = 8;

struct Token {
  std::int64_t sent = 0, expected = 0;  // bytes to the peer, and from it
  std::int64_t through = 0;             // whether all has moved, as far as this rank knows
};

struct Piece {
  const Send* send = nullptr;  // or none: a receive
  const Receive* receive = nullptr;
  std::int64_t first = 0, bytes = 0;
};
using Pieces = std::vector<Piece>;

// Of a group of this size.
std::size_t distances_at_once(int size) {
  return std::min<std::size_t>(static_cast<std::size_t>(size) - 1, kDistancesAtOnce);
}
std::int64_t piece_bytes(int size, const NcclOptions& options) {
  if (size == 1) return 0;
  return std::max<std::int64_t>(
      16, options.staging_bytes / 2 / static_cast<std::int64_t>(distances_at_once(size)) / 16 * 16);
}

class NcclTransport final : public DeviceTransport {
 public:
  NcclTransport(std::unique_ptr<Transport> control, std::unique_ptr<DeviceCopies> copies, const NcclOptions& options)
      : DeviceTransport(std::move(control), std::move(copies), options.blocking),
        timeout_(options.timeout),
        at_once_(distances_at_once(size())),
        piece_bytes_(piece_bytes(size(), options)),
        memory_(copies_->device_memory(nccl_staging_bytes(size(), options))),
        ended_(copies_->event()) {
    for (std::size_t i = 0; i < 2; ++i) {
      packed_[i] = copies_->event();
      moved_[i] = copies_->event();
    }
  }
  ~NcclTransport() override {
    close();
    if (link_) link_->cut();
    copies_->settle();
  }

  void connect(const LinkMaker& maker);

  std::string_view name() const override { return "nccl"; }
  std::int64_t staging_bytes() const override { return host_->staging_bytes() + device_staging_bytes(); }
  std::int64_t device_staging_bytes() const override { return static_cast<std::int64_t>(memory_->bytes().size()); }

 private:
  enum class Part { agreeing, moving, closing, through };

  void begin() override;
  bool advance(bool may_wait) override;
  void hold() override;
  void drop() noexcept override;

  void exchange_tokens(bool through);
  void check_agreement();
  bool move();
  void queue_group();
  void add_groups();
  bool close_round();
  [[noreturn]] void fail(const std::string& text);
  std::string await_link();

  std::chrono::milliseconds timeout_;
  std::size_t at_once_;
  std::int64_t piece_bytes_;
  std::unique_ptr<OwnedBytes> memory_;  // [2][at_once_] pieces
  std::unique_ptr<DeviceLink> link_;
  std::array<std::unique_ptr<DeviceEvent>, 2> packed_, moved_;  // [slot of a group]
  std::unique_ptr<DeviceEvent> ended_;                          // what the rank sends to itself

  Part part_ = Part::through;
  std::vector<int> peers_;                  // those with whom this rank is not through
  std::vector<Token> own_tokens_, tokens_;  // [peer of peers_]
  std::vector<Pieces> groups_;
  std::size_t group_ = 0;   // the next
  bool queued_ = false;     // the one before is not known to be on its stream
  int rounds_at_rest_ = 0;  // that have closed since the link last moved something
  Clock::time_point last_moved_{}, last_round_{};
};

// ---- Making the link

void NcclTransport::connect(const LinkMaker& maker) {
  std::string trouble = maker.trouble, id;
  try {
    if (trouble.empty() && rank() == 0) id = maker.new_id();
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  const std::vector<std::string> troubles = host_->all_gather(trouble);
  const std::vector<std::string> gpus = host_->all_gather(maker.gpu);
  for (std::size_t i = 0; i < troubles.size(); ++i) {
    if (!troubles[i].empty()) throw Unsupported("rank " + std::to_string(i) + ": " + troubles[i]);
    for (std::size_t j = 0; j < i; ++j)
      if (gpus[i] == gpus[j])
        throw Unsupported("NCCL takes one rank a GPU; got rank " + std::to_string(j) + " and rank " +
                          std::to_string(i) + " on " + (gpus[i] == maker.gpu ? maker.text : "one GPU") +
                          ": give each a GPU of its own, stage through the host, or, to try it out, start each with "
                          "an NCCL_HOSTID of its own and NCCL_SOCKET_IFNAME=lo");
  }
  id = host_->all_gather(id).front();
  if (size() == 1) return;

  std::string outcome;
  try {
    link_ = maker.link(id, rank(), size());
    outcome = await_link();
  } catch (const TransportError&) {  // control's: somebody has given up, or is lost
    if (link_) link_->cut();
    throw;
  } catch (const std::exception& error) {
    outcome = error.what();
  }
  const std::vector<std::string> outcomes = host_->all_gather(outcome);
  for (std::size_t i = 0; i < outcomes.size(); ++i)
    if (!outcomes[i].empty())
      throw TransportError("NCCL could not connect the ranks: rank " + std::to_string(i) + ": " + outcomes[i]);
}

// Empty when it is ready.
std::string NcclTransport::await_link() {
  const auto end = Clock::now() + timeout_;
  for (;;) {
    host_->poll();
    try {
      if (link_->ready()) return "";
    } catch (const TransportError& error) {
      return error.what();
    }
    if (Clock::now() > end) return "not connected after " + seconds(timeout_);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// ---- An exchange

void NcclTransport::begin() {
  const auto own = std::ranges::find(exchange_.sends, rank(), &Send::peer);
  for (const int lane : {kPackLane, kLinkLane}) copies_->hold(copies_->lane(lane), *posted_);
  if (own != exchange_.sends.end())
    copies_->gather(own->blocks, copies_->device(),
                    std::ranges::find(exchange_.receives, rank(), &Receive::peer)->bytes.data(), kPackLane);
  ended_->record(copies_->lane(kPackLane));

  peers_.clear();
  for (const Send& send : exchange_.sends) peers_.push_back(send.peer);
  for (const Receive& receive : exchange_.receives) peers_.push_back(receive.peer);
  std::ranges::sort(peers_);
  const auto [end, last] = std::ranges::unique(peers_);
  peers_.erase(end, last);
  std::erase(peers_, rank());
  own_tokens_.assign(peers_.size(), {});
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    for (const Send& send : exchange_.sends)
      if (send.peer == peers_[i]) own_tokens_[i].sent = total_bytes(send.blocks);
    for (const Receive& receive : exchange_.receives)
      if (receive.peer == peers_[i]) own_tokens_[i].expected = static_cast<std::int64_t>(receive.bytes.size());
  }
  groups_.clear();
  group_ = 0;
  queued_ = false;
  part_ = peers_.empty() ? Part::through : Part::agreeing;
  if (!peers_.empty()) exchange_tokens(false);
}

void NcclTransport::exchange_tokens(bool through) {
  tokens_.assign(peers_.size(), {});
  own_tokens_.resize(peers_.size());
  Exchange exchange{.plan = exchange_.plan, .step = exchange_.step, .sends = {}, .receives = {}};
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    own_tokens_[i].through = through;
    exchange.sends.push_back(
        {peers_[i], {{.data = reinterpret_cast<const std::byte*>(&own_tokens_[i]), .run_bytes = sizeof(Token)}}});
    exchange.receives.push_back({peers_[i], std::as_writable_bytes(std::span(&tokens_[i], 1))});
  }
  host_->post(exchange);
}

bool NcclTransport::advance(bool may_wait) {
  while (part_ != Part::through) {
    if (part_ != Part::moving) {
      if (!may_wait && !host_->poll()) return false;
      host_->wait();
      if (part_ == Part::agreeing) {
        check_agreement();
        add_groups();
        last_moved_ = last_round_ = Clock::now();
        rounds_at_rest_ = 0;
        part_ = Part::moving;
      } else {
        part_ = close_round() ? Part::through : Part::moving;
      }
      continue;
    }
    const bool through = move();
    if (through || (may_wait && Clock::now() - last_round_ > timeout_ / kRoundsAtRest)) {
      exchange_tokens(through);
      part_ = Part::closing;
    } else if (may_wait) {
      nap();
    } else {
      host_->poll();
      return false;
    }
  }
  return true;
}

void NcclTransport::check_agreement() {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const auto frame = [&](std::int64_t bytes) { return Frame{exchange_.plan, exchange_.step, bytes}; };
    if (own_tokens_[i].sent != tokens_[i].expected)
      fail(disagreement(rank(), frame(own_tokens_[i].sent), peers_[i], frame(tokens_[i].expected)));
    if (own_tokens_[i].expected != tokens_[i].sent)
      fail(disagreement(peers_[i], frame(tokens_[i].sent), rank(), frame(own_tokens_[i].expected)));
  }
}

void NcclTransport::add_groups() {
  const auto size = static_cast<std::size_t>(this->size()), own = static_cast<std::size_t>(rank());
  std::vector<const Send*> sends(size);
  std::vector<const Receive*> receives(size);
  for (const Send& send : exchange_.sends) sends[static_cast<std::size_t>(send.peer)] = &send;
  for (const Receive& receive : exchange_.receives) receives[static_cast<std::size_t>(receive.peer)] = &receive;
  for (std::size_t begin = 1; begin < size; begin += at_once_)
    for (std::int64_t first = 0;; first += piece_bytes_) {
      Pieces group;
      for (std::size_t distance = begin; distance < std::min(size, begin + at_once_); ++distance) {
        const Send* const send = sends[(own + distance) % size];
        const Receive* const receive = receives[(own + size - distance) % size];
        const std::int64_t sent = send == nullptr ? 0 : total_bytes(send->blocks);
        const std::int64_t received = receive == nullptr ? 0 : static_cast<std::int64_t>(receive->bytes.size());
        if (first < sent) group.push_back({send, nullptr, first, std::min(piece_bytes_, sent - first)});
        if (first < received) group.push_back({nullptr, receive, first, std::min(piece_bytes_, received - first)});
      }
      if (group.empty()) break;
      groups_.push_back(std::move(group));
    }
}

// True when all bytes of this rank have moved.
bool NcclTransport::move() {
  for (;;) {
    try {
      if (!link_->ready()) return false;
    } catch (const TransportError& error) {  // the peers' rounds find out whether somebody is lost
      if (Clock::now() - last_moved_ < timeout_) return false;
      fail(error.what());
    }
    if (queued_) {
      moved_[(group_ - 1) % 2]->record(copies_->lane(kLinkLane));
      last_moved_ = Clock::now();
      rounds_at_rest_ = 0;
      queued_ = false;
    }
    if (group_ == groups_.size()) return groups_.empty() || moved_[(group_ - 1) % 2]->passed();
    queue_group();
  }
}

void NcclTransport::queue_group() {
  const std::size_t slot = group_ % 2;
  std::byte* packed = memory_->bytes().data() + slot * at_once_ * static_cast<std::size_t>(piece_bytes_);
  copies_->hold(copies_->lane(kPackLane), *moved_[slot]);
  std::vector<LinkMessage> sends, receives;
  for (const Piece& piece : groups_[group_]) {
    if (piece.receive != nullptr) {
      receives.push_back({piece.receive->peer, piece.receive->bytes.data() + piece.first, piece.bytes});
      continue;
    }
    const std::vector<StridedBlock> blocks = part_of(piece.send->blocks, piece.first, piece.bytes);
    const StridedBlock front = with_longest_runs(blocks.front());
    if (front.run_bytes == piece.bytes) {
      sends.push_back({piece.send->peer, const_cast<std::byte*>(front.data), piece.bytes});
      continue;
    }
    copies_->gather(blocks, copies_->device(), packed, kPackLane);
    sends.push_back({piece.send->peer, packed, piece.bytes});
    packed += piece_bytes_;
  }
  packed_[slot]->record(copies_->lane(kPackLane));
  copies_->hold(copies_->lane(kLinkLane), *packed_[slot]);
  link_->queue(sends, receives, copies_->lane(kLinkLane));
  ++group_;
  queued_ = true;
}

// Pairs of which both are through need no more rounds. True when this rank needs none.
bool NcclTransport::close_round() {
  last_round_ = Clock::now();
  const bool through = own_tokens_.front().through != 0;
  std::vector<int> left;
  for (std::size_t i = 0; i < peers_.size(); ++i)
    if (!through || tokens_[i].through == 0) left.push_back(peers_[i]);
  if (!through && ++rounds_at_rest_ > kRoundsAtRest) {
    std::string text = "NCCL has moved nothing for " + seconds(Clock::now() - last_moved_) + " at step " +
                       std::to_string(exchange_.step) + " between this rank and rank";
    for (const int peer : left) text += " " + std::to_string(peer);
    fail(text + ", which all live: look at the network, or give a longer timeout than " + seconds(timeout_));
  }
  if (through && left.empty()) {
    for (const Receive& receive : exchange_.receives)
      if (receive.peer != rank()) received_bytes_ += static_cast<std::int64_t>(receive.bytes.size());
    return true;
  }
  peers_ = left;
  return false;
}

void NcclTransport::hold() { copies_->hold(exchange_.stream, *ended_); }

// What is queued on the link's lane may wait for peers for ever, so the link goes first.
void NcclTransport::drop() noexcept {
  if (link_) link_->cut();
  copies_->settle();
}

// By control, so that all ranks say the same.
void NcclTransport::fail(const std::string& text) {
  host_->abort(text);
  host_->poll();
  throw TransportError(text);
}

}  // namespace

std::int64_t nccl_staging_bytes(int size, const NcclOptions& options) {
  return 2 * static_cast<std::int64_t>(distances_at_once(size)) * piece_bytes(size, options);
}

std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, std::unique_ptr<DeviceCopies> copies,
                                               const LinkMaker& maker, const NcclOptions& options) {
  if (options.staging_bytes < 1024 || options.timeout <= std::chrono::milliseconds(0))
    throw InvalidArgument("NCCL needs 1024 bytes or more to pack in and a timeout above 0; got " +
                          std::to_string(options.staging_bytes) + " and " + std::to_string(options.timeout.count()) +
                          " ms");
  auto transport = std::make_unique<NcclTransport>(std::move(control), std::move(copies), options);
  transport->connect(maker);
  return transport;
}

}  // namespace annulus
