#include "transport/mpi_notes.h"

#include <cstring>
#include <thread>
#include <type_traits>

namespace annulus {

static_assert(std::is_trivially_copyable_v<Note>, "notes travel as bytes");

Note Note::of(const Report& report) {
  Note note{.kind = NoteKind::report};
  note.frame.step = report.step;
  note.still_ns = std::chrono::nanoseconds(report.still).count();
  note.waiting = report.waiting ? 1 : 0;
  note.waits_for = report.waits_for;
  return note;
}

Report Note::report() const {
  return {
      .waiting = waiting != 0, .waits_for = waits_for, .step = frame.step, .still = std::chrono::nanoseconds(still_ns)};
}

NoteChannel::NoteChannel(const MpiWorld& world, int tag)
    : comm_(world.comm),
      tag_(tag),
      buffer_(sizeof(Note) + kMaxTextBytes),
      known_(static_cast<std::size_t>(world.size)) {
  listen();
}

NoteChannel::~NoteChannel() {
  if (receive_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&receive_);
    MPI_Wait(&receive_, MPI_STATUS_IGNORE);  // at once: either a note is here, or the receive is cancelled
  }
  for (Sent& note : sent_) keep_for_mpi(std::move(note.bytes));
}

void NoteChannel::listen() {
  check_mpi(
      MPI_Irecv(buffer_.data(), static_cast<int>(buffer_.size()), MPI_BYTE, MPI_ANY_SOURCE, tag_, comm_, &receive_),
      "MPI_Irecv");
}

void NoteChannel::send(int peer, const Note& note, std::string_view text) {
  known_[static_cast<std::size_t>(peer)] = true;
  text = text.substr(0, kMaxTextBytes);
  const std::size_t bytes = sizeof note + text.size();
  Sent& sent = sent_.emplace_back(Sent{std::make_unique<std::byte[]>(bytes), MPI_REQUEST_NULL});
  std::memcpy(sent.bytes.get(), &note, sizeof note);
  if (!text.empty()) std::memcpy(sent.bytes.get() + sizeof note, text.data(), text.size());
  check_mpi(MPI_Isend(sent.bytes.get(), static_cast<int>(bytes), MPI_BYTE, peer, tag_, comm_, &sent.request),
            "MPI_Isend");
  reap();
}

std::optional<NoteChannel::Received> NoteChannel::next() {
  reap();
  int arrived = 0;
  MPI_Status status;
  check_mpi(MPI_Test(&receive_, &arrived, &status), "MPI_Test");
  if (arrived == 0) return std::nullopt;
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  Received received{.source = status.MPI_SOURCE, .note = {}, .text = {}};
  known_[static_cast<std::size_t>(received.source)] = true;
  const auto whole = static_cast<std::size_t>(bytes);
  if (whole >= sizeof(Note)) std::memcpy(&received.note, buffer_.data(), sizeof(Note));
  if (whole < sizeof(Note) || received.note.version != Note::kVersion)
    throw TransportError("rank " + std::to_string(received.source) +
                         " speaks another version of the protocol; start all ranks from the same build");
  received.text.assign(reinterpret_cast<const char*>(buffer_.data()) + sizeof(Note), whole - sizeof(Note));
  listen();
  return received;
}

void NoteChannel::reap() {
  while (!sent_.empty()) {
    int complete = 0;
    check_mpi(MPI_Test(&sent_.front().request, &complete, MPI_STATUS_IGNORE), "MPI_Test");
    if (complete == 0) return;
    sent_.pop_front();
  }
}

void NoteChannel::flush(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  for (reap(); !sent_.empty() && std::chrono::steady_clock::now() < end; reap())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace annulus
