// Notes: the small messages by which ranks agree on the large ones and tell how they are.
//
//   offer     "I send you `bytes` at this step"        both ends of a message say what they know of it; whoever hears
//   request   "I expect `bytes` from you"              the other first compares, so both find a disagreement
//   grant     "send `pieces` more": memory is ready for them, so MPI never has to store what nobody asked for
//   ask       "how are you?"                           report   the answer
//   failure   the group has failed; the text says why  leave    "expect nothing more from me"
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/mpi_world.h"
#include "transport/trouble.h"
#include "transport/vigil.h"

namespace annulus {

enum class NoteKind : std::int32_t { offer, request, grant, ask, report, failure, leave };

struct Note {
  static constexpr std::uint32_t kVersion = 0x616e6e02;

  static Note of(const Report& report);
  Report report() const;

  NoteKind kind = NoteKind::ask;
  std::uint32_t version = kVersion;
  Frame frame = {};
  std::int64_t piece_bytes = 0;  // offer, request: must be the same on both sides
  std::int64_t pieces = 0;       // request, grant
  std::int32_t lent = 0;         // offer, request: whether the message lies in lent memory; on both sides, or neither
  std::int64_t still_ns = 0;     // report
  std::int32_t waiting = 0;      // report
  std::int32_t waits_for = -1;   // report
  std::int64_t lost = -1;        // failure: the rank that is silent, if that is why
};

class NoteChannel {
 public:
  static constexpr std::size_t kMaxTextBytes = 1500;

  NoteChannel(const MpiWorld& world, int tag);
  ~NoteChannel();
  NoteChannel(const NoteChannel&) = delete;
  NoteChannel& operator=(const NoteChannel&) = delete;

  void send(int peer, const Note& note, std::string_view text = {});

  struct Received {
    int source;
    Note note;
    std::string text;
  };
  std::optional<Received> next();

  bool knows(int peer) const { return known_[static_cast<std::size_t>(peer)]; }  // it has sent or got a note

  // Makes progress until all notes are on their way or the time is over.
  void flush(std::chrono::milliseconds time);

 private:
  struct Sent {
    std::unique_ptr<std::byte[]> bytes;
    MPI_Request request;
  };
  void listen();
  void reap();

  MPI_Comm comm_;
  int tag_;
  std::vector<std::byte> buffer_;
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::deque<Sent> sent_;  // not yet complete
  std::vector<bool> known_;
};

}  // namespace annulus
