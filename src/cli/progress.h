// Progress on stderr: a bar that redraws itself on a terminal, plain lines elsewhere, nothing when quiet.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace annulus::cli {

class Progress {
 public:
  Progress(bool quiet, std::int64_t steps);
  ~Progress();  // wipes the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // The next step begins now; the one before it is done.
  void step(const std::string& what);

  // Takes the bar away so that something else can be printed; the next step draws it again.
  void wipe();

 private:
  enum class Mode { none, bar, lines };
  using Clock = std::chrono::steady_clock;

  Mode mode_ = Mode::none;
  std::int64_t steps_ = 0;
  std::int64_t begun_ = 0;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = {};  // when something was last shown
};

}  // namespace annulus::cli
