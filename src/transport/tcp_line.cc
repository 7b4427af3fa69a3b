#include "transport/tcp_line.h"

#include <algorithm>
#include <new>

namespace annulus {
namespace {

constexpr std::int64_t kMostNoteBytes = 4096;
constexpr std::int64_t kMostAtOnce = std::int64_t{4} << 20;  // bytes that a call moves

// The body is for the caller to write.
std::span<std::byte> begin_letter(std::vector<std::byte>& letter, const TcpLine::Head& head) {
  letter.resize(sizeof head + static_cast<std::size_t>(head.body_bytes));
  std::ranges::copy(std::as_bytes(std::span(&head, 1)), letter.begin());
  return std::span(letter).subspan(sizeof head);
}

}  // namespace

void TcpLine::send(const Frame& frame, std::span<const StridedBlock> blocks) {
  out_ = {frame, PackCursor(blocks)};
  match();
}

void TcpLine::receive(const Frame& frame, std::span<std::byte> to) {
  in_ = {frame, to};
  write({.kind = Kind::request, .frame = frame});
  take_kept();
}

void TcpLine::let_go() noexcept {
  has_let_go_ = true;
  out_.reset();
  in_.reset();
  early_.clear();
  try {
    if (std::exchange(goes_straight_, false)) body_.resize(static_cast<std::size_t>(head_.body_bytes));
  } catch (const std::bad_alloc&) {
    close();  // which the other end notices
  }
}

// The oldest request is for the oldest message.
void TcpLine::match() {
  while (!requests_.empty() && (!early_.empty() || (out_ && !out_->is_asked_for))) {
    const Frame expected = requests_.front();
    requests_.pop_front();
    Frame sent;
    if (early_.empty()) {
      sent = out_->frame;
      out_->is_asked_for = true;
    } else {
      sent = early_.front();
      early_.pop_front();
      early_bytes_ -= sent.bytes;
    }
    if (sent != expected && !mismatch_) mismatch_ = {true, sent, expected};
  }
}

void TcpLine::write(const Head& note, std::span<const std::byte> body) {
  if (!is_open()) return;
  std::ranges::copy(body, begin_letter(notes_.emplace_back(), note).begin());
}

TcpLine::Moved TcpLine::flush() {
  Moved moved;
  while (is_open() && moved.bytes < kMostAtOnce && (!left_.empty() || refill())) {
    const std::int64_t count = socket_.write_some(left_);
    moved.ended = count < 0;
    if (count <= 0) break;
    moved.bytes += count;
    moved.payload = moved.payload || is_piece_;
    written_bytes_ += count;
    left_ = left_.subspan(static_cast<std::size_t>(count));
  }
  return moved;
}

// The next letter: a note, or the next piece of the message.
bool TcpLine::refill() {
  is_piece_ = false;
  if (!notes_.empty()) {
    letter_ = notes_.front();  // which keeps its memory for pieces
    notes_.pop_front();
  } else if (message_may_go()) {
    const std::int64_t bytes = std::min(kPieceBytes, out_->cursor.remaining_bytes());
    out_->cursor.pack(begin_letter(letter_, {.kind = Kind::piece, .frame = out_->frame, .body_bytes = bytes}));
    is_piece_ = true;
    if (out_->cursor.remaining_bytes() == 0) {
      if (!out_->is_asked_for) {
        early_.push_back(out_->frame);
        early_bytes_ += bytes;
      }
      out_.reset();
    }
  } else {
    return false;
  }
  left_ = letter_;
  return true;
}

TcpLine::Moved TcpLine::read(const OnNote& on_note) {
  Moved moved;
  while (is_open() && moved.bytes < kMostAtOnce) {
    const bool in_head = head_bytes_ < sizeof head_;
    const std::int64_t count =
        socket_.read_some(in_head ? std::as_writable_bytes(std::span(&head_, 1)).subspan(head_bytes_) : body_left());
    if (count == 0) return moved;
    if (count > 0) {
      moved.bytes += count;
      (in_head ? head_bytes_ : body_bytes_) += static_cast<std::size_t>(count);
    }
    if (count < 0 || (in_head && head_bytes_ == sizeof head_ && !begin_body())) {
      close();
      moved.ended = true;
      return moved;
    }
    moved.payload = moved.payload || (!in_head && head_.kind == Kind::piece);
    if (head_bytes_ == sizeof head_ && body_bytes_ == static_cast<std::size_t>(head_.body_bytes)) end_body(on_note);
  }
  return moved;
}

std::span<std::byte> TcpLine::body_left() {
  const std::span body =
      goes_straight_ ? in_->left.first(static_cast<std::size_t>(head_.body_bytes)) : std::span(body_);
  return body.subspan(body_bytes_);
}

// A piece of what is expected now goes where it is expected; all else lies here until it is opened. False: no rank
// sends such a letter.
bool TcpLine::begin_body() {
  const std::int64_t bytes = head_.body_bytes;
  body_bytes_ = 0;
  goes_straight_ = false;
  if (bytes < 0 || bytes > (head_.kind == Kind::piece ? kPieceBytes : kMostNoteBytes)) return false;
  if (head_.kind == Kind::piece && !has_let_go_) {
    goes_straight_ = in_ && kept_.empty() && head_.frame == in_->frame && bytes <= std::ssize(in_->left);
    if (!goes_straight_ && (bytes != head_.frame.bytes || kept_bytes_ + bytes > kPieceBytes)) return false;
  }
  if (!goes_straight_) body_.resize(static_cast<std::size_t>(bytes));
  return true;
}

void TcpLine::end_body(const OnNote& on_note) {
  head_bytes_ = 0;
  if (head_.kind == Kind::request) {
    requests_.push_back(head_.frame);
    match();
  } else if (head_.kind == Kind::leave) {
    has_left_ = true;
  } else if (head_.kind != Kind::piece) {
    on_note(head_, body_);
  } else if (std::exchange(goes_straight_, false)) {
    in_->left = in_->left.subspan(static_cast<std::size_t>(head_.body_bytes));
    if (in_->left.empty()) in_.reset();
  } else if (!has_let_go_) {
    kept_bytes_ += head_.body_bytes;
    kept_.push_back({head_.frame, std::exchange(body_, {})});
    take_kept();
  }
}

void TcpLine::take_kept() {
  if (!in_ || kept_.empty()) return;
  const auto& [frame, bytes] = kept_.front();
  if (frame != in_->frame) {
    if (!mismatch_) mismatch_ = {false, frame, in_->frame};
    return;
  }
  std::ranges::copy(bytes, in_->left.begin());
  in_.reset();
  kept_bytes_ -= std::ssize(bytes);
  kept_.pop_front();
}

void TcpLine::close() {
  socket_ = {};
  notes_.clear();
  left_ = {};
}

bool TcpLine::is_heard() {
  const std::int64_t taken = is_open() ? written_bytes_ - socket_.unacknowledged_bytes() : 0;
  return taken > std::exchange(taken_bytes_, taken);
}

}  // namespace annulus
