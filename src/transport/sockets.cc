#include "transport/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "annulus/errors.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kAnswer(500);  // of whom one knocks at

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// Small messages must not wait for each other, and a process that is started beside must not keep the connection open.
void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

// Empty where it is loopback.
std::string text_of(const sockaddr_in& address) {
  if (ntohl(address.sin_addr.s_addr) >> 24 == 127) return "";
  std::array<char, INET_ADDRSTRLEN> text{};
  inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size());
  return text.data();
}

using EndOf = int (*)(int, sockaddr*, socklen_t*);

sockaddr_in end_of(int fd, EndOf which) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  which(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return address;
}

sockaddr_in own_end(int fd) { return end_of(fd, getsockname); }

// Who knocks at a port of its own machine where nobody listens yet may be given that very port to knock from, and then
// TCP connects it to itself.
bool is_own_other_end(int fd) {
  const sockaddr_in own = own_end(fd), other = end_of(fd, getpeername);
  return own.sin_port == other.sin_port && own.sin_addr.s_addr == other.sin_addr.s_addr;
}

// Waiting does not help.
void check_open_files() {
  if (errno == EMFILE || errno == ENFILE)
    throw TransportError(std::string("every rank has a connection to every other, which is an open file; got ") +
                         std::strerror(errno) + ": raise the limit (ulimit -n)");
}

// Its port may be one that another of this machine has left, or knocks from.
Socket new_socket() {
  Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  if (!socket.is_open()) {
    check_open_files();
    throw TransportError(std::string("ranks that meet speak TCP over IPv4; the system gave no socket for it: ") +
                         std::strerror(errno));
  }
  prepare(socket.fd());
  const int on = 1;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  return socket;
}

}  // namespace

std::string own_host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return addresses;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    const std::string text = text_of(*reinterpret_cast<const sockaddr_in*>(each->ifa_addr));
    if (!text.empty()) addresses.push_back(text);
  }
  freeifaddrs(all);
  return addresses;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Socket Socket::listening(std::uint16_t port) {
  Socket socket = new_socket();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  if (bind(socket.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(socket.fd_, 1024) != 0)
    throw TransportError("a rendezvous listens on a port that is free; got port " + std::to_string(port) + ", " +
                         std::strerror(errno) + ": name another one");
  return socket;
}

std::uint16_t Socket::port() const { return ntohs(own_end(fd_).sin_port); }
std::string Socket::own_address() const { return text_of(own_end(fd_)); }

Socket Socket::connected(const HostPort& to, Deadline deadline, std::string& why) {
  const std::string host = to.host == own_host() ? "127.0.0.1" : to.host;
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  do {
    addrinfo* found = nullptr;
    const int status = getaddrinfo(host.c_str(), std::to_string(to.port).c_str(), &hints, &found);
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(found, freeaddrinfo);
    if (status != 0) why = to.host + ": " + gai_strerror(status);
    // Each has its own time: neither a slow look-up nor a silent address is the next one's fault.
    for (const addrinfo* each = all.get(); each != nullptr; each = each->ai_next) {
      Socket socket = new_socket();
      const int error = socket.connect_error(*each, Clock::now() + kAnswer);
      if (error == 0 && !is_own_other_end(socket.fd_)) return socket;
      why = to.host + ":" + std::to_string(to.port) + ": " + std::strerror(error == 0 ? ECONNREFUSED : error);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (Clock::now() < deadline);
  return {};
}

// 0: it is connected.
int Socket::connect_error(const addrinfo& to, Deadline deadline) const {
  if (connect(fd_, to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  int error = 0;
  socklen_t size = sizeof error;
  if (!wait_for(POLLOUT, deadline)) return ETIMEDOUT;
  return getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

Socket Socket::accepted(Deadline deadline) const {
  while (wait_for(POLLIN, deadline)) {
    Socket socket(accept(fd_, nullptr, nullptr));
    if (!socket.is_open()) {
      check_open_files();
      continue;
    }
    prepare(socket.fd_);
    return socket;
  }
  return {};
}

bool Socket::wait_for(short events, Deadline deadline) const {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    pollfd waiting{fd_, events, 0};
    if (::poll(&waiting, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 1000))) > 0) return true;
  }
}

bool Socket::can_read(Deadline deadline) const { return wait_for(POLLIN, deadline); }

std::int64_t Socket::write_some(std::span<const std::byte> bytes) {
  const auto count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  return count >= 0 ? count : would_block() ? 0 : -1;
}

std::int64_t Socket::read_some(std::span<std::byte> bytes) {
  const auto count = recv(fd_, bytes.data(), bytes.size(), 0);
  if (count > 0) return count;
  return count < 0 && would_block() ? 0 : -1;
}

std::int64_t Socket::unacknowledged_bytes() const {
  int bytes = 0;
  return is_open() && ioctl(fd_, TIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

void Socket::end_writing() {
  if (is_open()) shutdown(fd_, SHUT_WR);
}

bool Socket::write_all(std::span<const std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const std::int64_t count = write_some(bytes);
    if (count < 0 || (count == 0 && !wait_for(POLLOUT, deadline))) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

bool Socket::read_all(std::span<std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const std::int64_t count = read_some(bytes);
    if (count < 0 || (count == 0 && !wait_for(POLLIN, deadline))) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

}  // namespace annulus
