// As GoogleTest's own, but for how much is tested where nobody says: lanes that are fibers are slow.
#include <gtest/gtest.h>

#include <cstdlib>

#if defined(__SANITIZE_THREAD__)
// The machine's own lists and scratch memory, which lanes share by its rules: seen through memmove and operator delete,
// which are always watched.
extern "C" const char* __tsan_default_suppressions() {
  return "race:annulus::machine::multiply\nrace:__relocate_a_1\nrace:__copy_m\nrace:operator delete\n";
}
#endif

int main(int argc, char** argv) {
#if defined(__SANITIZE_ADDRESS__)
  setenv("ANNULUS_TEST_SCALE", "0.01", 0);
#else
  setenv("ANNULUS_TEST_SCALE", "0.1", 0);
#endif
  setenv("RC_PARAMS", "max_success=3", 0);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
