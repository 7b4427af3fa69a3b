// An Ethernet switch in user space whose ports have a rate and a delay, for kernels whose tc cannot delay (no
// sch_netem). Needs root and /dev/net/tun.
//
//   delay_switch PREFIX PORTS GBIT MICROSECONDS
//
// Makes the network devices PREFIX1 to PREFIX<PORTS>; whoever started it moves them into namespaces once it has said
// "ready". The device of port i must have the address 02:00:00:00:00:<i>. Ends with its parent.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kLongestQueue = 50'000'000;  // ns; what would wait longer is dropped, as real switches do
constexpr std::size_t kLargestFrame = 70'000;
constexpr int kTurns = 64;  // frames of one port before the others are looked at

struct Frame {
  std::int64_t due;  // when it leaves, ns
  std::vector<char> bytes;
};

struct Port {
  int file;
  std::int64_t free_at = 0;  // when its link has sent what was given to it, ns
  std::deque<Frame> queue = {};
};

std::int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int make_device(const std::string& name) {
  const int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  if (file < 0 || ioctl(file, TUNSETIFF, &request) < 0) {
    std::perror(("delay_switch: " + name).c_str());
    std::exit(1);
  }
  return file;
}

class Switch {
 public:
  Switch(const std::string& prefix, int ports, double gbit, std::int64_t delay) : gbit_(gbit), delay_(delay) {
    for (int i = 1; i <= ports; ++i) ports_.push_back({make_device(prefix + std::to_string(i))});
  }

  [[noreturn]] void run() {
    std::vector<pollfd> polls;
    for (const Port& port : ports_) polls.push_back({port.file, POLLIN, 0});
    for (;;) {
      const std::int64_t wait = send_due();
      const timespec time{wait / 1'000'000'000, wait % 1'000'000'000};
      ppoll(polls.data(), polls.size(), wait < 0 ? nullptr : &time, nullptr);
      for (std::size_t i = 0; i < polls.size(); ++i)
        if ((polls[i].revents & POLLIN) != 0) receive(i);
    }
  }

 private:
  // Sends what is due; returns how long until the next frame is, or -1 when there is none.
  std::int64_t send_due() {
    std::int64_t wait = -1;
    for (Port& port : ports_) {
      while (!port.queue.empty() && port.queue.front().due <= now()) {
        const std::vector<char>& bytes = port.queue.front().bytes;
        static_cast<void>(write(port.file, bytes.data(), bytes.size()) < 0);  // a host that is down: the frame is lost
        port.queue.pop_front();
      }
      if (port.queue.empty()) continue;
      const std::int64_t left = std::max<std::int64_t>(0, port.queue.front().due - now());
      wait = wait < 0 ? left : std::min(wait, left);
    }
    return wait;
  }

  // The sender's own link takes its time for every frame; then the frame is under way for the delay.
  void receive(std::size_t from) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const ssize_t size = read(ports_[from].file, buffer_.data(), buffer_.size());
      if (size < 14) return;
      const std::int64_t time = now();
      Port& sender = ports_[from];
      if (sender.free_at - time > kLongestQueue) continue;
      sender.free_at =
          std::max(sender.free_at, time) + static_cast<std::int64_t>(static_cast<double>(size) * 8 / gbit_);
      const bool to_all = (buffer_[0] & 1) != 0;
      const auto to = static_cast<std::size_t>(static_cast<unsigned char>(buffer_[5])) - 1;
      for (std::size_t i = 0; i < ports_.size(); ++i)
        if (i != from && (to_all || i == to))
          deliver(ports_[i], {sender.free_at + delay_, {buffer_.begin(), buffer_.begin() + size}});
    }
  }

  // Frames of several senders meet in the order in which they arrive.
  static void deliver(Port& port, Frame frame) {
    auto place = port.queue.end();
    while (place != port.queue.begin() && std::prev(place)->due > frame.due) --place;
    port.queue.insert(place, std::move(frame));
  }

  double gbit_;
  std::int64_t delay_;
  std::vector<Port> ports_;
  std::vector<char> buffer_ = std::vector<char>(kLargestFrame);
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: delay_switch PREFIX PORTS GBIT MICROSECONDS\n");
    return 2;
  }
  prctl(PR_SET_TIMERSLACK, 1);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Switch ports(argv[1], std::atoi(argv[2]), std::atof(argv[3]), std::atoll(argv[4]) * 1000);
  std::puts("ready");
  std::fflush(stdout);
  ports.run();
}
