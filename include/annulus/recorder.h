// Recorder: what a rank did last, and when. A flight recorder keeps the last few events; a trace keeps all of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

struct Event {
  std::string_view what;  // attend, wait, post, merge and so on: a literal
  std::int64_t exchange = 0;
  std::int64_t bytes = 0;
  std::chrono::steady_clock::time_point begin{};
  std::chrono::steady_clock::time_point end{};
};

class Recorder {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Recorder(std::size_t most = 64) : most_(most) {}

  // Calls f and remembers how long it took, even if it throws.
  template <class F>
  void time(std::string_view what, std::int64_t exchange, std::int64_t bytes, F f) {
    const Span span{*this, {what, exchange, bytes, Clock::now(), {}}};
    f();
  }

  std::vector<Event> events() const;
  // The last events, one a line, for people.
  std::string report() const;

 private:
  struct Span {
    Recorder& recorder;
    Event event;
    ~Span() {
      event.end = Clock::now();
      try {
        recorder.add(event);
      } catch (const std::bad_alloc&) {  // forgotten: what is going on matters more
      }
    }
  };
  void add(const Event& event);

  std::size_t most_;
  mutable std::mutex mutex_;
  std::deque<Event> events_;
};

}  // namespace annulus
