// As GoogleTest's own, but for how much is tested where nobody says: pretend GPUs are slow.
#include <gtest/gtest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  setenv("ANNULUS_TEST_SCALE", "0.1", 0);
  setenv("RC_PARAMS", "max_success=10", 0);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
