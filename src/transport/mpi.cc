// The transport itself: whose turn it is to call MPI, how ranks are watched, how a failure spreads. The messages move
// in mpi_messages.cc.
//
// A failure is told to all ranks by a note, and every rank reads its notes wherever it waits or polls. A rank answers
// for itself in the same places and nowhere else, since MPI does nothing between calls.
#include "annulus/mpi.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "transport/borrower.h"
#include "transport/gather.h"
#include "transport/mpi_messages.h"
#include "transport/mpi_notes.h"
#include "transport/trouble.h"
#include "transport/vigil.h"

namespace annulus {
namespace {

using Clock = Vigil::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// Group g has the tags 2g + 1 for notes and 2g + 2 for pieces; every MPI has tags up to 32767.
int tag_of_group(int group) { return group % 16'000 * 2 + 1; }

class MpiTransport final : public Transport, public Borrower {
 public:
  MpiTransport(std::shared_ptr<MpiWorld> world, const TransportOptions& options, const MpiOptions& mpi)
      : world_(std::move(world)),
        options_(options),
        staging_bytes_(mpi_staging_bytes(world_->size, mpi)),
        cuda_aware_(mpi.cuda_aware.value_or(world_->cuda_aware)),
        notes_(*world_, tag_of_group(world_->groups)),
        messages_(*world_, tag_of_group(world_->groups) + 1, mpi, notes_),
        left_(static_cast<std::size_t>(world_->size)),
        vigil_(world_->size, options.timeout) {
    ++world_->groups;
  }
  ~MpiTransport() override;

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return world_->rank; }
  int size() const override { return world_->size; }
  std::int64_t staging_bytes() const override { return staging_bytes_; }

  void post(const Exchange& exchange) override;
  bool poll() override;
  void wait() override;
  std::vector<std::string> all_gather(const std::string& text) override;
  void abort(const std::string& reason) noexcept override;

  bool takes_device_memory() const override { return cuda_aware_; }
  void borrow(std::shared_ptr<OwnedBytes> memory) override {
    const std::lock_guard turn(turn_);
    messages_.borrow(std::move(memory));
  }

 private:
  void begin(const Exchange& exchange);
  void finish();
  bool progress();
  void read(const NoteChannel::Received& received);
  void answer(int source);
  void look_around();
  void fail(const std::string& text, int lost = -1);
  void check_failure();

  std::shared_ptr<MpiWorld> world_;
  TransportOptions options_;
  std::int64_t staging_bytes_;
  bool cuda_aware_;

  std::mutex turn_;  // guards all below but the wish to abort
  NoteChannel notes_;
  Messages messages_;
  Exchange exchange_;  // under way
  Frame at_;
  std::int64_t received_before_ = 0;  // the exchange under way
  bool failed_ = false;
  std::string failure_;

  std::vector<bool> left_;
  Vigil vigil_;
  bool waiting_ = false;

  std::mutex abort_mutex_;
  std::atomic<bool> abort_wanted_{false};
  std::string abort_reason_;
};

MpiTransport::~MpiTransport() {
  const std::lock_guard turn(turn_);
  try {
    if (!messages_.finished()) fail(left_unfinished(rank(), at_));
    if (failed_) messages_.drop();
    for (int peer = 0; peer < size() && !failed_; ++peer)
      if (notes_.knows(peer)) notes_.send(peer, {.kind = NoteKind::leave});
    notes_.flush(milliseconds(500));
  } catch (const TransportError&) {  // MPI itself fails: nobody can be told
  }
}

void MpiTransport::post(const Exchange& exchange) {
  check_exchange(exchange, rank(), size());
  check_host_memory(exchange, name());
  {
    const std::lock_guard turn(turn_);
    received_before_ = received_bytes_;
    begin(exchange);
    sent_bytes_ += messages_.sent_bytes();
  }
  if (options_.blocking) wait();
}

bool MpiTransport::poll() {
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn) return false;  // another thread of this rank is at it
  progress();
  check_failure();
  return messages_.finished();
}

void MpiTransport::wait() {
  const std::lock_guard turn(turn_);
  finish();
}

std::vector<std::string> MpiTransport::all_gather(const std::string& text) {
  const std::lock_guard turn(turn_);
  return gather_texts(rank(), size(), text, [this](const Exchange& round) {
    begin(round);
    finish();
  });
}

void MpiTransport::begin(const Exchange& exchange) {
  check_failure();
  if (!messages_.finished())
    throw InvalidArgument("one exchange is under way at a time; got step " + std::to_string(exchange.step) +
                          " while step " + std::to_string(at_.step) + " is not finished: call wait() first");
  exchange_ = exchange;
  at_ = {exchange.plan, exchange.step, 0};
  messages_.begin(exchange_);
  progress();
  check_failure();
}

// Busy for a moment, as the next piece is usually near; then with naps that grow with the time waited.
void MpiTransport::finish() {
  auto last_moved = Clock::now(), last_look = last_moved;
  vigil_.begin(last_moved);
  waiting_ = true;
  for (;;) {
    const bool moved = progress();
    check_failure();
    if (messages_.finished()) break;
    const auto now = Clock::now();
    if (moved) last_moved = now;
    if (now - last_look > milliseconds(5)) {
      look_around();
      last_look = now;
    }
    const auto idle = now - last_moved;
    if (idle < milliseconds(1))
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::min<Clock::duration>(idle / 20, microseconds(500)));
  }
  waiting_ = false;
}

// True when a message came forward.
bool MpiTransport::progress() try {
  if (failed_) return false;
  while (const auto received = notes_.next()) read(*received);
  if (failed_ || !messages_.progress()) return false;
  if (at_.plan != kGatherPlan) received_bytes_ = received_before_ + messages_.received_bytes();
  const auto now = Clock::now();
  vigil_.moved(now);
  for (const int peer : messages_.came_from()) vigil_.hear(peer, now);
  return true;
} catch (const TransportError& error) {  // this rank found it, so it tells the others
  fail(error.what());
  return false;
}

void MpiTransport::read(const NoteChannel::Received& received) {
  const auto& [source, note, text] = received;
  const auto now = Clock::now();
  vigil_.hear(source, now);
  switch (note.kind) {
    case NoteKind::offer:
    case NoteKind::request:
    case NoteKind::grant:
      messages_.read(source, note);
      break;
    case NoteKind::ask:
      answer(source);
      break;
    case NoteKind::report:
      vigil_.hear(source, note.report(), now);
      break;
    case NoteKind::failure:
      if (failed_) break;
      failed_ = world_->failed = true;
      failure_ = text;
      if (note.lost >= 0) world_->lost.insert(static_cast<int>(note.lost));
      break;
    case NoteKind::leave:
      left_[static_cast<std::size_t>(source)] = true;
      break;
  }
}

void MpiTransport::answer(int source) {
  const Report report =
      waiting_ ? vigil_.report(messages_.unfinished_peers(), at_.step, Clock::now()) : Report{.step = at_.step};
  notes_.send(source, Note::of(report));
}

// How are those that this rank waits for?
void MpiTransport::look_around() {
  const auto now = Clock::now();
  const std::vector<int> peers = messages_.unfinished_peers();
  for (const int peer : peers)
    if (vigil_.ask(peer, now)) notes_.send(peer, {.kind = NoteKind::ask});
  // Who left after both ends had agreed on a message has seen it through: its bytes are on their way.
  for (const int peer : messages_.peers_not_agreed())
    if (left_[static_cast<std::size_t>(peer)]) vigil_.leave(peer);

  const Vigil::Verdict verdict = vigil_.judge(peers, now);
  if (verdict.finding == Vigil::Finding::patience) return;
  const std::string text = describe(verdict, vigil_.last_report(verdict.peer), rank(), at_, options_.timeout);
  if (verdict.finding != Vigil::Finding::slow)
    fail(text, verdict.finding == Vigil::Finding::silent ? verdict.peer : -1);
  else if (options_.warn)
    options_.warn(text);
}

// The first failure is the one that counts. `lost` is the silent rank, if that is why.
void MpiTransport::fail(const std::string& text, int lost) {
  if (failed_) return;
  failed_ = world_->failed = true;
  failure_ = text;
  if (lost >= 0) world_->lost.insert(lost);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) notes_.send(peer, {.kind = NoteKind::failure, .lost = lost}, text);
  notes_.flush(milliseconds(100));  // this rank may not call MPI again for a while
}

void MpiTransport::check_failure() {
  if (options_.stop != nullptr && *options_.stop) fail(told_to_stop(rank(), at_, messages_.unfinished_peers()));
  if (abort_wanted_) {
    const std::lock_guard lock(abort_mutex_);
    fail(gave_up(rank(), at_, abort_reason_));
  }
  if (!failed_) return;
  messages_.drop();
  waiting_ = false;
  throw TransportError(failure_);
}

void MpiTransport::abort(const std::string& reason) noexcept {
  try {
    {
      const std::lock_guard lock(abort_mutex_);
      if (!abort_wanted_) abort_reason_ = reason;
      abort_wanted_ = true;
    }
    const std::lock_guard turn(turn_);  // another thread of this rank that waits sees the wish, throws and lets go
    check_failure();
  } catch (...) {  // the failure itself: it has been told
  }
}

}  // namespace

std::int64_t mpi_staging_bytes(int size, const MpiOptions& options) {
  return size > 1 ? (options.send_slots + options.receive_slots) * options.piece_bytes : 0;
}

std::unique_ptr<Transport> MpiProcess::make_transport(const TransportOptions& options, const MpiOptions& mpi) {
  if (mpi.send_slots < 1 || mpi.receive_slots < 2)
    throw InvalidArgument("pieces need 1 slot or more to send and 2 or more to receive; got " +
                          std::to_string(mpi.send_slots) + " and " + std::to_string(mpi.receive_slots));
  if (mpi.piece_bytes < 1 || mpi.piece_bytes > (std::int64_t{1} << 30))
    throw InvalidArgument("pieces have 1 to 2^30 bytes; got " + std::to_string(mpi.piece_bytes));
  world_->patience = std::max(world_->patience, options.timeout);
  return std::make_unique<MpiTransport>(world_, options, mpi);
}

}  // namespace annulus
