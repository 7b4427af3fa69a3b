#include <gtest/gtest.h>

#include "transport/cuda/gpu_copy.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return GTEST_FLAG_GET(list_tests) ? RUN_ALL_TESTS() : annulus::run_on_gpu([] { return RUN_ALL_TESTS(); });
}
