// The messages of one exchange on their way between MPI processes.
//
// A message moves in three steps. Both ends send a note of what they know of it, and each compares; the receiver grants
// as many pieces as it has slots for; the sender packs and sends as many as it is granted. So nothing moves on which
// the two disagree, nothing lies in MPI's own buffers, and however large a message is, it takes the slots and no more.
// A message in lent memory is not packed, and is cut into pieces only where MPI could not count its bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "annulus/mpi.h"
#include "transport/device_copies.h"
#include "transport/mpi_notes.h"
#include "transport/mpi_pieces.h"

namespace annulus {

class Messages {
 public:
  Messages(const MpiWorld& world, int tag, const MpiOptions& options, NoteChannel& notes);

  // From the next exchange on: see borrower.h.
  void borrow(std::shared_ptr<OwnedBytes> memory) { lent_ = std::move(memory); }
  // All of them are finished before. The exchange must stay until they are again, or dropped.
  void begin(const Exchange& exchange);
  // A note of kind offer, request or grant has come.
  void read(int source, const Note& note);
  // Moves what can move; true when something did. Throws TransportError when a message is not what its other end says.
  bool progress();
  // Whose pieces progress() has received, the last time.
  const std::vector<int>& came_from() const { return came_from_; }
  // Gives up. No request of MPI points into anyone's memory but the slots and what was lent, so there is nothing to
  // wait for.
  void drop();

  bool finished() const { return unfinished_ == 0; }
  std::vector<int> unfinished_peers() const;
  std::vector<int> peers_not_agreed() const;  // which have not said their part about a message

  std::int64_t sent_bytes() const;      // of all messages, finished or not
  std::int64_t received_bytes() const;  // so far

 private:
  struct Outgoing {
    int peer;
    Frame frame;
    PackCursor cursor;
    std::shared_ptr<std::byte> lent = nullptr;  // where it begins, if it lies in lent memory
    std::int64_t granted = 0;                   // pieces that may be sent
    std::int64_t started_bytes = 0;
    std::int64_t complete_bytes = 0;
    bool agreed = false;
  };
  struct Incoming {
    int peer;
    Frame frame;
    std::span<std::byte> bytes;
    std::shared_ptr<std::byte> lent = nullptr;
    std::int64_t granted_bytes = 0;
    std::int64_t complete_bytes = 0;
    bool agreed = false;
  };
  struct Heard {  // from one peer, and not yet met by a message of this rank; the oldest first
    std::vector<Note> offers;
    std::vector<Note> requests;
  };

  Heard& heard(int peer) { return heard_[static_cast<std::size_t>(peer)]; }
  std::shared_ptr<std::byte> lent_at(std::span<const std::byte> bytes) const;
  template <class Message>
  std::int64_t piece_bytes(const Message& message, std::int64_t first) const;
  template <class Message>
  Note note(NoteKind kind, const Message& message) const;
  void request_all();
  void agree();
  void compare(int sender, const Note& offer, int receiver, const Note& request) const;
  bool collect();
  void start_receive(std::size_t index);
  void grant();
  void send_granted();
  template <class Message>
  void complete(Message& message, std::int64_t bytes);

  int rank_;
  MpiOptions options_;
  NoteChannel& notes_;
  Pieces outgoing_pieces_, incoming_pieces_;
  std::shared_ptr<OwnedBytes> lent_;  // or none
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<int> came_from_;
  std::size_t unfinished_ = 0;
  std::size_t next_outgoing_ = 0, next_incoming_ = 0;  // whose turn it is to get a slot
  std::vector<Heard> heard_;
};

}  // namespace annulus
