#include "transport/mpi_pieces.h"

namespace annulus {

Pieces::Pieces(const MpiWorld& world, int tag, int slots, std::int64_t piece_bytes)
    : comm_(world.comm),
      tag_(tag),
      piece_bytes_(piece_bytes),
      memory_(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(piece_bytes) *
                                                          static_cast<std::size_t>(slots))) {
  for (int index = slots - 1; index >= 0; --index) free_.push_back(index);
}

Pieces::~Pieces() {
  if (requests_.empty()) return;
  keep_for_mpi(std::move(memory_));
  for (Piece& piece : pieces_) keep_for_mpi(std::move(piece.lent));
}

std::span<std::byte> Pieces::slot(int index) {
  const auto bytes = static_cast<std::size_t>(piece_bytes_);
  return {memory_.get() + static_cast<std::size_t>(index) * bytes, bytes};
}

std::span<std::byte> Pieces::next_slot() { return slot(free_.back()); }

std::byte* Pieces::memory_of(const Piece& piece, int slot_index) {
  return piece.lent != nullptr ? piece.lent.get() : slot(slot_index).data();
}

void Pieces::send(const Piece& piece) {
  MPI_Request request;
  check_mpi(MPI_Isend(memory_of(piece, free_.back()), static_cast<int>(piece.bytes), MPI_BYTE, piece.peer, tag_, comm_,
                      &request),
            "MPI_Isend");
  start(piece, request);
}

// A longer piece than agreed must not look like a right one: there is room for whatever a slot can hold. Beside lent
// memory there is no room, and MPI refuses.
void Pieces::receive(const Piece& piece) {
  MPI_Request request;
  const std::int64_t room = piece.lent != nullptr ? piece.bytes : piece_bytes_;
  check_mpi(
      MPI_Irecv(memory_of(piece, free_.back()), static_cast<int>(room), MPI_BYTE, piece.peer, tag_, comm_, &request),
      "MPI_Irecv");
  start(piece, request);
}

void Pieces::start(const Piece& piece, MPI_Request request) {
  requests_.push_back(request);
  pieces_.push_back(piece);
  slots_.push_back(free_.back());
  free_.pop_back();
}

const std::vector<Pieces::Complete>& Pieces::collect() {
  complete_.clear();
  if (requests_.empty()) return complete_;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  check_mpi(
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data()),
      "MPI_Testsome");
  for (int i = 0; i < count; ++i) {
    const auto index = static_cast<std::size_t>(indices_[static_cast<std::size_t>(i)]);
    int bytes = 0;
    MPI_Get_count(&statuses_[static_cast<std::size_t>(i)], MPI_BYTE, &bytes);
    complete_.push_back({pieces_[index], {memory_of(pieces_[index], slots_[index]), static_cast<std::size_t>(bytes)}});
    free_.push_back(slots_[index]);
  }
  for (std::size_t i = requests_.size(); i-- > 0;) {
    if (requests_[i] != MPI_REQUEST_NULL) continue;
    requests_[i] = requests_.back();
    pieces_[i] = std::move(pieces_.back());
    slots_[i] = slots_.back();
    requests_.pop_back();
    pieces_.pop_back();
    slots_.pop_back();
  }
  return complete_;
}

// A piece that has met its other end cannot be cancelled and completes; one that never will stays in flight, and its
// memory is kept.
void Pieces::cancel_receives() {
  for (MPI_Request& request : requests_) MPI_Cancel(&request);
  collect();
}

}  // namespace annulus
