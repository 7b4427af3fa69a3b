// Ranks that meet at a place (rendezvous.h) and talk over TCP, a line for every pair (tcp_line.h). Bytes move inside
// calls alone.
//
// A connection that ends without a word of leave is a lost rank: the others know at once. One that is only silent is
// found by the vigil.
#include <poll.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>

#include "annulus/rendezvous.h"
#include "transport/gather.h"
#include "transport/meeting.h"
#include "transport/tcp_line.h"
#include "transport/vigil.h"

namespace annulus {
namespace {

using Clock = Vigil::Clock;
using Kind = TcpLine::Kind;
using std::chrono::milliseconds;

class TcpTransport final : public Transport {
 public:
  TcpTransport(int rank, std::vector<Socket> sockets, const TransportOptions& options)
      : rank_(rank), options_(options), vigil_(static_cast<int>(sockets.size()), options.timeout) {
    for (Socket& socket : sockets) lines_.emplace_back(std::move(socket));
  }
  ~TcpTransport() override;

  std::string_view name() const override { return "tcp"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(lines_.size()); }
  std::int64_t staging_bytes() const override { return tcp_staging_bytes(size()); }

  void post(const Exchange& exchange) override;
  bool poll() override;
  void wait() override;
  std::vector<std::string> all_gather(const std::string& text) override;
  void abort(const std::string& reason) noexcept override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  TcpLine& line(int peer) { return lines_[static_cast<std::size_t>(peer)]; }
  const TcpLine& line(int peer) const { return lines_[static_cast<std::size_t>(peer)]; }
  template <class F>
  auto guarded(F f);
  void begin(const Exchange& exchange);
  void finish(Lock& lock);
  void conclude();
  bool is_through() const;
  void progress();
  void open(int peer, const TcpLine::Head& head, std::span<const std::byte> body);
  void notice_end(int peer);
  void check_left(int peer);
  std::string look_around();
  std::vector<int> waited_for() const;
  std::vector<pollfd> open_ends(short events = POLLIN | POLLOUT);
  void sleep(milliseconds time, short events);
  void flush_all(milliseconds quiet, milliseconds most);
  void leave();
  void fail(const std::string& text);
  void write_failure(int peer);
  void check_failure();

  int rank_;
  TransportOptions options_;
  std::mutex mutex_;  // guards what follows
  std::vector<TcpLine> lines_;
  Exchange exchange_;  // its blocks are read until it is through
  Frame at_;
  Vigil vigil_;
  bool under_way_ = false;
  bool waiting_ = false;
  bool failed_ = false;
  std::string failure_;
};

TcpTransport::~TcpTransport() {
  try {
    const std::lock_guard lock(mutex_);
    if (under_way_ && !failed_) fail(left_unfinished(rank_, at_));
    leave();
  } catch (const std::bad_alloc&) {  // the others find out when the connections end
  }
}

// Who failed says so once more: its connections may end before another rank has read why from the one that found out.
// Then it reads to the end of what others have sent, for a while: closed with letters unread, a connection would drop
// what is still on its way out. A rank that is through waits for one that computes and has not read its last message.
void TcpTransport::leave() {
  for (int peer = 0; peer < size(); ++peer)
    if (failed_)
      write_failure(peer);
    else
      line(peer).write({.kind = Kind::leave});
  const auto begin = Clock::now();
  flush_all(failed_ ? milliseconds(500) : options_.timeout, options_.timeout);
  for (TcpLine& each : lines_) each.socket().end_writing();
  const auto drain = Clock::now();
  std::array<std::byte, 4096> unread;
  for (;;) {
    bool all_ended = true, all_arrived = true;
    for (TcpLine& each : lines_) {
      std::int64_t count = each.is_open() ? 1 : -1;
      while (count > 0) count = each.socket().read_some(unread);
      if (count < 0) each.close();
      all_ended = all_ended && count < 0;
      all_arrived = all_arrived && each.socket().unacknowledged_bytes() == 0;
    }
    const auto now = Clock::now();
    if (all_ended) break;
    if (now - drain >= milliseconds(300) && (failed_ || all_arrived || now - begin >= options_.timeout)) break;
    sleep(milliseconds(5), POLLIN);
  }
}

// What is not known to the others yet, as that there is no memory, they are told.
template <class F>
auto TcpTransport::guarded(F f) {
  try {
    return f();
  } catch (const Error&) {  // refused, or told
    throw;
  } catch (const std::exception& error) {
    fail(gave_up(rank_, at_, error.what()));
    throw TransportError(failure_);
  }
}

void TcpTransport::post(const Exchange& exchange) {
  check_exchange(exchange, rank_, size());
  check_host_memory(exchange, name());
  {
    const Lock lock(mutex_);
    guarded([&] { begin(exchange); });
    for (const Send& send : exchange_.sends)
      if (send.peer != rank_) sent_bytes_ += total_bytes(send.blocks);
  }
  if (options_.blocking) wait();
}

bool TcpTransport::poll() {
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;  // another thread of this rank is at it
  return guarded([&] {
    progress();
    check_failure();
    if (is_through()) conclude();
    return !under_way_;
  });
}

void TcpTransport::wait() {
  Lock lock(mutex_);
  guarded([&] { finish(lock); });
}

std::vector<std::string> TcpTransport::all_gather(const std::string& text) {
  Lock lock(mutex_);
  return guarded([&] {
    return gather_texts(rank_, size(), text, [&](const Exchange& round) {
      begin(round);
      finish(lock);
    });
  });
}

// What a rank sends to itself has arrived when this returns.
void TcpTransport::begin(const Exchange& exchange) {
  check_failure();
  if (under_way_)
    throw InvalidArgument("one exchange is under way at a time; got step " + std::to_string(exchange.step) +
                          " while step " + std::to_string(at_.step) + " is not finished: call wait() first");
  exchange_ = exchange;
  at_ = {exchange.plan, exchange.step, 0};
  under_way_ = true;
  const auto frame = [&](std::int64_t bytes) { return Frame{exchange.plan, exchange.step, bytes}; };
  std::span<std::byte> own;
  for (const Receive& receive : exchange_.receives)
    if (receive.peer == rank_)
      own = receive.bytes;
    else if (!receive.bytes.empty())
      line(receive.peer).receive(frame(std::ssize(receive.bytes)), receive.bytes);
  for (const Send& send : exchange_.sends) {
    const std::int64_t bytes = total_bytes(send.blocks);
    if (send.peer == rank_)
      PackCursor(send.blocks).pack(own);
    else if (bytes > 0)
      line(send.peer).send(frame(bytes), send.blocks);
  }
  progress();
  for (int peer = 0; peer < size(); ++peer) check_left(peer);
  check_failure();
}

void TcpTransport::finish(Lock& lock) {
  vigil_.begin(Clock::now());
  waiting_ = true;
  for (;;) {
    progress();
    check_failure();
    if (is_through()) break;
    const std::string warning = look_around();
    check_failure();
    std::vector<pollfd> ends = open_ends();
    lock.unlock();  // for abort()
    if (!warning.empty() && options_.warn) options_.warn(warning);
    ::poll(ends.data(), ends.size(), 2);
    lock.lock();
  }
  waiting_ = false;
  conclude();
}

void TcpTransport::conclude() {
  if (!std::exchange(under_way_, false) || at_.plan == kGatherPlan) return;
  for (const Receive& receive : exchange_.receives)
    if (receive.peer != rank_) received_bytes_ += std::ssize(receive.bytes);
}

// All has arrived, and all is on its way: what lay here would move no further until the next call.
bool TcpTransport::is_through() const {
  return std::ranges::all_of(lines_, [](const TcpLine& each) { return each.has_sent() && each.has_received(); });
}

void TcpTransport::progress() {
  const auto flush = [&](int peer) {
    if (line(peer).flush().payload) vigil_.moved(Clock::now());  // a lost end is noticed when reading
  };
  std::vector<int> ended;
  for (int peer = 0; peer < size(); ++peer) {
    TcpLine& from = line(peer);
    if (!from.is_open()) continue;
    flush(peer);
    const TcpLine::Moved moved =
        from.read([&](const TcpLine::Head& head, std::span<const std::byte> body) { open(peer, head, body); });
    if (moved.bytes > 0) vigil_.hear(peer, Clock::now());
    if (moved.payload) vigil_.moved(Clock::now());
    if (moved.ended) ended.push_back(peer);
  }
  // Now: one that has ended may only have passed on the failure that another line tells of.
  for (const int peer : ended) notice_end(peer);
  for (int peer = 0; peer < size(); ++peer) {
    if (const auto& found = line(peer).mismatch(); found && !failed_)
      fail(found->is_outgoing ? disagreement(rank_, found->sent, peer, found->expected)
                              : disagreement(peer, found->sent, rank_, found->expected));
    flush(peer);  // answers
  }
}

void TcpTransport::open(int peer, const TcpLine::Head& head, std::span<const std::byte> body) {
  const auto now = Clock::now();
  if (head.kind == Kind::ask) {
    const Report report = waiting_ ? vigil_.report(waited_for(), at_.step, now) : Report{.step = at_.step};
    const auto still = std::chrono::duration_cast<std::chrono::nanoseconds>(report.still);
    line(peer).write({.kind = Kind::report,
                      .frame = {.step = report.step},
                      .still_ns = still.count(),
                      .waiting = report.waiting,
                      .waits_for = report.waits_for});
  } else if (head.kind == Kind::report) {
    vigil_.hear(peer,
                {.waiting = head.waiting != 0,
                 .waits_for = head.waits_for,
                 .step = head.frame.step,
                 .still = std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(head.still_ns))},
                now);
  } else if (!failed_) {
    failure_.assign(reinterpret_cast<const char*>(body.data()), body.size());
    failed_ = true;
  }
}

void TcpTransport::notice_end(int peer) {
  if (!line(peer).has_left())
    fail("rank " + std::to_string(peer) + " is lost: its connection to rank " + std::to_string(rank_) +
         " ended without a word " + place(at_) + "; see what rank " + std::to_string(peer) + " printed");
  check_left(peer);
}

// Who has left neither takes nor sends anything more.
void TcpTransport::check_left(int peer) {
  if (line(peer).has_left() && (line(peer).is_owed() || !line(peer).has_received()))
    fail(describe({.finding = Vigil::Finding::left, .peer = peer}, {}, rank_, at_, options_.timeout));
}

std::vector<int> TcpTransport::waited_for() const {
  std::vector<int> peers;
  for (const bool to_receive : {true, false})
    for (int peer = 0; peer < size(); ++peer)
      if (to_receive ? !line(peer).has_received() : line(peer).has_received() && !line(peer).has_sent())
        peers.push_back(peer);
  return peers;
}

// How are those that this rank waits for? What is to be warned of. Who reads what lies in the system says nothing until
// it comes to a question.
std::string TcpTransport::look_around() {
  const auto now = Clock::now();
  const std::vector<int> peers = waited_for();
  for (const int peer : peers) {
    if (line(peer).is_heard()) vigil_.hear(peer, now);
    if (vigil_.ask(peer, now)) line(peer).write({.kind = Kind::ask});
    if (line(peer).has_left()) vigil_.leave(peer);
  }
  const Vigil::Verdict verdict = vigil_.judge(peers, now);
  if (verdict.finding == Vigil::Finding::patience) return "";
  std::string text = describe(verdict, vigil_.last_report(verdict.peer), rank_, at_, options_.timeout);
  if (verdict.finding == Vigil::Finding::slow) return text;
  fail(text);
  return "";
}

// To be polled: until something can be read, or more be written.
std::vector<pollfd> TcpTransport::open_ends(short events) {
  std::vector<pollfd> ends;
  for (TcpLine& each : lines_)
    if (each.is_open())
      ends.push_back({each.socket().fd(), static_cast<short>(each.wants_to_write() ? events : events & ~POLLOUT), 0});
  return ends;
}

void TcpTransport::sleep(milliseconds time, short events) {
  std::vector<pollfd> ends = open_ends(events);
  ::poll(ends.data(), ends.size(), static_cast<int>(time.count()));
}

// Until all is written, nothing has moved for a while, or it took too long.
void TcpTransport::flush_all(milliseconds quiet, milliseconds most) {
  auto moved_at = Clock::now();
  for (const auto end = moved_at + most; Clock::now() < end && Clock::now() - moved_at < quiet;) {
    bool empty = true;
    for (TcpLine& each : lines_) {
      const TcpLine::Moved moved = each.flush();
      if (moved.ended) each.close();
      if (moved.bytes > 0) moved_at = Clock::now();
      empty = empty && !each.wants_to_write();
    }
    if (empty) return;
    sleep(milliseconds(1), POLLOUT);
  }
}

// The first failure is the one that counts, and all ranks hear of it.
void TcpTransport::fail(const std::string& text) {
  for (TcpLine& each : lines_) each.let_go();
  if (failed_) return;
  failed_ = true;
  failure_ = text.substr(0, 4096);
  for (int peer = 0; peer < size(); ++peer) write_failure(peer);
  flush_all(milliseconds(100), milliseconds(100));
}

void TcpTransport::write_failure(int peer) {
  line(peer).write({.kind = Kind::failure, .body_bytes = std::ssize(failure_)}, std::as_bytes(std::span(failure_)));
}

void TcpTransport::check_failure() {
  if (options_.stop != nullptr && *options_.stop) fail(told_to_stop(rank_, at_, waited_for()));
  if (!failed_) return;
  for (TcpLine& each : lines_) each.let_go();  // another rank's failure
  waiting_ = under_way_ = false;
  throw TransportError(failure_);
}

void TcpTransport::abort(const std::string& reason) noexcept {
  try {
    const Lock lock(mutex_);
    fail(gave_up(rank_, at_, reason));
    under_way_ = false;
  } catch (...) {  // no memory: the others find out when the connections end
  }
}

}  // namespace

std::int64_t tcp_staging_bytes(int size) { return 2 * TcpLine::kPieceBytes * (size - 1); }

std::unique_ptr<Transport> make_rendezvous_transport(int rank, int size, const std::string& place,
                                                     const TransportOptions& options) {
  check_rank(rank, size);
  return std::make_unique<TcpTransport>(rank, meet(rank, size, place, options), options);
}

}  // namespace annulus
