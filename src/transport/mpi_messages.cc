#include "transport/mpi_messages.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace annulus {
namespace {

constexpr std::int64_t kLentPieceBytes = std::int64_t{1} << 30;  // MPI counts in 31 bits

// Where a message lies that needs no packing; empty: scattered.
std::span<const std::byte> one_run(std::span<const StridedBlock> blocks) {
  if (blocks.size() != 1) return {};
  const StridedBlock block = with_longest_runs(blocks.front());
  if (block.bytes() != block.run_bytes) return {};
  return {block.data, static_cast<std::size_t>(block.run_bytes)};
}

// The piece of lent memory `offset` behind `begin`.
std::shared_ptr<std::byte> behind(const std::shared_ptr<std::byte>& begin, std::int64_t offset) {
  return begin == nullptr ? nullptr : std::shared_ptr<std::byte>(begin, begin.get() + offset);
}

}  // namespace

Messages::Messages(const MpiWorld& world, int tag, const MpiOptions& options, NoteChannel& notes)
    : rank_(world.rank),
      options_(options),
      notes_(notes),
      outgoing_pieces_(world, tag, world.size > 1 ? options.send_slots : 0, options.piece_bytes),
      incoming_pieces_(world, tag, world.size > 1 ? options.receive_slots : 0, options.piece_bytes),
      heard_(static_cast<std::size_t>(world.size)) {}

template <class Message>
Note Messages::note(NoteKind kind, const Message& message) const {
  Note note;
  note.kind = kind;
  note.frame = message.frame;
  note.piece_bytes = options_.piece_bytes;
  note.lent = message.lent != nullptr ? 1 : 0;
  return note;
}

void Messages::begin(const Exchange& exchange) {
  outgoing_.clear();
  incoming_.clear();
  next_outgoing_ = next_incoming_ = 0;
  std::span<std::byte> to_itself;
  for (const Receive& receive : exchange.receives) {
    if (receive.peer == rank_) to_itself = receive.bytes;
    if (receive.peer == rank_ || receive.bytes.empty()) continue;
    const Frame frame{exchange.plan, exchange.step, static_cast<std::int64_t>(receive.bytes.size())};
    incoming_.push_back({.peer = receive.peer, .frame = frame, .bytes = receive.bytes, .lent = lent_at(receive.bytes)});
  }
  for (const Send& send : exchange.sends) {
    PackCursor cursor(send.blocks);
    if (send.peer == rank_) cursor.pack(to_itself);  // which is as long: checked before
    if (cursor.remaining_bytes() == 0) continue;
    const Frame frame{exchange.plan, exchange.step, cursor.remaining_bytes()};
    outgoing_.push_back({.peer = send.peer, .frame = frame, .cursor = cursor, .lent = lent_at(one_run(send.blocks))});
    notes_.send(send.peer, note(NoteKind::offer, outgoing_.back()));
  }
  unfinished_ = outgoing_.size() + incoming_.size();
  request_all();
}

// Shares ownership of the lent memory; null: the bytes lie elsewhere.
std::shared_ptr<std::byte> Messages::lent_at(std::span<const std::byte> bytes) const {
  if (lent_ == nullptr || bytes.empty()) return nullptr;
  const std::span<std::byte> memory = lent_->bytes();
  const std::less_equal<const std::byte*> before;
  if (!before(memory.data(), bytes.data()) || !before(bytes.data() + bytes.size(), memory.data() + memory.size()))
    return nullptr;
  return {lent_, memory.data() + (bytes.data() - memory.data())};
}

// Of the piece that begins at `first`.
template <class Message>
std::int64_t Messages::piece_bytes(const Message& message, std::int64_t first) const {
  return std::min(message.lent != nullptr ? kLentPieceBytes : options_.piece_bytes, message.frame.bytes - first);
}

// The first piece of each is granted at once, while half of the slots last: the others are for those known to send.
void Messages::request_all() {
  const auto eager = static_cast<std::size_t>(options_.receive_slots / 2);
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    Note request = note(NoteKind::request, incoming_[i]);
    if (i < eager && !incoming_pieces_.full()) {
      start_receive(i);
      request.pieces = 1;
    }
    notes_.send(incoming_[i].peer, request);
  }
}

void Messages::read(int source, const Note& note) {
  if (note.kind == NoteKind::offer) heard(source).offers.push_back(note);
  if (note.kind == NoteKind::request) heard(source).requests.push_back(note);
  if (note.kind != NoteKind::grant) return;
  for (Outgoing& message : outgoing_)
    if (message.peer == source) message.granted += note.pieces;
}

bool Messages::progress() {
  if (finished()) return false;
  agree();
  const bool moved = collect();
  grant();
  send_granted();
  return moved;
}

// Each message meets the oldest note of its other end.
void Messages::agree() {
  for (Outgoing& message : outgoing_) {
    std::vector<Note>& requests = heard(message.peer).requests;
    if (message.agreed || requests.empty()) continue;
    compare(rank_, note(NoteKind::offer, message), message.peer, requests.front());
    message.agreed = true;
    message.granted += requests.front().pieces;
    requests.erase(requests.begin());
  }
  for (Incoming& message : incoming_) {
    std::vector<Note>& offers = heard(message.peer).offers;
    if (message.agreed || offers.empty()) continue;
    compare(message.peer, offers.front(), rank_, note(NoteKind::request, message));
    message.agreed = true;
    offers.erase(offers.begin());
  }
}

void Messages::compare(int sender, const Note& offer, int receiver, const Note& request) const {
  if (offer.frame != request.frame) throw TransportError(disagreement(sender, offer.frame, receiver, request.frame));
  if (offer.lent != request.lent) {
    const std::string gpu = std::to_string(offer.lent != 0 ? sender : receiver),
                      host = std::to_string(offer.lent != 0 ? receiver : sender);
    throw TransportError("all ranks must give MPI memory of their GPUs or none; got rank " + gpu +
                         " that does and rank " + host + " that does not " + place(offer.frame) +
                         ": give all ranks the same MpiOptions::cuda_aware and the same transport");
  }
  if (offer.piece_bytes != request.piece_bytes)
    throw TransportError("rank " + std::to_string(sender) + " and rank " + std::to_string(receiver) +
                         " cut messages into pieces of " + std::to_string(offer.piece_bytes) + " and " +
                         std::to_string(request.piece_bytes) + " bytes; start all ranks with the same options");
}

template <class Message>
void Messages::complete(Message& message, std::int64_t bytes) {
  message.complete_bytes += bytes;
  if (message.complete_bytes == message.frame.bytes) --unfinished_;
}

bool Messages::collect() {
  bool moved = false;
  came_from_.clear();
  for (const auto& [piece, bytes] : outgoing_pieces_.collect()) {
    complete(outgoing_[piece.message], piece.bytes);
    moved = true;
  }
  for (const auto& [piece, bytes] : incoming_pieces_.collect()) {
    Incoming& message = incoming_[piece.message];
    if (static_cast<std::int64_t>(bytes.size()) != piece.bytes)
      throw TransportError("a piece from rank " + std::to_string(message.peer) + " to rank " + std::to_string(rank_) +
                           " at step " + std::to_string(message.frame.step) + " has " + std::to_string(bytes.size()) +
                           " bytes instead of " + std::to_string(piece.bytes) + ": this is a bug, please report it");
    if (message.lent == nullptr) std::memcpy(message.bytes.data() + piece.offset, bytes.data(), bytes.size());
    complete(message, piece.bytes);
    came_from_.push_back(message.peer);
    moved = true;
  }
  return moved;
}

void Messages::start_receive(std::size_t index) {
  Incoming& message = incoming_[index];
  const std::int64_t first = message.granted_bytes, bytes = piece_bytes(message, first);
  incoming_pieces_.receive(
      {.message = index, .offset = first, .bytes = bytes, .peer = message.peer, .lent = behind(message.lent, first)});
  message.granted_bytes += bytes;
}

// Slots go round among the messages that are known to come.
void Messages::grant() {
  std::vector<std::int64_t> granted(incoming_.size());
  for (std::size_t tried = 0; tried < incoming_.size() && !incoming_pieces_.full();) {
    const std::size_t index = next_incoming_++ % incoming_.size();
    const Incoming& message = incoming_[index];
    ++tried;
    if (!message.agreed || message.granted_bytes == message.frame.bytes) continue;
    start_receive(index);
    ++granted[index];
    tried = 0;
  }
  for (std::size_t i = 0; i < granted.size(); ++i) {
    if (granted[i] == 0) continue;
    Note grant = note(NoteKind::grant, incoming_[i]);
    grant.pieces = granted[i];
    notes_.send(incoming_[i].peer, grant);
  }
}

void Messages::send_granted() {
  for (std::size_t tried = 0; tried < outgoing_.size() && !outgoing_pieces_.full();) {
    const std::size_t index = next_outgoing_++ % outgoing_.size();
    Outgoing& message = outgoing_[index];
    ++tried;
    if (message.granted == 0) continue;
    const std::int64_t first = message.started_bytes, bytes = piece_bytes(message, first);
    if (message.lent == nullptr)
      message.cursor.pack(outgoing_pieces_.next_slot().first(static_cast<std::size_t>(bytes)));
    outgoing_pieces_.send(
        {.message = index, .bytes = bytes, .peer = message.peer, .lent = behind(message.lent, first)});
    message.started_bytes += bytes;
    --message.granted;
    tried = 0;
  }
}

void Messages::drop() {
  incoming_pieces_.cancel_receives();
  outgoing_.clear();
  incoming_.clear();
  unfinished_ = 0;
}

std::vector<int> Messages::unfinished_peers() const {
  std::vector<int> peers;
  const auto add = [&](const auto& message) {
    if (message.complete_bytes < message.frame.bytes) peers.push_back(message.peer);
  };
  std::ranges::for_each(outgoing_, add);
  std::ranges::for_each(incoming_, add);
  return peers;
}

std::vector<int> Messages::peers_not_agreed() const {
  std::vector<int> peers;
  const auto add = [&](const auto& message) {
    if (!message.agreed) peers.push_back(message.peer);
  };
  std::ranges::for_each(outgoing_, add);
  std::ranges::for_each(incoming_, add);
  return peers;
}

std::int64_t Messages::sent_bytes() const {
  std::int64_t bytes = 0;
  for (const Outgoing& message : outgoing_) bytes += message.frame.bytes;
  return bytes;
}

std::int64_t Messages::received_bytes() const {
  std::int64_t bytes = 0;
  for (const Incoming& message : incoming_) bytes += message.complete_bytes;
  return bytes;
}

}  // namespace annulus
