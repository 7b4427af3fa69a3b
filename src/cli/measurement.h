// Times of one pass, what they mean as a rate, and when such a rate cannot be true.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/peak.h"

namespace annulus::cli {

inline constexpr std::int64_t kMaxRounds = 1'000'000;
inline constexpr double kPeakEvery = 0.05;  // seconds of rounds

struct Measurement {
  std::string pass;
  double flop = 0;
  std::vector<double> seconds;  // sorted, at least one

  double best() const { return seconds.front(); }
  double worst() const { return seconds.back(); }
  double median() const;
  double rate(double time) const { return time > 0 ? flop / time : 0; }  // FLOP/s
};

class AbovePeak : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A rate above the peak means that one of the two is wrong: throws AbovePeak, so that neither is printed.
void check_plausible(const Measurement& measurement, const Peak& peak);

}  // namespace annulus::cli
