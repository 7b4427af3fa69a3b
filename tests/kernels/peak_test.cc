// The yardstick measures something, for every instruction set and type. How much is the machine's business.
#include "kernels/peak.h"

#include <cmath>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "support/refusal.h"

namespace annulus {
namespace {

TEST(Peak, IsAPositiveNumberOfANamedInstruction) {
  for (const std::string& instruction_set : instruction_sets())
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      const Peak peak = measure_peak(instruction_set, dtype, 1);
      EXPECT_TRUE(std::isfinite(peak.flop_per_s) && peak.flop_per_s > 1e6) << instruction_set << " " << peak.flop_per_s;
      EXPECT_EQ(peak.instruction.find(instruction_set), 0u) << peak.instruction;
      EXPECT_TRUE(dtype == DType::bf16 || peak.instruction.find("fp32 FMA") != std::string::npos) << peak.instruction;
    }
}

TEST(Peak, OfSeveralThreads) { EXPECT_GT(measure_peak("auto", DType::fp32, 3).flop_per_s, 0); }

TEST(Peak, RefusesAnUnknownInstructionSet) {
  support::expect_refused([] { measure_peak("mmx", DType::fp32, 1); },
                          {"instruction set", "mmx", instruction_sets().back()});
}

}  // namespace
}  // namespace annulus
