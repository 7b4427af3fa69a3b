#include "transport/trouble.h"

#include <algorithm>
#include <cstdio>

namespace annulus {
namespace {

std::string name(int rank) { return "rank " + std::to_string(rank); }

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string frame_text(const Frame& frame) {
  const std::string message = std::to_string(frame.bytes) + " bytes " + place(frame);
  return frame.plan == kGatherPlan ? message : message + " of plan " + hex(frame.plan);
}

// Bytes to and from each peer; a peer that is named twice is refused.
template <class Items, class Bytes>
void check_peers(const Items& items, const char* what, int size, Bytes bytes_of) {
  std::vector<bool> seen(static_cast<std::size_t>(size));
  for (const auto& item : items) {
    if (item.peer < 0 || item.peer >= size)
      throw InvalidArgument("a " + std::string(what) + " names a rank of the group, 0 to " + std::to_string(size - 1) +
                            "; got rank " + std::to_string(item.peer));
    if (bytes_of(item) < 0)
      throw InvalidArgument("a " + std::string(what) + " has 0 bytes or more; got " + std::to_string(bytes_of(item)) +
                            " for rank " + std::to_string(item.peer));
    if (seen[static_cast<std::size_t>(item.peer)])
      throw InvalidArgument("an exchange has at most one " + std::string(what) + " a peer; got two for rank " +
                            std::to_string(item.peer) + ": make one of them");
    seen[static_cast<std::size_t>(item.peer)] = true;
  }
}

}  // namespace

std::string place(const Frame& at) {
  if (at.step < 0) return "before the first step";
  if (at.plan == kGatherPlan) return "while texts are gathered, round " + std::to_string(at.step);
  return "at step " + std::to_string(at.step);
}

std::string seconds(std::chrono::steady_clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(duration).count());
  return text;
}

std::string disagreement(int sender, const Frame& sent, int receiver, const Frame& expected) {
  return name(sender) + " and " + name(receiver) + " disagree: " + name(sender) + " sends " + frame_text(sent) + ", " +
         name(receiver) + " expects " + frame_text(expected) +
         "; all ranks must run the same plan: start them with the same problem and options";
}

std::string disagreement_on_memory(int sender, const Frame& sent, int receiver) {
  return name(sender) + " and " + name(receiver) + " disagree " + place(sent) +
         " on where memory lies: one has it on a GPU, the other on the host; start all ranks with the same device";
}

std::string gave_up(int rank, const Frame& at, const std::string& reason) {
  return name(rank) + " gave up " + place(at) + ": " + reason;
}

// Whoever told it to stop may have done so because of one of those that it waits for: mpirun does when a rank is
// killed.
std::string told_to_stop(int rank, const Frame& at, std::vector<int> waits_for) {
  std::ranges::sort(waits_for);
  const auto [end, last] = std::ranges::unique(waits_for);
  waits_for.erase(end, last);
  std::string reason = "it was told to stop";
  for (std::size_t i = 0; i < waits_for.size(); ++i)
    reason += (i == 0 ? " while it waited for " : " and ") + name(waits_for[i]);
  return gave_up(rank, at, reason);
}

std::string left_unfinished(int rank, const Frame& at) {
  return name(rank) + " left the group with transfers under way " + place(at) + "; see what it printed";
}

std::string describe(const Vigil::Verdict& verdict, const Report& report, int rank, const Frame& at,
                     std::chrono::milliseconds timeout) {
  const std::string peer = name(verdict.peer);
  const std::string waits = name(rank) + " waits for it " + place(at);
  switch (verdict.finding) {
    case Vigil::Finding::patience:
      return "";
    case Vigil::Finding::slow:
      return peer + " is slow: " + name(rank) + " has waited for it for " + seconds(verdict.time) + " " + place(at) +
             "; it counts as lost after " + seconds(timeout) + " without a sign of life";
    case Vigil::Finding::left:
      return peer + " has left the group, and " + waits + "; see what " + peer + " printed";
    case Vigil::Finding::silent:
      return peer + " is lost: no sign of life for " + seconds(verdict.time) + ", and " + waits + "; see what " + peer +
             " printed, or give a timeout longer than " + seconds(timeout) + " if it is only slow";
    case Vigil::Finding::stuck:
      break;
  }
  const std::string next = report.waiting ? ", which waits for " + name(report.waits_for) : "";
  return "nothing has moved for " + seconds(verdict.time) + ": " + name(rank) + " waits for " + peer + " " + place(at) +
         next + "; all ranks must run the same plan: start them with the same problem and options";
}

void check_rank(int rank, int size) {
  if (rank >= 0 && rank < size) return;
  throw InvalidArgument("a rank lies in [0, size) of its group; got rank " + std::to_string(rank) + " of " +
                        std::to_string(size) + ": give the rank of this process");
}

void check_exchange(const Exchange& exchange, int rank, int size) {
  if (exchange.step < 0)
    throw InvalidArgument("steps count from 0; got an exchange for step " + std::to_string(exchange.step));
  const auto sent = [](const Send& send) { return total_bytes(send.blocks); };
  const auto received = [](const Receive& receive) { return static_cast<std::int64_t>(receive.bytes.size()); };
  check_peers(exchange.sends, "send", size, sent);
  check_peers(exchange.receives, "receive", size, received);
  Frame to_itself{exchange.plan, exchange.step, 0}, from_itself = to_itself;
  for (const Send& send : exchange.sends)
    if (send.peer == rank) to_itself.bytes = sent(send);
  for (const Receive& receive : exchange.receives)
    if (receive.peer == rank) from_itself.bytes = received(receive);
  if (to_itself != from_itself) throw InvalidArgument(disagreement(rank, to_itself, rank, from_itself));
}

void check_host_memory(const Exchange& exchange, std::string_view transport) {
  if (exchange.stream == nullptr) return;
  throw InvalidArgument("the transport " + std::string(transport) +
                        " moves memory of the host; got a CUDA stream at step " + std::to_string(exchange.step) +
                        ": make a transport of device_transports.h");
}

}  // namespace annulus
