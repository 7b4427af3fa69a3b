#include "cli/measurement.h"

#include <gtest/gtest.h>

namespace annulus::cli {
namespace {

TEST(Measurement, MedianOfOddAndEvenCounts) {
  EXPECT_EQ((Measurement{"forward", 1, {1, 2, 9}}.median()), 2);
  EXPECT_EQ((Measurement{"forward", 1, {1, 2, 4, 9}}.median()), 3);
  EXPECT_EQ((Measurement{"forward", 1, {5}}.median()), 5);
}

TEST(Measurement, RatesOfNoWorkAreZero) {
  EXPECT_EQ((Measurement{"forward", 0, {0.5}}.rate(0.5)), 0);
  EXPECT_EQ((Measurement{"forward", 0, {0}}.rate(0)), 0);
}

TEST(Measurement, MoreThanThePeakIsRefused) {
  const Peak peak{100e9, "avx2 fp32 FMA"};
  check_plausible({"forward", 99e9, {1, 2}}, peak);
  check_plausible({"forward", 100e9, {1, 2}}, peak);
  try {
    check_plausible({"forward", 101e9, {1, 2, 3}}, peak);
    ADD_FAILURE() << "101 % of the peak was accepted";
  } catch (const AbovePeak& error) {
    const std::string message = error.what();
    for (const char* part : {"forward", "101 GFLOP/s", "avx2 fp32 FMA", "100", "nothing is reported"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace annulus::cli
