// Ranks that are threads: how messages go through the boxes of thread_boxes.h, how ranks are watched, how one gives up.
//
// Nobody may touch a rank's memory after its call has thrown. Copies go by chunks, stop when the group fails, and a
// rank that gives up waits for the chunk under way, and for what a GPU has been told to copy.
#include "annulus/thread_group.h"

#include <algorithm>

#include "transport/gather.h"
#include "transport/thread_boxes.h"

namespace annulus {
namespace {

using Clock = Vigil::Clock;
using Lock = std::unique_lock<std::mutex>;

constexpr std::size_t kChunkBytes = std::size_t{1}
                                    << 20;  // some 100 us: how long a rank that gives up may have to wait

void wait_for_copy(DeviceEvent& copied) noexcept {
  try {
    copied.wait();
  } catch (const std::exception&) {  // a GPU that has failed copies nothing
  }
}

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Group> group, int rank, const TransportOptions& options,
                  std::unique_ptr<DeviceCopies> copies = nullptr)
      : group_(std::move(group)),
        rank_(rank),
        options_(options),
        copies_(std::move(copies)),
        vigil_(size(), options.timeout) {}
  ~ThreadTransport() override;

  std::string_view name() const override { return "threads"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->members.size()); }

  void post(const Exchange& exchange) override;
  bool poll() override;
  void wait() override;
  std::vector<std::string> all_gather(const std::string& text) override;
  void abort(const std::string& reason) noexcept override;

 private:
  Member& self() { return group_->member(rank_); }
  void begin(const Exchange& exchange, Lock& lock);
  void match(int from, int to);
  void copy_ready(Lock& lock);
  bool copy(const Box& box, int source);
  bool copy_by_chunks(const Send& send, const Receive& receive) const;
  void queue_copy(const Box& box, int source);
  void finish(Lock& lock);
  template <class F>
  void for_each_copied(F f);
  void hold_stream();
  std::vector<int> unfinished_peers();
  void look_around(Lock& lock);
  void check_failure(Lock& lock);
  void withdraw(Lock& lock);

  std::shared_ptr<Group> group_;
  int rank_;
  TransportOptions options_;
  std::unique_ptr<DeviceCopies> copies_;  // null: memory of the host alone
  std::mutex turn_;                       // one thread of this rank at a time; taken before the group's mutex
  Exchange exchange_;                     // under way; changed with the group's mutex held
  bool held_ = true;                      // its stream waits for its copies
  Frame at_;
  Vigil vigil_;
};

ThreadTransport::~ThreadTransport() {
  Lock lock(group_->mutex);
  if (self().under_way > 0 && !group_->failed) group_->fail(left_unfinished(rank_, at_));
  withdraw(lock);
  self().left = true;
  group_->wake_all();
}

void ThreadTransport::post(const Exchange& exchange) {
  check_exchange(exchange, rank_, size());
  if (copies_ == nullptr) check_host_memory(exchange, name());
  {
    const std::lock_guard turn(turn_);
    Lock lock(group_->mutex);
    begin(exchange, lock);
    for (const Send& send : exchange.sends)
      if (send.peer != rank_) sent_bytes_ += total_bytes(send.blocks);
  }
  if (options_.blocking) wait();
}

void ThreadTransport::begin(const Exchange& exchange, Lock& lock) {
  self().called = Clock::now();
  check_failure(lock);
  if (self().under_way > 0)
    throw InvalidArgument("one exchange is under way at a time; got step " + std::to_string(exchange.step) +
                          " while step " + std::to_string(at_.step) + " is not finished: call wait() first");
  hold_stream();
  exchange_ = exchange;
  std::erase_if(exchange_.sends, [](const Send& send) { return total_bytes(send.blocks) == 0; });
  std::erase_if(exchange_.receives, [](const Receive& receive) { return receive.bytes.empty(); });
  at_ = {exchange.plan, exchange.step, 0};
  const bool on_gpu = exchange.stream != nullptr;
  if (on_gpu) self().posted->record(exchange.stream);
  held_ = !on_gpu;
  self().under_way = static_cast<int>(exchange_.sends.size() + exchange_.receives.size());
  for (const Send& send : exchange_.sends) {
    Box& box = group_->box(rank_, send.peer);
    box.send = &send;
    box.sent = {{at_.plan, at_.step, total_bytes(send.blocks)}, on_gpu};
    match(rank_, send.peer);
  }
  for (const Receive& receive : exchange_.receives) {
    Box& box = group_->box(receive.peer, rank_);
    box.receive = &receive;
    box.expected = {{at_.plan, at_.step, static_cast<std::int64_t>(receive.bytes.size())}, on_gpu};
    match(receive.peer, rank_);
  }
  check_failure(lock);
}

void ThreadTransport::match(int from, int to) {
  const Box& box = group_->box(from, to);
  if (box.send == nullptr || box.receive == nullptr) return;
  if (box.sent.frame != box.expected.frame)
    return group_->fail(disagreement(from, box.sent.frame, to, box.expected.frame));
  if (box.sent.on_gpu != box.expected.on_gpu) return group_->fail(disagreement_on_memory(from, box.sent.frame, to));
  Member& receiver = group_->member(to);
  receiver.ready.push_back(from);
  receiver.has_news = true;
  receiver.news.notify_all();
}

bool ThreadTransport::poll() {
  self().called = Clock::now();
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn) return false;  // another thread of this rank is at it
  const bool told_to_stop = options_.stop != nullptr && *options_.stop;
  if (self().has_news || told_to_stop) {
    Lock lock(group_->mutex);
    check_failure(lock);
    copy_ready(lock);
  }
  return self().under_way == 0;
}

void ThreadTransport::wait() {
  const std::lock_guard turn(turn_);
  {
    Lock lock(group_->mutex);
    finish(lock);
  }
  hold_stream();
  if (options_.blocking && exchange_.stream != nullptr) for_each_copied([](DeviceEvent& copied) { copied.wait(); });
}

void ThreadTransport::finish(Lock& lock) {
  const auto slice =
      std::clamp<Clock::duration>(options_.timeout / 16, std::chrono::milliseconds(1), std::chrono::milliseconds(100));
  vigil_.begin(Clock::now());
  for (;;) {
    check_failure(lock);
    copy_ready(lock);
    const int under_way = self().under_way;
    if (under_way == 0) break;
    look_around(lock);
    self().news.wait_for(lock, slice, [&] { return self().has_news || self().under_way < under_way; });
    if (self().under_way < under_way) vigil_.moved(Clock::now());
  }
  self().report = {.step = at_.step};
  self().called = Clock::now();
}

void ThreadTransport::copy_ready(Lock& lock) {
  while (!self().ready.empty()) {
    const int source = self().ready.back();
    self().ready.pop_back();
    Box& box = group_->box(source, rank_);
    box.copying = true;
    lock.unlock();
    const bool whole = copy(box, source);
    lock.lock();
    box.copying = false;
    group_->member(source).news.notify_all();
    self().news.notify_all();
    check_failure(lock);
    if (!whole) continue;
    if (source != rank_ && at_.plan != kGatherPlan) received_bytes_ += box.expected.frame.bytes;
    box.send = nullptr;
    box.receive = nullptr;
    --self().under_way;
    --group_->member(source).under_way;
    vigil_.moved(Clock::now());
  }
  self().has_news = group_->failed.load();
}

// False when the group failed meanwhile.
bool ThreadTransport::copy(const Box& box, int source) {
  if (!box.expected.on_gpu) return copy_by_chunks(*box.send, *box.receive);
  try {
    queue_copy(box, source);
    return true;
  } catch (const std::exception& error) {  // CUDA's: a GPU that has failed
    const std::lock_guard lock(group_->mutex);
    group_->fail(gave_up(rank_, at_, error.what()));
    return false;
  }
}

void ThreadTransport::queue_copy(const Box& box, int source) {
  void* const lane = copies_->lane(source);
  copies_->hold(lane, *group_->member(source).posted);
  copies_->hold(lane, *self().posted);
  copies_->gather(box.send->blocks, group_->member(source).device, box.receive->bytes.data(), source);
  box.copied->record(lane);
}

template <class F>
void ThreadTransport::for_each_copied(F f) {
  for (const Send& send : exchange_.sends) f(*group_->box(rank_, send.peer).copied);
  for (const Receive& receive : exchange_.receives) f(*group_->box(receive.peer, rank_).copied);
}

// All copies of the exchange are queued. Its stream waits for them from here on and not from when they were queued:
// what the rank has queued since then is what they move behind.
void ThreadTransport::hold_stream() {
  if (held_) return;
  held_ = true;
  for_each_copied([&](DeviceEvent& copied) { copies_->hold(exchange_.stream, copied); });
}

// False when the group failed meanwhile.
bool ThreadTransport::copy_by_chunks(const Send& send, const Receive& receive) const {
  PackCursor cursor(send.blocks);
  for (std::span left = receive.bytes; !left.empty();) {
    if (group_->failed) return false;
    const std::size_t chunk = std::min(left.size(), kChunkBytes);
    cursor.pack(left.first(chunk));
    left = left.subspan(chunk);
  }
  return true;
}

std::vector<int> ThreadTransport::unfinished_peers() {
  std::vector<int> peers;
  for (const Send& send : exchange_.sends)
    if (group_->box(rank_, send.peer).send == &send) peers.push_back(send.peer);
  for (const Receive& receive : exchange_.receives)
    if (group_->box(receive.peer, rank_).receive == &receive) peers.push_back(receive.peer);
  std::erase(peers, rank_);
  return peers;
}

// How are those that this rank waits for?
void ThreadTransport::look_around(Lock& lock) {
  const auto now = Clock::now();
  const std::vector<int> peers = unfinished_peers();
  for (const int peer : peers) {
    const Member& other = group_->member(peer);
    Report report = other.report;
    if (report.waiting) {
      report.still += now - other.reported;
      vigil_.hear(peer, report, now);
    } else {
      vigil_.hear(peer, report, other.called);
    }
    if (other.left) vigil_.leave(peer);
  }
  self().report = vigil_.report(peers, at_.step, now);
  self().reported = now;

  const Vigil::Verdict verdict = vigil_.judge(peers, now);
  if (verdict.finding == Vigil::Finding::patience) return;
  const std::string text = describe(verdict, vigil_.last_report(verdict.peer), rank_, at_, options_.timeout);
  if (verdict.finding != Vigil::Finding::slow) return group_->fail(text);
  if (!options_.warn) return;
  lock.unlock();
  options_.warn(text);
  lock.lock();
}

void ThreadTransport::check_failure(Lock& lock) {
  if (options_.stop != nullptr && *options_.stop) group_->fail(told_to_stop(rank_, at_, unfinished_peers()));
  if (!group_->failed) return;
  withdraw(lock);
  throw TransportError(group_->failure);
}

// Takes everything of this rank out of the boxes. Nobody begins to copy in a group that has failed.
void ThreadTransport::withdraw(Lock& lock) {
  const auto leave_box = [&](Box& box, auto item, const auto* own) {
    self().news.wait(lock, [&] { return !box.copying; });
    if (box.*item == own) box.*item = nullptr;
  };
  for (const Send& send : exchange_.sends) leave_box(group_->box(rank_, send.peer), &Box::send, &send);
  for (const Receive& receive : exchange_.receives)
    leave_box(group_->box(receive.peer, rank_), &Box::receive, &receive);
  self().under_way = 0;
  if (copies_ == nullptr || !group_->failed) return;
  lock.unlock();
  for (int peer = 0; peer < size(); ++peer) {  // earlier exchanges may be under way on GPUs too
    wait_for_copy(*group_->box(rank_, peer).copied);
    wait_for_copy(*group_->box(peer, rank_).copied);
  }
  lock.lock();
}

std::vector<std::string> ThreadTransport::all_gather(const std::string& text) {
  const std::lock_guard turn(turn_);
  return gather_texts(rank_, size(), text, [this](const Exchange& round) {
    Lock lock(group_->mutex);
    begin(round, lock);
    finish(lock);
  });
}

void ThreadTransport::abort(const std::string& reason) noexcept {
  Lock lock(group_->mutex);
  try {
    group_->fail(gave_up(rank_, at_, reason));
  } catch (...) {  // no memory for the text: the short form fits into a string as it is
    group_->fail("gave up");
  }
  withdraw(lock);
}

}  // namespace

std::vector<std::unique_ptr<Transport>> make_thread_group(int size, const TransportOptions& options) {
  if (size < 1) throw InvalidArgument("a group has 1 rank or more; got " + std::to_string(size));
  const auto group = std::make_shared<Group>(size);
  std::vector<std::unique_ptr<Transport>> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<ThreadTransport>(group, rank, options));
  return ranks;
}

std::vector<std::unique_ptr<Transport>> make_thread_group(std::vector<std::unique_ptr<DeviceCopies>> copies,
                                                          const TransportOptions& options) {
  const int size = static_cast<int>(copies.size());
  if (size < 1) throw InvalidArgument("a group has 1 rank or more; got 0 devices");
  const auto group = std::make_shared<Group>(size);
  for (int rank = 0; rank < size; ++rank) {
    DeviceCopies& own = *copies[static_cast<std::size_t>(rank)];
    group->member(rank).device = own.device();
    group->member(rank).posted = own.event();
    for (int from = 0; from < size; ++from) {
      own.reach(copies[static_cast<std::size_t>(from)]->device());
      group->box(from, rank).copied = own.event();
    }
  }
  std::vector<std::unique_ptr<Transport>> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(
        std::make_unique<ThreadTransport>(group, rank, options, std::move(copies[static_cast<std::size_t>(rank)])));
  return ranks;
}

}  // namespace annulus
