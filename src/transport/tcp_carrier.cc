// Packed messages over TCP, a connection for every pair of ranks. On a connection travel letters, a head and a body
// each: messages, and what ranks tell each other about how they are. Messages are written straight from the sender's
// memory, and read straight into the receiver's where it expects them; what comes earlier is kept until it is asked
// for, so no letter is stuck behind one that nobody wants yet. The receiver says when it has taken a message, and its
// sender waits for that, but for a few bytes of short ones: nobody keeps much more than one exchange of a peer's.
//
// A connection that ends without a word of leave is a lost rank: the others know at once. One that is only silent is
// found by the vigil.
#include <poll.h>

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <new>

#include "annulus/carrier.h"
#include "annulus/rendezvous.h"
#include "transport/meeting.h"
#include "transport/trouble.h"
#include "transport/vigil.h"

namespace annulus {
namespace {

using Clock = Vigil::Clock;
using std::chrono::milliseconds;

constexpr std::size_t kAhead = 65536;  // bytes that a peer need not have taken yet when a wait ends

enum class Kind : std::int64_t { message, taken, ask, report, failure, leave };

struct Head {
  Kind kind = Kind::ask;
  Frame frame = {};             // message; report: its step; taken: its bytes
  std::int64_t body_bytes = 0;  // message, failure
  std::int64_t still_ns = 0;    // report
  std::int32_t waiting = 0, waits_for = -1;
};

struct Letter {
  Head head;
  std::vector<std::byte> body;
};

// A letter on its way out; the body of a message is lent by the exchange under way.
struct Outgoing {
  std::vector<std::byte> own;
  std::span<const std::byte> own_left, lent_left;  // not yet written

  explicit Outgoing(std::vector<std::byte> bytes, std::span<const std::byte> lent = {})
      : own(std::move(bytes)), own_left(own), lent_left(lent) {}
  Outgoing(Outgoing&&) noexcept = default;  // the bytes of a vector stay where they are
  Outgoing& operator=(Outgoing&&) noexcept = default;
  bool has_begun() const { return own_left.size() < own.size(); }
  bool is_over() const { return own_left.empty() && lent_left.empty(); }
  void own_all() {
    std::vector rest(own_left.begin(), own_left.end());
    rest.insert(rest.end(), lent_left.begin(), lent_left.end());
    *this = Outgoing(std::move(rest));
  }
};

// One end of a connection.
struct Line {
  Socket socket;
  std::deque<Outgoing> out;
  std::size_t untaken_bytes = 0;  // of messages that went out here
  Letter reading;
  std::span<std::byte> expected;  // where the body that is being read goes, if the exchange under way expects it
  bool drops = false;             // or nowhere
  std::size_t read_bytes = 0;     // of its head and body
  std::deque<Letter> messages;    // arrived, and not asked for yet
  bool left = false;              // said so
  bool has_ended = false;
  std::int64_t unacknowledged_bytes = 0;  // when last looked at

  bool is_through() const { return !socket.is_open() || (out.empty() && untaken_bytes <= kAhead); }
  void close() {
    socket = {};
    out.clear();
  }
};

class TcpCarrier final : public Carrier {
 public:
  TcpCarrier(int rank, std::vector<Socket> sockets, const TransportOptions& options)
      : rank_(rank), options_(options), vigil_(static_cast<int>(sockets.size()), options.timeout) {
    for (Socket& socket : sockets) lines_.emplace_back().socket = std::move(socket);
  }
  ~TcpCarrier() override;

  std::string_view name() const override { return "tcp"; }
  void post(const PackedExchange& exchange) override;
  void skip(std::uint64_t plan, std::int64_t step) override;
  void wait() override;
  bool poll() override;
  void abort(const std::string& text) noexcept override;

 private:
  Line& line(int peer) { return lines_[static_cast<std::size_t>(peer)]; }
  void write(int peer, const Head& head, std::span<const std::byte> body = {});
  void send(const PackedMessage& message);
  void progress();
  std::int64_t flush(int peer);
  void read(int peer);
  void notice_end(int peer);
  void begin_body(int peer);
  void end_body(int peer);
  void open(int peer, Letter letter);
  void deliver();
  void leave();
  void take(int peer, std::size_t bytes);
  void let_go();
  bool is_through() const;
  void look_around();
  std::vector<pollfd> open_ends(short events = POLLIN | POLLOUT) const;
  void sleep(milliseconds time, short events) const;
  void flush_all(milliseconds quiet, milliseconds most);
  std::vector<int> waited_for() const;
  std::string who_left(int peer) const;
  void fail(const std::string& text);
  void write_failure(int peer);
  void check_failure();

  int rank_;
  TransportOptions options_;
  std::mutex mutex_;  // guards what follows; abort() comes from any thread
  std::vector<Line> lines_;
  std::vector<PackedMessage> receives_;  // not yet delivered
  Frame at_;
  Vigil vigil_;
  bool waiting_ = false;
  bool failed_ = false;
  std::string failure_;
};

TcpCarrier::~TcpCarrier() {
  try {
    const std::lock_guard lock(mutex_);
    leave();
  } catch (const std::bad_alloc&) {  // the others find out when the connections end
  }
}

// Who failed says so once more: its connections may end before another rank has read why from the one that found out.
// Then it reads to the end of what others have sent, for a while: closed with letters unread, a connection would drop
// what is still on its way out.
void TcpCarrier::leave() {
  for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer)
    if (failed_)
      write_failure(peer);
    else
      write(peer, {.kind = Kind::leave});
  flush_all(milliseconds(500), options_.timeout);
  for (Line& each : lines_) each.socket.end_writing();
  std::array<std::byte, 4096> unread;
  for (const auto end = Clock::now() + milliseconds(300); Clock::now() < end;) {
    bool all_ended = true;
    for (Line& each : lines_) {
      std::int64_t count = each.socket.is_open() ? 1 : -1;
      while (count > 0) count = each.socket.read_some(unread);
      if (count < 0) each.socket = {};
      all_ended = all_ended && count < 0;
    }
    if (all_ended) break;
    sleep(milliseconds(5), POLLIN);
  }
}

void TcpCarrier::post(const PackedExchange& exchange) {
  {
    const std::lock_guard lock(mutex_);
    at_ = {exchange.plan, exchange.step, 0};
    check_failure();
    receives_ = exchange.receives;
    for (const PackedMessage& message : exchange.sends) send(message);
    progress();
    check_failure();
  }
  if (options_.blocking) wait();
}

void TcpCarrier::skip(std::uint64_t plan, std::int64_t step) {
  const std::lock_guard lock(mutex_);
  at_ = {plan, step, 0};
}

bool TcpCarrier::poll() {
  const std::lock_guard lock(mutex_);
  progress();
  check_failure();
  return is_through();
}

void TcpCarrier::wait() {
  std::unique_lock lock(mutex_);
  vigil_.begin(Clock::now());
  waiting_ = true;
  for (;;) {
    progress();
    check_failure();
    if (is_through()) break;
    look_around();
    check_failure();
    std::vector<pollfd> ends = open_ends();
    lock.unlock();  // for abort()
    ::poll(ends.data(), ends.size(), 2);
    lock.lock();
  }
  waiting_ = false;
}

// All has arrived, and all is on its way: what lay here would move no further until the next call.
bool TcpCarrier::is_through() const { return receives_.empty() && std::ranges::all_of(lines_, &Line::is_through); }

// To be polled: until something can be read, or more be written.
std::vector<pollfd> TcpCarrier::open_ends(short events) const {
  std::vector<pollfd> ends;
  for (const Line& each : lines_)
    if (each.socket.is_open())
      ends.push_back({each.socket.fd(), static_cast<short>(each.out.empty() ? events & ~POLLOUT : events), 0});
  return ends;
}

void TcpCarrier::sleep(milliseconds time, short events) const {
  std::vector<pollfd> ends = open_ends(events);
  ::poll(ends.data(), ends.size(), static_cast<int>(time.count()));
}

void TcpCarrier::write(int peer, const Head& head, std::span<const std::byte> body) {
  if (!line(peer).socket.is_open()) return;
  const auto bytes = std::as_bytes(std::span(&head, 1));
  std::vector<std::byte> letter(bytes.begin(), bytes.end());
  letter.insert(letter.end(), body.begin(), body.end());
  line(peer).out.emplace_back(std::move(letter));
}

void TcpCarrier::send(const PackedMessage& message) {
  if (line(message.peer).left) fail(who_left(message.peer));
  if (failed_) return;
  const auto bytes = static_cast<std::int64_t>(message.bytes.size());
  write(message.peer, {.kind = Kind::message, .frame = {at_.plan, at_.step, bytes}, .body_bytes = bytes});
  line(message.peer).out.back().lent_left = message.bytes;
  line(message.peer).untaken_bytes += message.bytes.size();
}

void TcpCarrier::progress() {
  for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer) {
    if (line(peer).socket.is_open()) flush(peer);
    if (line(peer).socket.is_open()) read(peer);
  }
  // Now: one that has ended may only have passed on the failure that another line tells of.
  for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer)
    if (std::exchange(line(peer).has_ended, false)) notice_end(peer);
  deliver();
  for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer)
    if (line(peer).socket.is_open()) flush(peer);  // answers
}

// Bytes that went out; -1: the other end is gone, which is for who reads to notice.
std::int64_t TcpCarrier::flush(int peer) {
  Line& to = line(peer);
  std::int64_t bytes = 0;
  while (!to.out.empty()) {
    Outgoing& first = to.out.front();
    const bool is_lent = first.own_left.empty();
    std::span<const std::byte>& left = is_lent ? first.lent_left : first.own_left;
    const std::int64_t written = to.socket.write_some(left);
    if (written < 0) return -1;
    if (written == 0) break;
    bytes += written;
    if (left.size() >= kAhead) vigil_.hear(peer, Clock::now());  // it reads, or the system would not take so much
    if (is_lent) vigil_.moved(Clock::now());
    left = left.subspan(static_cast<std::size_t>(written));
    if (first.is_over()) to.out.pop_front();
  }
  return bytes;
}

void TcpCarrier::read(int peer) {
  Line& from = line(peer);
  Letter& letter = from.reading;
  std::array<std::byte, 4096> nowhere;
  for (;;) {
    const bool in_head = from.read_bytes < sizeof(Head);
    const std::size_t at = in_head ? from.read_bytes : from.read_bytes - sizeof(Head);
    const std::size_t left = (in_head ? sizeof(Head) : static_cast<std::size_t>(letter.head.body_bytes)) - at;
    if (left == 0) {
      end_body(peer);
      continue;
    }
    const std::span<std::byte> to = in_head      ? std::as_writable_bytes(std::span(&letter.head, 1)).subspan(at)
                                    : from.drops ? std::span(nowhere).first(std::min(left, nowhere.size()))
                                    : from.expected.empty() ? std::span(letter.body).subspan(at)
                                                            : from.expected.subspan(at);
    const std::int64_t count = from.socket.read_some(to);
    if (count == 0) return;
    if (count < 0) {
      from.close();
      from.has_ended = true;
      return;
    }
    from.read_bytes += static_cast<std::size_t>(count);
    vigil_.hear(peer, Clock::now());
    if (!in_head && letter.head.kind == Kind::message) vigil_.moved(Clock::now());
    if (in_head && from.read_bytes == sizeof(Head)) begin_body(peer);
  }
}

void TcpCarrier::notice_end(int peer) {
  if (!line(peer).left)
    fail("rank " + std::to_string(peer) + " is lost: its connection to rank " + std::to_string(rank_) +
         " ended without a word " + place(at_) + "; see what rank " + std::to_string(peer) + " printed");
  else if (line(peer).untaken_bytes > 0)
    fail(who_left(peer));
}

// A message that is expected now goes where it is expected; all else lies here until it is opened.
void TcpCarrier::begin_body(int peer) {
  Line& from = line(peer);
  const Head& head = from.reading.head;
  const auto receive = std::ranges::find(receives_, peer, &PackedMessage::peer);
  const auto is_expected = [&] {
    const auto bytes = static_cast<std::int64_t>(receive->bytes.size());
    return from.messages.empty() && head.frame == Frame{at_.plan, at_.step, bytes} && head.body_bytes == bytes;
  };
  if (head.kind == Kind::message && failed_)
    from.drops = true;
  else if (head.kind == Kind::message && receive != receives_.end() && is_expected())
    from.expected = receive->bytes;
  else
    from.reading.body.resize(static_cast<std::size_t>(head.body_bytes));
}

void TcpCarrier::end_body(int peer) {
  Line& from = line(peer);
  from.read_bytes = 0;
  Letter letter = std::exchange(from.reading, {});
  if (std::exchange(from.drops, false)) return;
  const std::span<std::byte> expected = std::exchange(from.expected, {});
  if (expected.empty()) return open(peer, std::move(letter));
  std::erase_if(receives_, [&](const PackedMessage& receive) { return receive.peer == peer; });
  take(peer, expected.size());
}

void TcpCarrier::take(int peer, std::size_t bytes) {
  write(peer, {.kind = Kind::taken, .frame = {.bytes = static_cast<std::int64_t>(bytes)}});
}

void TcpCarrier::open(int peer, Letter letter) {
  const auto now = Clock::now();
  vigil_.hear(peer, now);
  const Head& head = letter.head;
  switch (head.kind) {
    case Kind::message:
      line(peer).messages.push_back(std::move(letter));
      break;
    case Kind::taken: {
      std::size_t& untaken = line(peer).untaken_bytes;
      untaken -= std::min(untaken, static_cast<std::size_t>(head.frame.bytes));  // 0, where the exchange has failed
      vigil_.moved(now);
      break;
    }
    case Kind::ask: {
      const Report report = waiting_ ? vigil_.report(waited_for(), at_.step, now) : Report{.step = at_.step};
      const auto still = std::chrono::duration_cast<std::chrono::nanoseconds>(report.still);
      write(peer, {.kind = Kind::report,
                   .frame = {.step = report.step},
                   .still_ns = still.count(),
                   .waiting = report.waiting,
                   .waits_for = report.waits_for});
      break;
    }
    case Kind::report:
      vigil_.hear(peer,
                  {.waiting = head.waiting != 0,
                   .waits_for = head.waits_for,
                   .step = head.frame.step,
                   .still = std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(head.still_ns))},
                  now);
      break;
    case Kind::failure:
      if (!failed_) failure_.assign(reinterpret_cast<const char*>(letter.body.data()), letter.body.size());
      failed_ = true;
      break;
    case Kind::leave:
      line(peer).left = true;
      break;
  }
}

// The oldest message of a peer is the one that is expected of it, or the two disagree.
void TcpCarrier::deliver() {
  for (std::size_t i = 0; i < receives_.size() && !failed_;) {
    auto& [peer, bytes] = receives_[i];
    std::deque<Letter>& messages = line(peer).messages;
    if (messages.empty()) {
      ++i;
      continue;
    }
    const Frame expected{at_.plan, at_.step, static_cast<std::int64_t>(bytes.size())};
    if (messages.front().head.frame != expected)
      return fail(disagreement(peer, messages.front().head.frame, rank_, expected));
    std::ranges::copy(messages.front().body, bytes.begin());
    messages.pop_front();
    take(peer, bytes.size());
    receives_.erase(receives_.begin() + static_cast<std::ptrdiff_t>(i));
    vigil_.moved(Clock::now());
  }
}

std::vector<int> TcpCarrier::waited_for() const {
  std::vector<int> peers;
  for (const PackedMessage& receive : receives_) peers.push_back(receive.peer);
  for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer) {
    const Line& to = lines_[static_cast<std::size_t>(peer)];
    if (!to.is_through() && std::ranges::find(peers, peer) == peers.end()) peers.push_back(peer);
  }
  return peers;
}

std::string TcpCarrier::who_left(int peer) const {
  return describe({.finding = Vigil::Finding::left, .peer = peer}, {}, rank_, at_, options_.timeout);
}

// How are those that this rank waits for? Who reads what lies in the system says nothing until it comes to a question.
void TcpCarrier::look_around() {
  const auto now = Clock::now();
  const std::vector<int> peers = waited_for();
  for (const int peer : peers) {
    const std::int64_t left = line(peer).socket.unacknowledged_bytes();
    if (left < std::exchange(line(peer).unacknowledged_bytes, left)) vigil_.hear(peer, now);
    if (vigil_.ask(peer, now)) write(peer, {.kind = Kind::ask});
    if (line(peer).left) vigil_.leave(peer);
  }
  const Vigil::Verdict verdict = vigil_.judge(peers, now);
  if (verdict.finding == Vigil::Finding::patience) return;
  const std::string text = describe(verdict, vigil_.last_report(verdict.peer), rank_, at_, options_.timeout);
  if (verdict.finding != Vigil::Finding::slow)
    fail(text);
  else if (options_.warn)
    options_.warn(text);
}

// The exchange under way has failed, and its memory is left alone. Messages that have begun go on to their ends, from a
// copy and to nowhere: behind them is why.
void TcpCarrier::let_go() {
  receives_.clear();
  for (Line& each : lines_) {
    each.untaken_bytes = 0;
    if (!std::exchange(each.expected, {}).empty()) each.drops = true;
    const auto is_lent = [](const Outgoing& letter) { return !letter.lent_left.empty(); };
    std::erase_if(each.out, [&](const Outgoing& letter) { return is_lent(letter) && !letter.has_begun(); });
    try {
      for (Outgoing& letter : each.out)
        if (is_lent(letter)) letter.own_all();
    } catch (const std::bad_alloc&) {
      each.close();  // which the other end notices
    }
  }
}

// The first failure is the one that counts, and all ranks hear of it.
void TcpCarrier::fail(const std::string& text) {
  if (failed_) return;
  failed_ = true;
  failure_ = text.substr(0, 4096);
  let_go();
  for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer) write_failure(peer);
  flush_all(milliseconds(100), milliseconds(100));
}

void TcpCarrier::write_failure(int peer) {
  write(peer, {.kind = Kind::failure, .body_bytes = static_cast<std::int64_t>(failure_.size())},
        std::as_bytes(std::span(failure_)));
}

// Until all is written, nothing has moved for a while, or it took too long.
void TcpCarrier::flush_all(milliseconds quiet, milliseconds most) {
  auto moved = Clock::now();
  for (const auto end = moved + most; Clock::now() < end && Clock::now() - moved < quiet;) {
    bool empty = true;
    for (int peer = 0; peer < static_cast<int>(lines_.size()); ++peer) {
      if (!line(peer).socket.is_open()) continue;
      const std::int64_t bytes = flush(peer);
      if (bytes < 0) line(peer).close();
      if (bytes > 0) moved = Clock::now();
      empty = empty && line(peer).out.empty();
    }
    if (empty) return;
    sleep(milliseconds(1), POLLOUT);
  }
}

void TcpCarrier::check_failure() {
  if (options_.stop != nullptr && *options_.stop) fail(told_to_stop(rank_, at_, waited_for()));
  if (!failed_) return;
  let_go();  // another rank's failure
  waiting_ = false;
  throw TransportError(failure_);
}

void TcpCarrier::abort(const std::string& text) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    fail(text);
  } catch (...) {  // no memory: the others find out when the connections end
  }
}

}  // namespace

std::unique_ptr<Transport> make_rendezvous_transport(int rank, int size, const std::string& place,
                                                     const TransportOptions& options) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument("a rank lies in [0, size) of its group; got rank " + std::to_string(rank) + " of " +
                          std::to_string(size) + ": give the rank of this process");
  return make_carried_transport(rank, size,
                                std::make_unique<TcpCarrier>(rank, meet(rank, size, place, options), options));
}

}  // namespace annulus
