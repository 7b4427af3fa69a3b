#include "cli/report.h"

#include <gtest/gtest.h>

namespace annulus::cli {
namespace {

TEST(Report, TablesAreAligned) {
  EXPECT_EQ(table_text({{"name", "n"}, {"a", "100"}, {"longer", "5"}}), "name      n\na       100\nlonger    5\n");
  EXPECT_EQ(table_text({{"a", "b", "1"}, {"aa", "bb", "22"}}, 2), "a   b    1\naa  bb  22\n");
}

TEST(Report, ColumnsAreCountedNotBytes) { EXPECT_EQ(table_text({{"x", "░░"}, {"x", "abc"}}), "x   ░░\nx  abc\n"); }

TEST(Report, RaggedRowsAndTrailingBlanks) { EXPECT_EQ(table_text({{"a", "b", "c"}, {"d"}}), "a  b  c\nd\n"); }

TEST(Report, Durations) {
  EXPECT_EQ(duration_text(0.0012345), "1.23 ms");
  EXPECT_EQ(duration_text(0.5), "500.0 ms");
  EXPECT_EQ(duration_text(12.345), "12.35 s");
}

TEST(Report, Numbers) {
  EXPECT_EQ(number_text(0.000012345), "1.23e-05");
  EXPECT_EQ(number_text(187.46, 4), "187.5");
}

}  // namespace
}  // namespace annulus::cli
