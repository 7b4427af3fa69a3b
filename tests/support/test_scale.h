// How much of the long lists of fixed cases a run takes: ANNULUS_TEST_SCALE, from 0 to 1. RapidCheck has RC_PARAMS for
// its properties.
//
// A sanitizer makes the kernels many times slower and finds in any case what it can find, so its default is a part of
// them.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace annulus::support {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr double kDefaultScale = 0.15;
#else
inline constexpr double kDefaultScale = 1.0;
#endif

inline double test_scale() {
  const char* text = std::getenv("ANNULUS_TEST_SCALE");
  return text == nullptr || *text == '\0' ? kDefaultScale : std::atof(text);
}

// Whether case `index` of a list is taken: evenly spread, and the first one always.
inline bool is_taken(std::int64_t index) {
  const double scale = test_scale();
  const auto taken_before = [scale](std::int64_t i) {
    return static_cast<std::int64_t>(static_cast<double>(i) * scale);
  };
  return index == 0 || taken_before(index) != taken_before(index - 1);
}

}  // namespace annulus::support
