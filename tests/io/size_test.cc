#include "numeric/size.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>

#include "annulus/errors.h"
#include "io/file_image.h"

namespace annulus {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

TEST(ParseSize, ReadsDigitsAndSuffixes) {
  EXPECT_EQ(parse_size("0"), 0);
  EXPECT_EQ(parse_size("4096"), 4096);
  EXPECT_EQ(parse_size("007"), 7);
  EXPECT_EQ(parse_size("64k"), 65536);
  EXPECT_EQ(parse_size("32K"), 32768);
  EXPECT_EQ(parse_size("1M"), 1048576);
  EXPECT_EQ(parse_size("1m"), 1048576);
  for (const char* text : {"1B", "1b", "1G", "1g"}) EXPECT_EQ(parse_size(text), 1073741824) << text;
  EXPECT_EQ(parse_size("0B"), 0);
}

TEST(ParseSize, ReadsFractionsThatAreWholeInTheEnd) {
  EXPECT_EQ(parse_size("1.5k"), 1536);
  EXPECT_EQ(parse_size("0.5M"), 524288);
  EXPECT_EQ(parse_size("2.0"), 2);
  EXPECT_EQ(parse_size("2.000000"), 2);
  EXPECT_EQ(parse_size("0.0009765625k"), 1);
  EXPECT_EQ(parse_size("0.000000000931322574615478515625B"), 1);
  EXPECT_EQ(parse_size("1.999999999068677425384521484375B"), 2147483647);
}

TEST(ParseSize, RefusesFractionsThatAreNot) {
  for (const char* text : {"1.5", "1.1k", "0.3M", "0.0001k", "0.0000000001B", "0.0009765626k"}) {
    expect_error([&] { parse_size(text); }, {text, "whole number", "64k"});
  }
}

TEST(ParseSize, ReachesTheLimitAndNotBeyond) {
  EXPECT_EQ(parse_size("9223372036854775807"), kMax);
  EXPECT_EQ(parse_size("8589934591B"), (std::int64_t{8589934591} << 30));
  EXPECT_EQ(parse_size("8589934591.999999999068677425384521484375B"), kMax);
  for (const char* text : {"9223372036854775808", "18446744073709551617", "8589934592B", "9007199254740992k",
                           "99999999999999999999999999999999999999"}) {
    expect_error([&] { parse_size(text); }, {text, "at most 2^63 - 1"});
  }
}

TEST(ParseSize, RefusesJunk) {
  for (const char* text :
       {"k",  ".",    ".5k", "5.",    "5.k",   "1.2.3k", "1kk", "1kB", "1KiB", "1T",  "1 k", " 1",   "1 ",
        "+1", "0x10", "1e3", "1_000", "1'000", "1,000",  "nan", "inf", "١",    "1\n", "k1",  "1.k5", "--1"}) {
    expect_error([&] { parse_size(text); }, {"received '", "write a size such as"});
  }
  expect_error([] { parse_size(""); }, {"must not be empty"});
  expect_error([] { parse_size("-1"); }, {"must not be negative", "'-1'"});
  expect_error([] { parse_size("-0"); }, {"must not be negative"});
  expect_error([] { parse_size(std::string_view("1\0", 2)); }, {"'1?'"});
  expect_error([] { parse_size(std::string(1000, '1')); }, {"at most 64 characters", "111...'"});
}

TEST(ParseSizes, ReadsLists) {
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(parse_sizes("7"), Sizes{7});
  EXPECT_EQ(parse_sizes("2048,4k,1.5M,0"), (Sizes{2048, 4096, 1572864, 0}));
}

TEST(ParseSizes, RefusesEmptyElementsAndJunk) {
  expect_error([] { parse_sizes(""); }, {"element 1", "2048,4096"});
  expect_error([] { parse_sizes("1,"); }, {"element 2"});
  expect_error([] { parse_sizes(",1"); }, {"element 1"});
  expect_error([] { parse_sizes("1,,2"); }, {"element 2"});
  expect_error([] { parse_sizes("1, 2"); }, {"received ' 2'"});
  expect_error([] { parse_sizes("1;2"); }, {"received '1;2'"});
  expect_error([] { parse_sizes("1,-2"); }, {"must not be negative"});
}

TEST(FormatSize, IsShortWhereItIsExact) {
  EXPECT_EQ(format_size(0), "0");
  EXPECT_EQ(format_size(1000), "1000");
  EXPECT_EQ(format_size(1024), "1k");
  EXPECT_EQ(format_size(1536), "1536");
  EXPECT_EQ(format_size(65536), "64k");
  EXPECT_EQ(format_size(1048576), "1M");
  EXPECT_EQ(format_size(std::int64_t{3} << 30), "3B");
  EXPECT_EQ(format_size(kMax), "9223372036854775807");
}

TEST(FormatCount, SeparatesThousands) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(1048576), "1,048,576");
  EXPECT_EQ(format_count(-999), "-999");
  EXPECT_EQ(format_count(-123456), "-123,456");
  EXPECT_EQ(format_count(kMax), "9,223,372,036,854,775,807");
  EXPECT_EQ(format_count(kMin), "-9,223,372,036,854,775,808");
}

TEST(FormatBytes, RoundsToOneDecimal) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(1024 + 51), "1.0 KiB");
  EXPECT_EQ(format_bytes(1024 + 52), "1.1 KiB");
  EXPECT_EQ(format_bytes(3355443), "3.2 MiB");
  EXPECT_EQ(format_bytes(std::int64_t{5} << 30), "5.0 GiB");
  EXPECT_EQ(format_bytes(std::int64_t{5} << 40), "5.0 TiB");
  EXPECT_EQ(format_bytes(std::int64_t{5} << 50), "5.0 PiB");
  EXPECT_EQ(format_bytes(-2048), "-2.0 KiB");
  EXPECT_EQ(format_bytes(kMax), "8.0 EiB");
  EXPECT_EQ(format_bytes(kMin), "-8.0 EiB");
}

TEST(FormatBytes, NeverShows1024OfAUnit) {
  EXPECT_EQ(format_bytes(1024 * 1024 - 1), "1.0 MiB");
  EXPECT_EQ(format_bytes(1024 * 1024 - 52), "1023.9 KiB");
  EXPECT_EQ(format_bytes((std::int64_t{1} << 60) - 1), "1.0 EiB");
}

RC_GTEST_PROP(SizeRoundTrip, ParseReadsWhatFormatWrote, ()) {
  const auto mantissa = *rc::gen::inRange<std::int64_t>(0, std::int64_t{1} << 33);
  const auto shift = *rc::gen::inRange(0, 31);
  const std::int64_t size = mantissa << shift >> (shift == 30 ? 1 : 0);
  RC_ASSERT(parse_size(format_size(size)) == size);
  RC_ASSERT(parse_size(std::to_string(size)) == size);
}

// n / 2^10 has at most ten decimals, all of which must count.
RC_GTEST_PROP(SizeRoundTrip, FractionsAreExact, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(0, std::int64_t{1} << 40);
  std::int64_t fraction = (size % 1024) * 9765625;  // 10^10 / 2^10
  std::string digits = std::to_string(fraction);
  digits.insert(0, 10 - digits.size(), '0');
  RC_ASSERT(parse_size(std::to_string(size / 1024) + "." + digits + "k") == size);
}

}  // namespace
}  // namespace annulus
