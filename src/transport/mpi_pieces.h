// Pieces: a bounded number of pieces of messages in flight in one direction, in memory of their own or in lent memory
// (borrower.h).
//
// A piece has a slot from start to completion. Whoever starts it says what it belongs to and gets that back. A piece of
// lent memory leaves the memory of its slot alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/mpi_world.h"

namespace annulus {

class Pieces {
 public:
  struct Piece {
    std::size_t message = 0;  // index of the message, and where the piece lies in it
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    int peer = 0;
    std::shared_ptr<std::byte> lent = nullptr;  // where its bytes are, kept alive; null: in the slot
  };

  Pieces(const MpiWorld& world, int tag, int slots, std::int64_t piece_bytes);
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  bool full() const { return free_.empty(); }

  // The memory of the slot that the next piece will have.
  std::span<std::byte> next_slot();
  void send(const Piece& piece);
  void receive(const Piece& piece);

  // Pieces that are complete, with their bytes: valid until the next call of anything here.
  struct Complete {
    Piece piece;
    std::span<const std::byte> bytes;  // as many as have come
  };
  const std::vector<Complete>& collect();

  // Gives up what has not begun to arrive.
  void cancel_receives();

 private:
  std::span<std::byte> slot(int index);
  std::byte* memory_of(const Piece& piece, int slot_index);
  void start(const Piece& piece, MPI_Request request);

  MPI_Comm comm_;
  int tag_;
  std::int64_t piece_bytes_;
  std::unique_ptr<std::byte[]> memory_;  // left untouched until a slot is used; the last one freed is used first
  std::vector<int> free_;
  // In flight, side by side.
  std::vector<MPI_Request> requests_;
  std::vector<Piece> pieces_;
  std::vector<int> slots_;
  std::vector<Complete> complete_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace annulus
