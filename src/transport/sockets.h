// TCP as far as a rendezvous needs it: owned sockets, and reads and writes that end by a deadline.
#pragma once

#include <netdb.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace annulus {

using Deadline = std::chrono::steady_clock::time_point;

struct HostPort {
  std::string host;  // a name; this machine's own is reached without asking anybody
  std::uint16_t port = 0;
};

std::string own_host();
std::vector<std::string> own_addresses();  // under which others may reach this machine, as numbers; not loopback

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  static Socket listening(std::uint16_t port);  // 0: any; throws TransportError where it is taken
  // Tries all addresses of the name, again and again until the deadline; then !is_open(), and `why` says what came
  // between.
  static Socket connected(const HostPort& to, Deadline, std::string& why);
  Socket accepted(Deadline) const;  // !is_open() at the deadline

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  std::uint16_t port() const;
  std::string own_address() const;  // of this end, as numbers; empty where it is loopback

  bool can_read(Deadline) const;                               // or the other end is gone; false at the deadline
  bool write_all(std::span<const std::byte> bytes, Deadline);  // false: closed, or too late
  bool read_all(std::span<std::byte> bytes, Deadline);

  // Without waiting: bytes moved, 0 when none can, -1 when the other end is gone.
  std::int64_t write_some(std::span<const std::byte> bytes);
  std::int64_t read_some(std::span<std::byte> bytes);
  void end_writing();                         // the other end reads what is on its way, and then the end
  std::int64_t unacknowledged_bytes() const;  // written, and not yet with the other end's system

 private:
  bool wait_for(short events, Deadline) const;
  int connect_error(const addrinfo& to, Deadline) const;
  int fd_ = -1;
};

}  // namespace annulus
