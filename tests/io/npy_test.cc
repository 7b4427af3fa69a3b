#include "io/npy.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <ostream>
#include <utility>

#include "io/file_image.h"
#include "io/scratch_directory.h"

namespace annulus {
namespace {

using Shape = std::vector<std::int64_t>;

TEST(Npy, ReadsAFileBuiltByHandInEveryVersion) {
  for (const int major : {1, 2, 3}) {
    const auto bytes =
        exact_bytes(npy_image("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }  \n", "12345678", major));
    const FileTensor tensor = parse_npy(bytes, "q.npy");
    EXPECT_EQ(tensor.name, "q.npy");
    EXPECT_EQ(tensor.type, ElementType::f32);
    EXPECT_EQ(tensor.shape, (Shape{1, 2}));
    EXPECT_EQ(text_of(tensor.bytes), "12345678");
  }
}

TEST(Npy, ReadsEveryType) {
  const std::pair<std::string_view, ElementType> types[] = {
      {"<f8", ElementType::f64},  {"<f4", ElementType::f32},    {"<f2", ElementType::f16}, {"<V2", ElementType::bf16},
      {"|V2", ElementType::bf16}, {"<i8", ElementType::i64},    {"<i4", ElementType::i32}, {"<i2", ElementType::i16},
      {"|i1", ElementType::i8},   {"<u8", ElementType::u64},    {"<u4", ElementType::u32}, {"<u2", ElementType::u16},
      {"|u1", ElementType::u8},   {"|b1", ElementType::boolean}};
  for (const auto& [descriptor, type] : types) {
    const std::string header = "{'descr': '" + std::string(descriptor) + "', 'fortran_order': False, 'shape': (), }\n";
    const std::string data(static_cast<std::size_t>(size_of(type)), 'x');
    EXPECT_EQ(parse_npy(exact_bytes(npy_image(header, data)), "x").type, type) << descriptor;
  }
}

TEST(Npy, ReadsEveryWayToWriteTheHeader) {
  for (const std::string_view header : {
           "{'descr':'|u1','fortran_order':False,'shape':(2,1)}",
           "{\"descr\": \"|u1\", \"fortran_order\": False, \"shape\": (2, 1)}\n",
           "{'shape': (2, 1,), 'fortran_order': False, 'descr': '|u1'}   \n",
           " {\n'shape' : ( 2 , 1 ) ,\t'fortran_order' : False , 'descr' : '|u1' , } \n",
       }) {
    const auto bytes = exact_bytes(npy_image(header, "ab"));
    EXPECT_EQ(parse_npy(bytes, "x").shape, (Shape{2, 1})) << header;
  }
}

TEST(Npy, ReadsShapesOfEveryRank) {
  const std::pair<std::string_view, Shape> shapes[] = {
      {"()", {}}, {"(1,)", {1}}, {"(1, 1)", {1, 1}}, {"(1, 1, 1, 1, 1, 1, 1, 1)", Shape(8, 1)}};
  for (const auto& [text, shape] : shapes) {
    const std::string header = "{'descr': '|u1', 'fortran_order': False, 'shape': " + std::string(text) + ", }\n";
    EXPECT_EQ(parse_npy(exact_bytes(npy_image(header, "z")), "x").shape, shape);
  }
  const auto empty = exact_bytes(npy_image("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 5), }\n", ""));
  EXPECT_EQ(parse_npy(empty, "x").shape, (Shape{0, 5}));
}

struct HostileFile {
  std::string name;
  std::string image;
  std::string message;  // what the error must say
};

std::ostream& operator<<(std::ostream& out, const HostileFile& file) { return out << file.name; }

HostileFile hostile(std::string name, std::string_view header, std::string_view data, std::string message) {
  return {std::move(name), npy_image(header, data), std::move(message)};
}

HostileFile shape(std::string name, std::string_view text, std::string message) {
  return hostile(std::move(name), "{'descr': '|u1', 'fortran_order': False, 'shape': " + std::string(text) + ", }\n",
                 "z", std::move(message));
}

HostileFile descriptor(std::string name, std::string_view text, std::string message) {
  return hostile(std::move(name), "{'descr': " + std::string(text) + ", 'fortran_order': False, 'shape': (1,), }\n",
                 "z", std::move(message));
}

std::vector<HostileFile> frames() {
  const std::string good = "{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }\n";
  std::string minor = npy_image(good, "z");
  minor[7] = 1;
  return {
      {"Empty", "", "begins with"},
      {"HalfTheMagic", "\x93NUM", "begins with"},
      {"OtherMagic", "\x93NUMPX\x01", "begins with"},
      {"PickledObject", std::string("\x80\x04\x95", 3), R"('\x80\x04\x95')"},
      {"ZipArchive", "PK\x03\x04", "begins with"},
      {"NoVersion", "\x93NUMPY", "a file of 6 bytes"},
      {"NoLength", std::string("\x93NUMPY\x01\0\x01", 9), "a file of 9 bytes"},
      {"Version0", npy_image(good, "z", 0), "received 0.0"},
      {"Version4", npy_image(good, "z", 4), "received 4.0"},
      {"Version1Point1", minor, "received 1.1"},
      {"LengthBeyondFile", std::string("\x93NUMPY\x01\0\x02\0{", 11), "inside the file"},
      {"LengthBeyondCap", std::string("\x93NUMPY\x02\0\xff\xff\xff\xff{", 13), "received 4294967295"},
      {"JustBeyondCap", npy_image(good + std::string(65'536 - good.size(), ' '), "z", 2), "at most 65535 bytes"},
      hostile("NoHeader", "", "", "expected '{'"),
      hostile("NotADict", "[]", "", "expected '{'"),
      hostile("EmptyDict", "{}", "", "all of descr, fortran_order and shape"),
      hostile("OpenDict", "{'descr': '|u1', 'fortran_order': False, 'shape': (1,)", "z", "expected '}'"),
      hostile("NoComma", "{'descr': '|u1' 'fortran_order': False, 'shape': (1,)}", "z", "expected '}'"),
      hostile("TwoCommas", "{'descr': '|u1',, 'fortran_order': False, 'shape': (1,)}", "z", "expected a key"),
      hostile("OnlyAComma", "{,}", "z", "expected a key"),
      hostile("KeyNotAString", "{descr: '|u1'}", "z", "expected a key"),
      hostile("NoColon", "{'descr' '|u1'}", "z", "expected ':'"),
      hostile("TextBehind", "{'descr': '|u1', 'fortran_order': False, 'shape': (1,)} x", "z", "only blanks may follow"),
      hostile("ZerosBehind", std::string_view("{'descr': '|u1', 'fortran_order': False, 'shape': (1,)}\0", 56), "z",
              "only blanks may follow"),
      hostile("NoDescr", "{'fortran_order': False, 'shape': (1,)}", "z", "all of descr"),
      hostile("NoOrder", "{'descr': '|u1', 'shape': (1,)}", "z", "all of descr"),
      hostile("NoShape", "{'descr': '|u1', 'fortran_order': False}", "z", "all of descr"),
      hostile("DescrTwice", "{'descr': '|u1', 'descr': '|u1', 'fortran_order': False, 'shape': (1,)}", "z",
              "each once"),
      hostile("OrderTwice", "{'descr': '|u1', 'fortran_order': False, 'fortran_order': False}", "z", "each once"),
      hostile("ShapeTwice", "{'descr': '|u1', 'shape': (1,), 'shape': (1,)}", "z", "each once"),
      hostile("UnknownKey", "{'descr': '|u1', 'x': 1}", "z", "not 'x'"),
      hostile("DeepValue", "{'x': " + std::string(60'000, '('), "", "not 'x'"),
      hostile("OrderNumber", "{'fortran_order': 0}", "z", "True or False"),
      hostile("OrderLowerCase", "{'fortran_order': false}", "z", "True or False"),
      hostile("OrderGoesOn", "{'fortran_order': Falsehood}", "z", "expected '}'"),
      hostile("FortranOrder", "{'descr': '|u1', 'fortran_order': True, 'shape': (1,)}", "z", "ascontiguousarray"),
      hostile("DataMissing", good, "", "takes 1 bytes"),
      hostile("DataBehind", good, "zz", "received 2"),
  };
}

std::vector<HostileFile> values() {
  return {
      descriptor("BigEndian", "'>f4'", "newbyteorder"),
      descriptor("NativeOrder", "'=f4'", "one of <f8"),
      descriptor("Complex", "'<c8'", "one of <f8"),
      descriptor("Object", "'|O'", "received '|O'"),
      descriptor("Text", "'<U4'", "one of <f8"),
      descriptor("LongDouble", "'<f16'", "one of <f8"),
      descriptor("VoidOfFour", "'|V4'", "one of <f8"),
      descriptor("Structured", "[('x', '<f4')]", "structured array"),
      descriptor("Bytes", "b'<f4'", "structured array"),
      descriptor("Escape", "'\\x3cf4'", "without escapes"),
      descriptor("OpenString", "'<f4\n", "must end with"),
      descriptor("MixedQuotes", "'<f4\"", "must end with"),
      descriptor("LongText", "'" + std::string(60'000, 'x') + "'", "xxx...'"),
      descriptor("SteersTheTerminal", "'\x1b[2J'", R"('\x1b[2J')"),
      shape("NotATuple", "1", "expected '('"),
      shape("List", "[1]", "expected '('"),
      shape("ParenthesisedNumber", "(1)", "expected ','"),
      shape("OnlyAComma", "(,)", "plain digits"),
      shape("TwoCommas", "(1,,)", "plain digits"),
      shape("NoComma", "(1 1)", "expected ','"),
      shape("NoCommaLater", "(1, 1 1)", "expected ','"),
      shape("Open", "(1,", "plain digits"),
      shape("Negative", "(-1,)", "plain digits"),
      shape("Plus", "(+1,)", "plain digits"),
      shape("Float", "(1.0,)", "plain digits"),
      shape("Exponent", "(1e0,)", "plain digits"),
      shape("Hexadecimal", "(0x1,)", "plain digits"),
      shape("Underscore", "(1_0,)", "plain digits"),
      shape("PythonTwoLong", "(1L,)", "plain digits"),
      shape("LeadingZero", "(01,)", "plain digits"),
      shape("None", "(None,)", "plain digits"),
      shape("Expression", "(1*1,)", "expected ','"),
      shape("SizeOf2To63", "(9223372036854775808,)", "2^63 - 1"),
      shape("ThousandDigits", "(" + std::string(1000, '9') + ",)", "2^63 - 1"),
      shape("ProductOverflows", "(4294967296, 4294967296)", "less than 2^63 bytes"),
      shape("OverflowHiddenByZero", "(9223372036854775807, 9223372036854775807, 0)", "less than 2^63 bytes"),
      shape("NineDimensions", "(1, 1, 1, 1, 1, 1, 1, 1, 1)", "at most 8 dimensions"),
      shape("TooLarge", "(1099511627776,)", "takes 1099511627776 bytes"),
      shape("TooSmall", "(0,)", "takes 0 bytes"),
  };
}

class HostileNpy : public testing::TestWithParam<HostileFile> {};

TEST_P(HostileNpy, IsRefusedWithAReason) {
  const auto bytes = exact_bytes(GetParam().image);
  expect_error([&] { parse_npy(bytes, "bad.npy"); }, {"bad.npy: ", "; received ", GetParam().message});
}

std::string name_of(const testing::TestParamInfo<HostileFile>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Frame, HostileNpy, testing::ValuesIn(frames()), name_of);
INSTANTIATE_TEST_SUITE_P(Value, HostileNpy, testing::ValuesIn(values()), name_of);

TEST(DamagedNpy, EveryTruncationIsRefused) {
  for (const int major : {1, 2}) {
    const std::string image =
        npy_image("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), } \n", "12345678", major);
    for (std::size_t length = 0; length < image.size(); ++length) {
      SCOPED_TRACE(length);
      const auto bytes = exact_bytes(image.substr(0, length));
      expect_error([&] { parse_npy(bytes, "cut.npy"); }, {"cut.npy: "});
    }
  }
}

TEST(DamagedNpy, EveryChangedByteIsReadOrRefused) {
  const std::string image = npy_image("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), } \n", "12345678", 2);
  int read = 0;
  int refused = 0;
  for (std::size_t position = 0; position < image.size(); ++position) {
    auto bytes = exact_bytes(image);
    for (int value = 0; value < 256; ++value) {
      bytes[position] = static_cast<std::byte>(value);
      try {
        const FileTensor tensor = parse_npy(bytes, "bent");
        check_consistent(tensor, "bent");
        EXPECT_EQ(tensor.bytes.data() + tensor.bytes.size(), bytes.data() + bytes.size());
        ++read;
      } catch (const InvalidArgument&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(read, 0);
  EXPECT_GT(refused, read);
}

TEST(NpyWriter, WritesWhatNumpyWrites) {
  const auto data = exact_bytes(std::string(24, 'x'));
  const auto dict = [&](ElementType type, Shape dimensions) {
    const auto bytes = static_cast<std::size_t>(dense_bytes(dimensions, type).value());
    const std::string header = npy_header(
        {.name = "", .type = type, .shape = std::move(dimensions), .bytes = std::span(data).first(bytes)}, "x");
    EXPECT_EQ(header.size() % 64, 0U);
    EXPECT_EQ(header.substr(0, 10), std::string("\x93NUMPY\x01\0", 8) + little_endian(header.size() - 10, 2));
    EXPECT_EQ(header.back(), '\n');
    return header.substr(10, header.find('}') - 9);
  };
  EXPECT_EQ(dict(ElementType::f32, {2, 3}), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }");
  EXPECT_EQ(dict(ElementType::bf16, {3}), "{'descr': '<V2', 'fortran_order': False, 'shape': (3,), }");
  EXPECT_EQ(dict(ElementType::f16, {}), "{'descr': '<f2', 'fortran_order': False, 'shape': (), }");
  EXPECT_EQ(dict(ElementType::boolean, {1, 0}), "{'descr': '|b1', 'fortran_order': False, 'shape': (1, 0), }");
}

TEST(NpyWriter, RefusesWhatItCouldNotReadBack) {
  const ScratchDirectory directory;
  const auto data = exact_bytes("01234567");
  expect_error(
      [&] { write_npy(directory / "x.npy", {.name = "", .type = ElementType::f32, .shape = {3}, .bytes = data}); },
      {"x.npy", "takes 12 bytes", "received 8"});
  expect_error(
      [&] {
        write_npy(directory / "x.npy", {.name = "", .type = ElementType::u8, .shape = Shape(9, 1), .bytes = data});
      },
      {"at most 8 dimensions"});
  EXPECT_TRUE(directory.names().empty());
}

TEST(NpyFile, NamesThePath) {
  const ScratchDirectory directory;
  write_text(directory / "short.npy", "\x93NUMPY");
  expect_error([&] { NpyFile(directory / "short.npy"); }, {"short.npy", "a file of 6 bytes"});
}

RC_GTEST_PROP(NpyRoundTrip, ReadsWhatWasWritten, ()) {
  const auto type = static_cast<ElementType>(*rc::gen::inRange(0, static_cast<int>(ElementType::boolean) + 1));
  const auto dimensions = *rc::gen::inRange<std::size_t>(0, kMaxDimensions + 1);
  const auto sizes = *rc::gen::container<Shape>(dimensions, rc::gen::inRange<std::int64_t>(0, 4));
  std::vector<std::byte> bytes(static_cast<std::size_t>(dense_bytes(sizes, type).value()));
  std::uint32_t state = *rc::gen::arbitrary<std::uint32_t>();
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((state = state * 1664525U + 1013904223U) >> 24);

  const ScratchDirectory directory;
  write_npy(directory / "x.npy", {.name = "", .type = type, .shape = sizes, .bytes = bytes});
  NpyFile opened(directory / "x.npy");
  const NpyFile file(std::move(opened));  // the view stays valid
  RC_ASSERT(file.tensor().type == type);
  RC_ASSERT(file.tensor().shape == sizes);
  RC_ASSERT(std::ranges::equal(file.tensor().bytes, bytes));
  RC_ASSERT(reinterpret_cast<std::uintptr_t>(file.tensor().bytes.data()) % 64 == 0U);
}

}  // namespace
}  // namespace annulus
