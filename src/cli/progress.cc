#include "cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace annulus::cli {
namespace {

constexpr std::int64_t kEveryStepShown = 40;  // longer jobs show a line now and then
constexpr auto kBarPause = std::chrono::milliseconds(50);
constexpr auto kLinePause = std::chrono::seconds(10);
constexpr std::int64_t kBarCells = 24;

std::size_t terminal_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(bool quiet, std::int64_t steps) : steps_(steps) {
  if (!quiet) mode_ = isatty(STDERR_FILENO) == 1 ? Mode::bar : Mode::lines;
}

Progress::~Progress() { wipe(); }

void Progress::step(const std::string& what) {
  ++begun_;
  if (mode_ == Mode::none) return;
  const auto now = Clock::now();
  const bool many = steps_ > kEveryStepShown;
  const auto pause = mode_ == Mode::bar ? Clock::duration(kBarPause) : Clock::duration(kLinePause);
  if (many && begun_ > 1 && now - last_ < pause) return;
  last_ = now;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - start_).count();
  const std::string count = std::to_string(begun_) + "/" + std::to_string(steps_);
  if (mode_ == Mode::lines) {
    std::fprintf(stderr, "annulus: %s %s (%lld s)\n", count.c_str(), what.c_str(), static_cast<long long>(seconds));
    return;
  }
  const std::int64_t full =
      std::clamp<std::int64_t>((begun_ - 1) * kBarCells / std::max<std::int64_t>(steps_, 1), 0, kBarCells);
  std::string bar;
  for (std::int64_t cell = 0; cell < kBarCells; ++cell) bar += cell < full ? "█" : "░";
  std::string text = " " + count + " " + what + " (" + std::to_string(seconds) + " s)";
  const std::size_t room = terminal_columns() - std::min<std::size_t>(terminal_columns(), kBarCells + 1);
  if (text.size() > room) text.resize(room);
  std::fprintf(stderr, "\r\x1b[K%s%s", bar.c_str(), text.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::wipe() {
  if (drawn_) std::fprintf(stderr, "\r\x1b[K");
  drawn_ = false;
}

}  // namespace annulus::cli
