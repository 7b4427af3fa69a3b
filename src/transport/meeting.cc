#include "transport/meeting.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "annulus/errors.h"
#include "transport/trouble.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kAttempt(500);  // to reach another, before this rank looks around

// What a process says first on a connection.
struct Hello {
  static constexpr std::uint64_t kMagic = 0x616e6e756c757304;  // and the version

  std::uint64_t magic = kMagic;
  std::int32_t rank = -1;
  std::int32_t size = 0;
  std::uint32_t port = 0;  // where it listens
  char host[60] = {};      // how the others reach it; empty: it is on rank 0's host
};

struct Place {
  std::string file;  // or empty, and then
  HostPort address;  // of rank 0
};

std::optional<HostPort> parse_address(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  HostPort address{text.substr(0, colon), 0};
  if (address.host.find(':') != std::string::npos) return std::nullopt;  // IPv6
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data() + colon + 1, end, address.port);
  if (error != std::errc{} || last != end || address.port == 0) return std::nullopt;
  return address;
}

Place parse(const std::string& place) {
  if (place.starts_with("file:") && place.size() > 5) return {.file = place.substr(5), .address = {}};
  if (place.starts_with("tcp:"))
    if (const auto address = parse_address(place.substr(4))) return {.file = "", .address = *address};
  throw InvalidArgument(
      "a rendezvous is at tcp:HOST:PORT, where rank 0 listens (a name, or numbers of IPv4), or file:PATH, where all "
      "ranks see it; got '" +
      place + "'");
}

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

class Meeting {
 public:
  Meeting(int rank, int size, const TransportOptions& options)
      : rank_(rank),
        timeout_(options.timeout),
        stop_(options.stop),
        deadline_(Clock::now() + options.timeout),
        sockets_(static_cast<std::size_t>(size)) {}

  std::vector<Socket> receive_all(const Place& place);
  std::vector<Socket> go_to(const Place& place);

 private:
  int size() const { return static_cast<int>(sockets_.size()); }
  // When to look again whether to give up.
  Deadline soon(std::chrono::milliseconds time = std::chrono::milliseconds(100)) const {
    if (stop_ != nullptr && *stop_)
      throw TransportError("rank " + std::to_string(rank_) +
                           " gave up: it was told to stop while it waited for others to come to the rendezvous");
    return std::min(deadline_, Clock::now() + time);
  }
  bool is_over() const { return Clock::now() >= deadline_; }
  bool is_of_this_group(const Hello& other) const { return other.magic == Hello::kMagic && other.size == size(); }
  std::vector<HostPort> addresses_in(const std::string& file) const;
  Hello accept_one(const Socket& listener);
  std::vector<Hello> ask_rank_0(const Place& place, const Hello& own);
  bool read(Socket& from, std::span<std::byte> bytes) const;  // false: too late, or the other end is gone
  void greet(Socket& socket, const Hello& own, const std::string& whom) const;
  [[noreturn]] void missing(const std::string& whom) const {
    const std::string why = why_.empty() ? "" : " (" + why_ + ")";
    if (all_have_come_)
      throw TransportError("all ranks came to the rendezvous, but " + whom + " and rank " + std::to_string(rank_) +
                           " found no way to each other within " + seconds(timeout_) + why + ": see what " + whom +
                           " printed, and whether hosts reach each other at any port");
    throw TransportError(whom + " did not come to the rendezvous within " + seconds(timeout_) + why + ", and rank " +
                         std::to_string(rank_) + " waits: start all ranks with the same place, or give more time");
  }
  [[noreturn]] void gone(const std::string& whom) const {
    if (is_over()) missing(whom);
    throw TransportError(whom + " has left the rendezvous, and rank " + std::to_string(rank_) + " waits; see what " +
                         whom + " printed");
  }

  int rank_;
  std::chrono::milliseconds timeout_;
  const std::atomic<bool>* stop_;
  Deadline deadline_;
  std::vector<Socket> sockets_;
  bool all_have_come_ = false;
  std::string why_;  // the last attempt to reach another failed
};

// The next rank that comes and is of this group.
Hello Meeting::accept_one(const Socket& listener) {
  for (;;) {
    Socket socket = listener.accepted(soon());
    if (!socket.is_open() && !is_over()) continue;
    if (!socket.is_open()) {
      std::string absent;
      for (int peer = rank_ == 0 ? 1 : rank_ + 1; peer < size(); ++peer)
        if (!sockets_[static_cast<std::size_t>(peer)].is_open())
          absent += (absent.empty() ? "rank " : ", rank ") + std::to_string(peer);
      missing(absent);
    }
    Hello other;
    const Deadline at_once = std::min(deadline_, Clock::now() + std::chrono::seconds(2));
    if (!socket.read_all(bytes_of(other), at_once) || other.magic != Hello::kMagic) continue;  // a stranger
    if (!is_of_this_group(other) || other.rank <= rank_ || other.rank >= size() ||
        sockets_[static_cast<std::size_t>(other.rank)].is_open())
      throw TransportError("a rendezvous has each rank once, and one size; got rank " + std::to_string(other.rank) +
                           " of " + std::to_string(other.size) + " in a group of " + std::to_string(size()) +
                           ": is an old job still running at this place?");
    other.host[sizeof other.host - 1] = 0;
    sockets_[static_cast<std::size_t>(other.rank)] = std::move(socket);
    return other;
  }
}

std::vector<Socket> Meeting::receive_all(const Place& place) {
  const Socket listener = Socket::listening(place.address.port);
  if (!place.file.empty()) {  // a reader sees all of it or nothing
    const std::string draft = place.file + ".draft";
    std::ofstream stream(draft);
    stream << own_host() << ":" << listener.port() << "\n";
    for (const std::string& address : own_addresses()) stream << address << ":" << listener.port() << "\n";
    stream.close();
    std::error_code error;
    if (!stream) error.assign(errno == 0 ? EIO : errno, std::generic_category());
    if (!error) std::filesystem::rename(draft, place.file, error);
    if (error)
      throw TransportError("rank 0 writes its address into " + place.file + "; got " + error.message() +
                           ": name a file in a folder that all ranks can write to");
  }
  std::vector<Hello> all(sockets_.size());
  all.front() = {.rank = 0, .size = size()};
  for (int i = 1; i < size(); ++i) {
    const Hello other = accept_one(listener);
    all[static_cast<std::size_t>(other.rank)] = other;
  }
  // Who came by loopback is reached where this host is reached.
  std::string here = "127.0.0.1";
  for (const Socket& socket : sockets_)
    if (socket.is_open() && !socket.own_address().empty()) here = socket.own_address();
  for (Hello& each : all)
    if (each.host[0] == 0) here.copy(each.host, sizeof each.host - 1);
  for (int peer = 1; peer < size(); ++peer)
    if (!sockets_[static_cast<std::size_t>(peer)].write_all(std::as_bytes(std::span(all)), deadline_))
      gone("rank " + std::to_string(peer));
  if (!place.file.empty()) std::filesystem::remove(place.file);
  return std::move(sockets_);
}

std::vector<Socket> Meeting::go_to(const Place& place) {
  const Socket listener = Socket::listening(0);
  const Hello own{.rank = rank_, .size = size(), .port = listener.port()};
  const std::vector<Hello> all = ask_rank_0(place, own);
  all_have_come_ = true;
  for (int peer = 1; peer < rank_; ++peer) {
    const Hello& other = all[static_cast<std::size_t>(peer)];
    Socket& socket = sockets_[static_cast<std::size_t>(peer)];
    while (!socket.is_open() && !is_over())
      socket = Socket::connected({other.host, static_cast<std::uint16_t>(other.port)}, soon(kAttempt), why_);
    greet(socket, own, "rank " + std::to_string(peer));
  }
  why_.clear();
  for (int peer = rank_ + 1; peer < size(); ++peer) accept_one(listener);
  return std::move(sockets_);
}

// Who is where, when all have come.
std::vector<Hello> Meeting::ask_rank_0(const Place& place, const Hello& own) {
  Socket& first = sockets_.front();
  do {  // a file may be an earlier job's, until rank 0 has written its own
    for (const HostPort& address : place.file.empty() ? std::vector{place.address} : addresses_in(place.file))
      if (!first.is_open()) first = Socket::connected(address, soon(kAttempt), why_);
  } while (!first.is_open() && !is_over());
  Hello from_outside = own;
  if (first.is_open()) first.own_address().copy(from_outside.host, sizeof own.host - 1);
  greet(first, from_outside, "rank 0");
  why_.clear();
  std::vector<Hello> all(sockets_.size());
  for (int rank = 0; rank < size(); ++rank) {
    Hello& each = all[static_cast<std::size_t>(rank)];
    if (!read(first, bytes_of(each))) {
      if (is_over()) missing("rank 0, or one that it waits for,");
      gone("rank 0");
    }
    each.host[sizeof each.host - 1] = 0;
    if (!is_of_this_group(each) || each.rank != rank)
      throw TransportError("at a rendezvous rank 0 of the group answers; rank " + std::to_string(rank_) +
                           " got something else from there: name another place, or remove the file of an earlier job");
  }
  return all;
}

void Meeting::greet(Socket& socket, const Hello& own, const std::string& whom) const {
  if (!socket.is_open()) missing(whom);
  if (!socket.write_all(std::as_bytes(std::span(&own, 1)), deadline_)) gone(whom);
}

bool Meeting::read(Socket& from, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const std::int64_t count = from.read_some(bytes);
    if (count < 0 || (count == 0 && !from.can_read(soon()) && is_over())) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

// Of rank 0: its name, and its numbers for those who do not know the name.
std::vector<HostPort> Meeting::addresses_in(const std::string& file) const {
  for (; !is_over(); std::this_thread::sleep_until(std::min(soon(), Clock::now() + std::chrono::milliseconds(10)))) {
    std::vector<HostPort> addresses;
    std::ifstream stream(file);
    for (std::string line; std::getline(stream, line);)
      if (const auto address = parse_address(line)) addresses.push_back(*address);
    if (!addresses.empty()) return addresses;
  }
  missing("rank 0");
}

}  // namespace

void check_place(const std::string& place) { (void)parse(place); }

std::vector<Socket> meet(int rank, int size, const std::string& place, const TransportOptions& options) {
  const Place parsed = parse(place);
  if (size == 1) return std::vector<Socket>(1);
  Meeting meeting(rank, size, options);
  return rank == 0 ? meeting.receive_all(parsed) : meeting.go_to(parsed);
}

}  // namespace annulus
