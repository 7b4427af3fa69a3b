// Vigil: what a waiting rank knows of the others, and what follows from it: patience, a warning, or a verdict.
//
// Ranks report how they are: computing, or waiting for another. A rank that is heard and computes is waited for as long
// as it takes. One that is not heard for the length of the timeout is lost. And when everybody waits for somebody who
// waits, nobody computes and nothing moves: that is a plan on which the ranks disagree, and it ends too.
//
// The last needs no global view. A report says for how long the rank has known of nothing that moves; a rank that
// computes says 0, a rank that waits hands on the best it knows of those it waits for, plus the time since. Along a
// chain that ends in a computing rank the number stays small; around a circle it only grows.
//
// Pure bookkeeping: the transports bring the reports and the time.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

namespace annulus {

struct Report {
  bool waiting = false;  // inside wait(); otherwise it computes
  int waits_for = -1;    // whom, when waiting
  std::int64_t step = -1;
  std::chrono::steady_clock::duration still{};  // for how long nothing is known to have moved
};

class Vigil {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  using Duration = Clock::duration;

  Vigil(int size, Duration timeout);

  void begin(Time now);            // this rank begins to wait
  void moved(Time now);            // something that it waits for came forward
  void hear(int peer, Time when);  // a sign of life
  void hear(int peer, const Report& report, Time when);
  void leave(int peer);  // the peer has left the group for good
  // Whether it is time to ask the peer for a report: nothing moves, or this peer says nothing while others do. True
  // once, until it reports.
  bool ask(int peer, Time now);

  // What this rank, waiting for `peers`, tells others.
  Report report(std::span<const int> peers, std::int64_t step, Time now) const;

  enum class Finding { patience, slow, left, silent, stuck };
  struct Verdict {
    Finding finding = Finding::patience;
    int peer = -1;
    Duration time{};  // of silence, or of waiting
  };
  // `slow` is found once for each peer.
  Verdict judge(std::span<const int> peers, Time now);

  const Report& last_report(int peer) const { return of(peer).report; }

 private:
  struct Peer {
    Time heard{};
    Time reported{};
    Time stirred{};  // when something last moved, as far as the peer knew
    Report report;
    bool asked = false;
    bool left = false;
    bool was_slow = false;
  };

  Duration silence(int peer, Time now) const;
  Duration still(std::span<const int> peers, Time now) const;
  Peer& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& of(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }

  Duration timeout_;
  Time began_{};
  Time moved_{};
  std::vector<Peer> peers_;
};

}  // namespace annulus
