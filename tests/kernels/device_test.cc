#include "kernels/device.h"

#include <gtest/gtest.h>

#include "support/refusal.h"

namespace annulus {
namespace {

TEST(Device, Names) {
  EXPECT_FALSE(parse_device("").is_gpu);
  EXPECT_FALSE(parse_device("cpu").is_gpu);
  EXPECT_TRUE(parse_device("cuda").is_gpu);
  EXPECT_FALSE(parse_device("cuda").index.has_value());
  EXPECT_EQ(parse_device("cuda:0").index, 0);
  EXPECT_EQ(parse_device("cuda:17").index, 17);
}

TEST(Device, NothingElse) {
  for (const char* text : {"tpu", "CUDA", "cuda:", "cuda:-1", "cuda:1x", "cuda: 1", "cuda:99999999999", "cpu:0"})
    support::expect_refused([&] { parse_device(text); }, {"cpu, cuda or cuda:N", text, "leave it out"});
}

}  // namespace
}  // namespace annulus
