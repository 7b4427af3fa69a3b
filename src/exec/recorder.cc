#include "annulus/recorder.h"

#include <cstdio>

namespace annulus {

void Recorder::add(const Event& event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
  if (events_.size() > most_) events_.pop_front();
}

std::vector<Event> Recorder::events() const {
  const std::lock_guard lock(mutex_);
  return {events_.begin(), events_.end()};
}

std::string Recorder::report() const {
  const std::vector<Event> all = events();
  if (all.empty()) return "";
  const auto ms = [](auto duration) { return std::chrono::duration<double, std::milli>(duration).count(); };
  std::string text;
  for (const Event& event : all) {
    char line[160];
    std::snprintf(line, sizeof line, "  %10.3f ms  %-8.*s exchange %lld, %lld bytes, %.3f ms\n",
                  ms(event.begin - all.back().end), static_cast<int>(event.what.size()), event.what.data(),
                  static_cast<long long>(event.exchange), static_cast<long long>(event.bytes),
                  ms(event.end - event.begin));
    text += line;
  }
  return text;
}

}  // namespace annulus
