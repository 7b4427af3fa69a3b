// Wrong files: each rule of the format broken in turn, then files cut and bent at every byte.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "io/file_image.h"
#include "io/safetensors.h"

namespace annulus {
namespace {

struct HostileFile {
  std::string name;
  std::string image;
  std::string message;  // what the error must say
};

std::ostream& operator<<(std::ostream& out, const HostileFile& file) { return out << file.name; }

// A header with data behind it.
HostileFile hostile(std::string name, std::string_view header, std::string_view data, std::string message) {
  return {std::move(name), safetensors_image(header, data), std::move(message)};
}

// {"a":{"dtype":"U8","shape":SHAPE,"data_offsets":OFFSETS}} with one byte of data.
HostileFile numbers(std::string name, std::string_view shape, std::string_view offsets, std::string message) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":)" + std::string(shape) + R"(,"data_offsets":)" + std::string(offsets) + "}}";
  return hostile(std::move(name), header, "z", std::move(message));
}

// {"a":ENTRY} with one byte of data.
HostileFile entry(std::string name, std::string_view value, std::string message) {
  return hostile(std::move(name), R"({"a":)" + std::string(value) + "}", "z", std::move(message));
}

// A key with this text between its quotes; no data.
HostileFile text(std::string name, std::string_view key, std::string message) {
  return hostile(std::move(name), "{\"" + std::string(key) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                 "", std::move(message));
}

std::vector<HostileFile> frames() {
  const std::string one = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  return {
      {"EmptyFile", "", "8 bytes of header length"},
      {"SevenBytes", std::string(7, '\0'), "a file of 7 bytes"},
      {"NoHeader", std::string(8, '\0'), "must begin with '{'"},
      {"LengthBeyondFile", little_endian(3, 8) + "{}", "inside the file"},
      {"LengthBeyondCap", little_endian(100'000'001, 8) + "{}", "at most 100000000 bytes"},
      {"LengthOfAllOnes", std::string(8, '\xff') + "{}", "received 18446744073709551615"},
      {"LengthThatWraps", little_endian(0xfffffffffffffff8, 8) + "{}", "at most 100000000 bytes"},
      hostile("BlankBeforeBrace", " {}", "", "must begin with '{'"),
      hostile("ByteOrderMark", "\xef\xbb\xbf{}", "", "must begin with '{'"),
      hostile("Array", "[]", "", "must begin with '{'"),
      hostile("OpenBrace", "{", "", "the end of the header"),
      hostile("OpenString", "{\"a", "", "must end before the header does"),
      hostile("OpenEscape", "{\"a\\", "", "must end before the header does"),
      hostile("OpenUnicodeEscape", "{\"a\\u00", "", "must end before the header does"),
      hostile("TrailingText", "{} x", "", "only spaces may follow"),
      hostile("TrailingNewline", "{}\n", "", "only spaces may follow"),
      hostile("TrailingZeros", std::string("{}\0", 3), "", "only spaces may follow"),
      hostile("SecondObject", "{}{}", "", "only spaces may follow"),
      hostile("TrailingComma", R"({"__metadata__":{},})", "", "a tensor's name"),
      hostile("LeadingComma", R"({,"__metadata__":{}})", "", "a tensor's name"),
      hostile("MissingComma", R"({"__metadata__":{} "a":{}})", "", "expected '}'"),
      hostile("MissingColon", R"({"a" {}})", "", "expected ':'"),
      hostile("KeyNotAString", "{1:{}}", "", "in double quotes"),
      hostile("SingleQuotes", "{'a':{}}", "", "in double quotes"),
      hostile("Comment", "{/**/}", "", "in double quotes"),
      hostile("DataWithoutTensors", "{}", "z", "cover the data section"),
      hostile("DataBehindTheLastTensor", one, "zz", "1 bytes of tensors in 2 bytes of data"),
      hostile("DataMissing", one, "", "inside the data section of 0 bytes"),
  };
}

std::vector<HostileFile> entries() {
  return {
      entry("EntryIsNull", "null", "expected '{'"),
      entry("EntryIsArray", "[]", "expected '{'"),
      entry("EntryIsEmpty", "{}", "all of dtype, shape and data_offsets"),
      entry("DeepArrays", std::string(100'000, '['), "expected '{'"),
      entry("NoDtype", R"({"shape":[1],"data_offsets":[0,1]})", "all of dtype"),
      entry("NoShape", R"({"dtype":"U8","data_offsets":[0,1]})", "all of dtype"),
      entry("NoOffsets", R"({"dtype":"U8","shape":[1]})", "all of dtype"),
      entry("UnknownKey", R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1})", "not 'x'"),
      entry("DeepUnknownKey", R"({"x":)" + std::string(100'000, '{'), "not 'x'"),
      entry("DtypeTwice", R"({"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]})", "each once"),
      entry("ShapeTwice", R"({"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]})", "each once"),
      entry("OffsetsTwice", R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]})", "each once"),
      entry("DtypeTwiceByEscape", R"({"dtype":"U8","\u0064type":"U8","shape":[1],"data_offsets":[0,1]})", "each once"),
      entry("DtypeUnknown", R"({"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]})", "one of F64, F32"),
      entry("DtypeLowerCase", R"({"dtype":"u8","shape":[1],"data_offsets":[0,1]})", "received 'u8'"),
      entry("DtypeNotAString", R"({"dtype":8,"shape":[1],"data_offsets":[0,1]})", "in double quotes"),
      entry("DtypeSteersTheTerminal", R"({"dtype":"\u001b[2J","shape":[1],"data_offsets":[0,1]})", R"('\x1b[2J')"),
      entry("DtypeTooWide", R"({"dtype":"F32","shape":[1],"data_offsets":[0,1]})", "takes 4 bytes"),
      hostile(
          "NameTwice",
          R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
          "", "'a' twice"),
      hostile(
          "NameTwiceByEscape",
          R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
          "", "'a' twice"),
      hostile("MetadataTwice", R"({"__metadata__":{},"__metadata__":{}})", "", "'__metadata__' twice"),
      hostile("MetadataKeyTwice", R"({"__metadata__":{"k":"1","k":"2"}})", "", "'k' twice"),
      hostile("MetadataNumber", R"({"__metadata__":{"k":1}})", "", "a value of __metadata__"),
      hostile("MetadataNull", R"({"__metadata__":null})", "", "expected '{'"),
      hostile("MetadataNested", R"({"__metadata__":{"k":{"k":"v"}}})", "", "a value of __metadata__"),
      hostile("MetadataIsATensor", R"({"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", "",
              "a value of __metadata__"),
  };
}

std::vector<HostileFile> ranges() {
  const auto two = [](std::string name, std::string_view first, std::string_view second, std::string message) {
    const std::string header = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + std::string(first) +
                               R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + std::string(second) + "}}";
    return hostile(std::move(name), header, "wxyz", std::move(message));
  };
  return {
      two("SameRange", "[0,2]", "[0,2]", "must not overlap"),
      two("Overlap", "[0,2]", "[1,3]", "must not overlap"),
      two("HoleInFront", "[1,3]", "[3,5]", "inside the data section"),
      two("HoleAtZero", "[2,4]", "[2,4]", "no holes"),
      two("NotCovered", "[1,3]", "[1,3]", "no holes"),
      hostile(
          "HoleBetween",
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
          "xyz", "no holes"),
      hostile(
          "EmptyTensorInsideAnother",
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})",
          "xy", "must not overlap"),
      numbers("Backwards", "[1]", "[1,0]", "inside the data section"),
      numbers("BeyondData", "[2]", "[0,2]", "inside the data section"),
      numbers("FarBeyondData", "[1]", "[9223372036854775806,9223372036854775807]", "inside the data section"),
      numbers("ShapeSmaller", "[0]", "[0,1]", "takes 0 bytes"),
      numbers("ShapeLarger", "[2]", "[0,1]", "takes 2 bytes"),
      numbers("ShapeProductOverflows", "[4294967296,4294967296]", "[0,1]", "less than 2^63 bytes"),
      numbers("ShapeProductWrapsToOne", "[3,12297829382473034411]", "[0,1]", "0 to 2^63 - 1"),
      numbers("ShapeOverflowHiddenByZero", "[9223372036854775807,9223372036854775807,0]", "[0,0]",
              "less than 2^63 bytes"),
      numbers("NineDimensions", "[1,1,1,1,1,1,1,1,1]", "[0,1]", "at most 8 dimensions"),
      numbers("ShapeIsNumber", "1", "[0,1]", "expected '['"),
      numbers("ShapeNested", "[[1]]", "[0,1]", "plain digits"),
      numbers("ShapeOpen", "[1", "[0,1]", "plain digits"),
      numbers("ShapeClosedByBrace", "[1}", "[0,1]", "expected ']'"),
      numbers("ShapeTrailingComma", "[1,]", "[0,1]", "plain digits"),
      numbers("ShapeNegative", "[-1]", "[0,1]", "plain digits"),
      numbers("ShapeMinusZero", "[-0]", "[0,1]", "plain digits"),
      numbers("ShapeFloat", "[1.0]", "[0,1]", "plain digits"),
      numbers("ShapeExponent", "[1e0]", "[0,1]", "plain digits"),
      numbers("ShapeLeadingZero", "[01]", "[0,1]", "plain digits"),
      numbers("ShapePlus", "[+1]", "[0,1]", "plain digits"),
      numbers("ShapeString", "[\"1\"]", "[0,1]", "plain digits"),
      numbers("ShapeTrue", "[true]", "[0,1]", "plain digits"),
      numbers("SizeOf2To63", "[9223372036854775808]", "[0,1]", "2^63 - 1"),
      numbers("SizeOf2To64", "[18446744073709551616]", "[0,1]", "2^63 - 1"),
      numbers("SizeOfThousandDigits", std::string(1000, '9').insert(0, 1, '[').append("]"), "[0,1]", "2^63 - 1"),
      numbers("OffsetFloat", "[1]", "[0.0,1]", "plain digits"),
      numbers("OffsetExponent", "[1]", "[0,1e0]", "plain digits"),
      numbers("OffsetNegative", "[1]", "[-1,0]", "plain digits"),
      numbers("OffsetString", "[1]", "[\"0\",1]", "plain digits"),
      numbers("OffsetsOne", "[1]", "[1]", "expected ','"),
      numbers("OffsetsNone", "[1]", "[]", "plain digits"),
      numbers("OffsetsThree", "[1]", "[0,1,1]", "expected ']'"),
      numbers("OffsetsNotAnArray", "[1]", "{}", "expected '['"),
  };
}

std::vector<HostileFile> texts() {
  return {
      text("RawControl", "\n", "must be escaped"),
      text("RawZero", std::string_view("\0", 1), "must be escaped"),
      text("UnknownEscape", "\\x41", "followed by one of"),
      text("ShortUnicodeEscape", "\\u12", "four hexadecimal digits"),
      text("HexPrefixInUnicodeEscape", "\\u0x12", "four hexadecimal digits"),
      text("LoneHighSurrogate", "\\ud800", "in pairs"),
      text("LoneLowSurrogate", "\\udc00", "in pairs"),
      text("HighSurrogateTwice", "\\ud800\\ud800", "in pairs"),
      text("SurrogatesSwapped", "\\udc00\\ud800", "in pairs"),
      text("RawContinuation", "\x80", "valid UTF-8"),
      text("OverlongSlash", "\xc0\xaf", "valid UTF-8"),
      text("OverlongThreeBytes", "\xe0\x80\xaf", "valid UTF-8"),
      text("OverlongFourBytes", "\xf0\x80\x80\xaf", "valid UTF-8"),
      text("RawSurrogate", "\xed\xa0\x80", "valid UTF-8"),
      text("BeyondUnicode", "\xf4\x90\x80\x80", "valid UTF-8"),
      text("InvalidLead", "\xff", "valid UTF-8"),
      text("CutCharacter", "\xe2\x82", "valid UTF-8"),
      hostile("CutCharacterAtTheEnd", "{\"\xe2\x82", "", "valid UTF-8"),
      hostile("CharacterThatGoesOnInTheData", "{\"\xe2\x82", "\xac", "valid UTF-8"),
  };
}

class HostileSafetensors : public testing::TestWithParam<HostileFile> {};

TEST_P(HostileSafetensors, IsRefusedWithAReason) {
  const auto bytes = exact_bytes(GetParam().image);
  expect_error([&] { parse_safetensors(bytes, "bad.safetensors"); },
               {"bad.safetensors: ", "; received ", GetParam().message});
}

std::string name_of(const testing::TestParamInfo<HostileFile>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Frame, HostileSafetensors, testing::ValuesIn(frames()), name_of);
INSTANTIATE_TEST_SUITE_P(Entry, HostileSafetensors, testing::ValuesIn(entries()), name_of);
INSTANTIATE_TEST_SUITE_P(Range, HostileSafetensors, testing::ValuesIn(ranges()), name_of);
INSTANTIATE_TEST_SUITE_P(Text, HostileSafetensors, testing::ValuesIn(texts()), name_of);

const std::string& small_valid_file() {
  static const std::string kImage =
      safetensors_image(R"({"__metadata__":{"k":"\u00e9"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}  )",
                        "12345678xyz");
  return kImage;
}

TEST(DamagedSafetensors, EveryTruncationIsRefused) {
  const std::string& image = small_valid_file();
  ASSERT_EQ(parse_safetensors(exact_bytes(image), "x").tensors.size(), 2U);
  for (std::size_t length = 0; length < image.size(); ++length) {
    SCOPED_TRACE(length);
    const auto bytes = exact_bytes(image.substr(0, length));
    expect_error([&] { parse_safetensors(bytes, "cut.safetensors"); }, {"cut.safetensors: "});
  }
}

// Any other byte anywhere: still a valid file, whose tensors then fill it exactly, or a clear error.
TEST(DamagedSafetensors, EveryChangedByteIsReadOrRefused) {
  const std::string& image = small_valid_file();
  int read = 0;
  int refused = 0;
  for (std::size_t position = 0; position < image.size(); ++position) {
    auto bytes = exact_bytes(image);
    for (int value = 0; value < 256; ++value) {
      bytes[position] = static_cast<std::byte>(value);
      try {
        std::size_t total = 0;
        for (const FileTensor& tensor : parse_safetensors(bytes, "bent").tensors) {
          check_consistent(tensor, "bent");
          total += tensor.bytes.size();
        }
        EXPECT_EQ(total, 11U);
        ++read;
      } catch (const InvalidArgument&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_GT(refused, read);
}

TEST(DamagedSafetensors, MetadataIsLimited) {
  std::string header = R"({"__metadata__":{)";
  for (int i = 0; i <= 65'536; ++i) header.append(i == 0 ? "\"" : ",\"").append(std::to_string(i)).append("\":\"\"");
  const auto bytes = exact_bytes(safetensors_image(header + "}}", ""));
  expect_error([&] { parse_safetensors(bytes, "x"); }, {"at most 65536 entries"});
}

}  // namespace
}  // namespace annulus
