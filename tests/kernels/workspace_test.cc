// Measuring and carving are one code path: what was measured is what is used, to the byte.
#include "kernels/workspace.h"

#include <gtest/gtest.h>

#include "support/call.h"

namespace annulus {
namespace {

struct Parts {
  double* a;
  std::byte* b;
  float* c;
};

Parts carve(Carver& carver) {
  Parts parts{};
  parts.a = carver.take<double>("first", 3);
  parts.b = carver.take<std::byte>("first", Carver::kAlignment + 1);
  parts.c = carver.take<float>("second", 16);
  carver.take<float>("third", 0);
  return parts;
}

TEST(Carver, MeasuresWithoutMemory) {
  Carver carver;
  const Parts parts = carve(carver);
  EXPECT_TRUE(carver.measuring());
  EXPECT_EQ(parts.a, nullptr);
  EXPECT_EQ(parts.b, nullptr);
  EXPECT_EQ(parts.c, nullptr);
  constexpr std::int64_t kPart = Carver::kAlignment;
  EXPECT_EQ(carver.used_bytes(), kPart + 2 * kPart + kPart);
  EXPECT_EQ(carver.components(), (std::vector<MemoryComponent>{{"first", 3 * kPart}, {"second", kPart}, {"third", 0}}));
  EXPECT_EQ(total_bytes(carver.components()), carver.used_bytes());
}

TEST(Carver, CarvesWhatItMeasured) {
  Carver measure;
  carve(measure);
  support::Workspace memory(static_cast<std::size_t>(measure.used_bytes()));
  Carver carver(memory.span().data());
  const Parts parts = carve(carver);
  EXPECT_FALSE(carver.measuring());
  EXPECT_EQ(carver.used_bytes(), measure.used_bytes());
  EXPECT_EQ(carver.components(), measure.components());
  EXPECT_EQ(reinterpret_cast<std::byte*>(parts.a), memory.span().data());
  EXPECT_EQ(parts.b, memory.span().data() + Carver::kAlignment);
  EXPECT_EQ(reinterpret_cast<std::byte*>(parts.c), memory.span().data() + 3 * Carver::kAlignment);
  std::fill_n(parts.a, 3, 1.0);
  std::fill_n(parts.b, Carver::kAlignment + 1, std::byte{2});
  std::fill_n(parts.c, 16, 3.0f);
  EXPECT_TRUE(memory.guards_intact());
}

TEST(Carver, PartsOfOneNameThatLieApartStayApart) {
  Carver carver;
  carver.take<float>("tiles", 1);
  carver.take<float>("delta", 1);
  carver.take<float>("tiles", 1);
  EXPECT_EQ(carver.components().size(), 3u);
  EXPECT_EQ(total_bytes(carver.components()), 3 * Carver::kAlignment);
}

}  // namespace
}  // namespace annulus
