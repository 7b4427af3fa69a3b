// What the ranks of a thread group share: a box for every ordered pair of ranks, and a desk for every rank.
//
// The sender lays its send into the box, the receiver its receive; whoever comes second compares the two, and the
// receiver copies when it next polls or waits. All of it is guarded by one mutex a group, but for the copying itself; a
// message is thousands of rows, so the mutex is hardly ever contended.
//
// GPU memory takes the same way, but nobody waits for a copy: the receiver queues it behind the `posted` events of
// both ranks, and both ranks' streams go on behind the box's `copied`. An event is recorded anew only when the next
// message goes through the same box, and by then both streams wait for the last one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/device_copies.h"
#include "transport/trouble.h"
#include "transport/vigil.h"

namespace annulus {

struct Box {
  struct End {  // of the sender, or of the receiver
    Frame frame;
    bool on_gpu = false;
  };

  const Send* send = nullptr;  // both are members of their ranks' exchanges under way
  const Receive* receive = nullptr;
  End sent, expected;
  bool copying = false;
  std::unique_ptr<DeviceEvent> copied = nullptr;  // where ranks have GPUs
};

struct Member {
  using Clock = Vigil::Clock;

  std::condition_variable news;                         // for the member's own threads, with Group::mutex
  std::atomic<bool> has_news{false};                    // `ready` has something, or the group has failed
  std::atomic<int> under_way{0};                        // transfers of its exchange
  std::atomic<Clock::time_point> called{Clock::now()};  // last
  std::vector<int> ready;                               // ranks whose message lies ready to be copied
  Report report;
  Clock::time_point reported{};
  bool left = false;

  int device = -1;                                // its GPU, if it has one
  std::unique_ptr<DeviceEvent> posted = nullptr;  // its stream has come to the exchange under way
};

struct Group {
  explicit Group(int size) : members(static_cast<std::size_t>(size)), boxes(members.size() * members.size()) {}

  Member& member(int rank) { return members[static_cast<std::size_t>(rank)]; }
  Box& box(int from, int to) {
    return boxes[static_cast<std::size_t>(from) * members.size() + static_cast<std::size_t>(to)];
  }

  // The first failure is the one that everybody hears of.
  void fail(const std::string& text) {
    if (failed) return;
    failure = text;
    failed = true;
    wake_all();
  }

  void wake_all() {
    for (Member& each : members) {
      each.has_news = true;
      each.news.notify_all();
    }
  }

  std::mutex mutex;  // guards everything here, except what is atomic
  std::deque<Member> members;
  std::vector<Box> boxes;  // [from, to]
  std::atomic<bool> failed{false};
  std::string failure;
};

// Ranks with GPUs: each brings what copies to its device, with a lane for every rank.
std::vector<std::unique_ptr<Transport>> make_thread_group(std::vector<std::unique_ptr<DeviceCopies>> copies,
                                                          const TransportOptions& options);

}  // namespace annulus
