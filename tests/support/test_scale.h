// How much of the long lists of fixed cases a run takes: ANNULUS_TEST_SCALE, from 0 to 1. RapidCheck has RC_PARAMS for
// its properties.
//
// A sanitizer makes the kernels many times slower and finds in any case what it can find, so its default is a part of
// them.
#pragma once

#include <algorithm>
#include <cmath>
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

// Whether case `index` of a list is taken: the first one always, the others evenly spread, by multiples of the golden
// ratio. (Every 20th case, say, would be the same in all inner loops of 2, 4 or 5.) `least`: where cases are cheap,
// more.
inline bool is_taken(std::int64_t index, double least = 0) {
  const double place = static_cast<double>(index) * 0.6180339887498949;
  return index == 0 || place - std::floor(place) < std::max(test_scale(), least);
}

}  // namespace annulus::support
