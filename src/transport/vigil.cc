#include "transport/vigil.h"

#include <algorithm>

namespace annulus {

Vigil::Vigil(int size, Duration timeout) : timeout_(timeout), peers_(static_cast<std::size_t>(size)) {}

void Vigil::begin(Time now) {
  began_ = now;
  moved_ = now;
}

void Vigil::moved(Time now) { moved_ = now; }

void Vigil::hear(int peer, Time when) { of(peer).heard = std::max(of(peer).heard, when); }

void Vigil::hear(int peer, const Report& report, Time when) {
  hear(peer, when);
  Peer& p = of(peer);
  p.report = report;
  p.reported = std::max(p.reported, when);
  p.stirred = std::max(p.stirred, when - report.still);
  p.asked = false;
}

void Vigil::leave(int peer) { of(peer).left = true; }

bool Vigil::ask(int peer, Time now) {
  Peer& p = of(peer);
  const bool rests = now - std::max(moved_, p.reported) >= timeout_ / 8;
  if (p.asked || !(rests || silence(peer, now) >= timeout_ / 8)) return false;
  p.asked = true;
  return true;
}

// Before it waited, this rank did not listen: silence counts from then on.
Vigil::Duration Vigil::silence(int peer, Time now) const { return now - std::max(began_, of(peer).heard); }

Vigil::Duration Vigil::still(std::span<const int> peers, Time now) const {
  Time last = moved_;
  for (const int peer : peers) last = std::max(last, of(peer).stirred);
  return std::max(now - last, Duration::zero());
}

Report Vigil::report(std::span<const int> peers, std::int64_t step, Time now) const {
  if (peers.empty()) return {.step = step};
  const auto longest_silent = std::ranges::max_element(peers, {}, [&](int peer) { return silence(peer, now); });
  return {.waiting = true, .waits_for = *longest_silent, .step = step, .still = still(peers, now)};
}

Vigil::Verdict Vigil::judge(std::span<const int> peers, Time now) {
  if (peers.empty()) return {};
  for (const int peer : peers)
    if (of(peer).left) return {Finding::left, peer, now - began_};
  for (const int peer : peers)
    if (silence(peer, now) >= timeout_) return {Finding::silent, peer, silence(peer, now)};
  // A quarter more than the timeout: in a chain of waiting ranks, the one at its end finds out who is silent and tells
  // the others before they get here.
  if (still(peers, now) >= timeout_ + timeout_ / 4) return {Finding::stuck, peers.front(), still(peers, now)};
  if (now - moved_ < timeout_ / 4) return {};
  for (const int peer : peers) {
    Peer& p = of(peer);
    const bool unheard = silence(peer, now) >= timeout_ / 4;
    const bool computes = !p.report.waiting && now - p.reported < timeout_ / 4;  // who waits is not to blame
    if (p.was_slow || !(unheard || computes)) continue;
    p.was_slow = true;
    return {Finding::slow, peer, now - moved_};
  }
  return {};
}

}  // namespace annulus
