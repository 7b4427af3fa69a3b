// One of a rank's connections, to one peer. On it travel letters, a head and a body each: notes, by which ranks tell
// each other how they are, and messages in pieces.
//
// The receiver asks for every message when it expects it. A message goes when it has been asked for, straight into the
// receiver's memory; short ones go before, as long as those not asked for yet make up a piece at most. So however much
// ranks exchange, an end keeps two pieces: one on its way out, and one that came early. The oldest request is for the
// oldest message, or the two ranks disagree.
#pragma once

#include <deque>
#include <functional>
#include <optional>

#include "annulus/strided_block.h"
#include "transport/sockets.h"
#include "transport/trouble.h"

namespace annulus {

class TcpLine {
 public:
  static constexpr std::int64_t kPieceBytes = 65536;

  enum class Kind : std::int64_t { piece, request, ask, report, failure, leave };
  struct Head {
    Kind kind = Kind::ask;
    Frame frame = {};             // piece, request; report: its step
    std::int64_t body_bytes = 0;  // piece, failure
    std::int64_t still_ns = 0;    // report
    std::int32_t waiting = 0, waits_for = -1;
  };
  using OnNote = std::function<void(const Head&, std::span<const std::byte> body)>;  // ask, report, failure

  struct Moved {
    std::int64_t bytes = 0;
    bool payload = false;  // bytes of messages
    bool ended = false;    // the other end is gone
  };
  // A message that is not what its receiver expects.
  struct Mismatch {
    bool is_outgoing = false;
    Frame sent, expected;
  };

  explicit TcpLine(Socket socket) : socket_(std::move(socket)) {}

  // At most one of each at a time; their memory is used until has_sent() and has_received(), or let_go().
  void send(const Frame& frame, std::span<const StridedBlock> blocks);
  void receive(const Frame& frame, std::span<std::byte> to);
  bool has_sent() const { return !is_open() || (!out_ && !wants_to_write()); }
  bool has_received() const { return !in_; }
  const std::optional<Mismatch>& mismatch() const { return mismatch_; }
  // Memory of messages is left alone from now on, for good. A piece that has begun goes on to its end.
  void let_go() noexcept;

  void write(const Head& note, std::span<const std::byte> body = {});
  // As much as can be moved at once, within limits: others are to have their turn.
  Moved flush();
  Moved read(const OnNote& on_note);
  bool wants_to_write() const { return is_open() && (!left_.empty() || !notes_.empty() || message_may_go()); }

  bool is_open() const { return socket_.is_open(); }
  Socket& socket() { return socket_; }
  void close();
  bool has_left() const { return has_left_; }               // the peer said so
  bool is_owed() const { return out_ || !early_.empty(); }  // messages that the peer has not asked for, or not all of
  // Whether the peer's system has taken anything since the last call.
  bool is_heard();

 private:
  struct Outgoing {
    Frame frame;
    PackCursor cursor;
    bool is_asked_for = false;
  };
  struct Incoming {
    Frame frame;
    std::span<std::byte> left;
  };
  struct Kept {
    Frame frame;
    std::vector<std::byte> bytes;
  };

  bool message_may_go() const {
    return out_ && !mismatch_ && (out_->is_asked_for || early_bytes_ + out_->frame.bytes <= kPieceBytes);
  }
  bool refill();
  void match();
  bool begin_body();
  void end_body(const OnNote& on_note);
  void take_kept();
  std::span<std::byte> body_left();

  Socket socket_;
  bool has_let_go_ = false, has_left_ = false;
  std::optional<Mismatch> mismatch_;

  // Out: a letter at a time, notes first.
  std::deque<std::vector<std::byte>> notes_;
  std::vector<std::byte> letter_;
  std::span<const std::byte> left_;  // of it
  std::optional<Outgoing> out_;
  bool is_piece_ = false;         // the letter
  std::deque<Frame> early_;       // messages that went before they were asked for
  std::int64_t early_bytes_ = 0;  // of those
  std::deque<Frame> requests_;    // for messages that this rank does not send yet
  std::int64_t written_bytes_ = 0, taken_bytes_ = 0;

  // In.
  Head head_;
  std::size_t head_bytes_ = 0;  // that have come
  std::vector<std::byte> body_;
  std::size_t body_bytes_ = 0;  // that have come
  bool goes_straight_ = false;  // into the receiver's memory
  std::optional<Incoming> in_;
  std::deque<Kept> kept_;  // messages that came early
  std::int64_t kept_bytes_ = 0;
};

}  // namespace annulus
