// Right files: what is read is what was written, by hand, by us, in any order and alignment.
#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/file_image.h"
#include "io/scratch_directory.h"

namespace annulus {
namespace {

using Shape = std::vector<std::int64_t>;

TEST(Safetensors, ReadsAFileBuiltByHand) {
  const std::string header = R"( {"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},)"
                             R"("a":{"shape":[1,2],"data_offsets":[0,8],"dtype":"F32"}}   )";
  const auto bytes = exact_bytes(safetensors_image(std::string_view(header).substr(1), "12345678xyz"));
  const SafetensorsContent content = parse_safetensors(bytes, "x");
  ASSERT_EQ(content.tensors.size(), 2U);
  EXPECT_EQ(content.metadata, (FileMetadata{{"format", "pt"}}));
  EXPECT_EQ(content.tensors[0].name, "a");
  EXPECT_EQ(content.tensors[0].type, ElementType::f32);
  EXPECT_EQ(content.tensors[0].shape, (Shape{1, 2}));
  EXPECT_EQ(text_of(content.tensors[0].bytes), "12345678");
  EXPECT_EQ(content.tensors[1].name, "b");
  EXPECT_EQ(content.tensors[1].type, ElementType::u8);
  EXPECT_EQ(text_of(content.tensors[1].bytes), "xyz");
}

TEST(Safetensors, TakesBlanksWhereJsonDoes) {
  const auto bytes = exact_bytes(safetensors_image(
      "{ \"a\"\t:\n{\r\"dtype\" : \"U8\" , \"shape\" : [ 1 , 1 ] , \"data_offsets\" : [ 0 , 1 ] } }  ", "z"));
  EXPECT_EQ(parse_safetensors(bytes, "x").tensors.at(0).shape, (Shape{1, 1}));
}

TEST(Safetensors, TakesTheEdges) {
  EXPECT_TRUE(parse_safetensors(exact_bytes(safetensors_image("{}", "")), "x").tensors.empty());
  EXPECT_TRUE(parse_safetensors(exact_bytes(safetensors_image(R"({"__metadata__":{}})", "")), "x").metadata.empty());
  // A scalar; empty tensors at the edges and inside; eight dimensions; an empty name.
  const auto bytes = exact_bytes(safetensors_image(
      R"({"e1":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]},"":{"dtype":"I16","shape":[],"data_offsets":[0,2]},)"
      R"("e2":{"dtype":"F64","shape":[0],"data_offsets":[2,2]},)"
      R"("d":{"dtype":"BOOL","shape":[1,1,1,1,1,1,1,2],"data_offsets":[2,4]},)"
      R"("e3":{"dtype":"F64","shape":[0],"data_offsets":[4,4]}})",
      "abcd"));
  const SafetensorsContent content = parse_safetensors(bytes, "x");
  ASSERT_EQ(content.tensors.size(), 5U);
  const auto scalar = std::ranges::find(content.tensors, "", &FileTensor::name);
  EXPECT_EQ(text_of(scalar->bytes), "ab");
  EXPECT_EQ(content.tensors.back().name, "e3");
}

TEST(Safetensors, DecodesEscapesInNames) {
  const auto bytes = exact_bytes(safetensors_image(
      R"({"\"\\\/\b\f\n\r\t\u0041\u00e9\u20AC\ud83d\ude00é€😀":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", ""));
  EXPECT_EQ(parse_safetensors(bytes, "x").tensors.at(0).name, "\"\\/\b\f\n\r\tAé€😀é€😀");
}

TEST(Safetensors, MisalignedElementsCanBeRead) {
  const float values[] = {1.5F, -2.25F};
  std::string data(sizeof values, '\0');
  std::memcpy(data.data(), values, sizeof values);
  // Whatever the length of the header, and so the address of the data.
  for (std::size_t padding = 0; padding < 8; ++padding) {
    const auto bytes = exact_bytes(safetensors_image(
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})" + std::string(padding, ' '), data));
    const SafetensorsContent content = parse_safetensors(bytes, "x");
    const AlignedElements elements(content.tensors.at(0));
    EXPECT_EQ(static_cast<const float*>(elements.data())[0], 1.5F);
    EXPECT_EQ(static_cast<const float*>(elements.data())[1], -2.25F);
  }
}

TEST(SafetensorsFile, FindsTensorsByName) {
  const ScratchDirectory directory;
  write_text(directory / "x.safetensors",
             safetensors_image(R"({"q":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "z"));
  SafetensorsFile opened(directory / "x.safetensors");
  const SafetensorsFile file(std::move(opened));  // the views stay valid
  EXPECT_EQ(text_of(file.at("q").bytes), "z");
  EXPECT_EQ(file.find("dout"), nullptr);
  expect_error([&] { file.at("dout"); }, {"x.safetensors", "'dout'", "received 'q'", "add the tensor"});
}

TEST(SafetensorsFile, NamesThePath) {
  const ScratchDirectory directory;
  write_text(directory / "empty.safetensors", "");
  expect_error([&] { SafetensorsFile(directory / "empty.safetensors"); }, {"empty.safetensors", "a file of 0 bytes"});
  expect_error([&] { SafetensorsFile(directory / "absent"); }, {"absent", "No such file"});
  write_text(directory / "none.safetensors", safetensors_image("{}", ""));
  const SafetensorsFile none(directory / "none.safetensors");
  expect_error([&] { none.at("q"); }, {"none.safetensors", "no tensors at all"});
}

TEST(SafetensorsWriter, AlignsDataAndOrdersIt) {
  const auto data = exact_bytes("0123456789abcdef");
  const std::span<const std::byte> all = data;
  const std::vector<FileTensor> tensors{
      {.name = "byte", .type = ElementType::u8, .shape = {3}, .bytes = all.subspan(0, 3)},
      {.name = "half", .type = ElementType::bf16, .shape = {1, 1}, .bytes = all.subspan(0, 2)},
      {.name = "b", .type = ElementType::f32, .shape = {}, .bytes = all.subspan(4, 4)},
      {.name = "a", .type = ElementType::f32, .shape = {1}, .bytes = all.subspan(0, 4)},
      {.name = "wide", .type = ElementType::f64, .shape = {1}, .bytes = all.subspan(0, 8)},
  };
  const SafetensorsLayout layout = lay_out_safetensors(tensors, {{"k", "v"}}, "x");
  EXPECT_EQ(layout.header.size() % 64, 0U);
  EXPECT_EQ(layout.order, (std::vector<std::size_t>{4, 3, 2, 1, 0}));
  EXPECT_EQ(
      layout.header.substr(8, layout.header.find_last_not_of(' ') - 7),
      R"({"__metadata__":{"k":"v"},"wide":{"dtype":"F64","shape":[1],"data_offsets":[0, 8]},)"
      R"("a":{"dtype":"F32","shape":[1],"data_offsets":[8, 12]},"b":{"dtype":"F32","shape":[],"data_offsets":[12, 16]},)"
      R"("half":{"dtype":"BF16","shape":[1, 1],"data_offsets":[16, 18]},)"
      R"("byte":{"dtype":"U8","shape":[3],"data_offsets":[18, 21]}})");

  std::vector<FileTensor> shuffled(tensors.rbegin(), tensors.rend());
  EXPECT_EQ(lay_out_safetensors(shuffled, {{"k", "v"}}, "x").header, layout.header);
}

TEST(SafetensorsWriter, RefusesWhatItCouldNotReadBack) {
  const ScratchDirectory directory;
  const auto data = exact_bytes("01234567");
  const auto write = [&](std::vector<FileTensor> tensors, const FileMetadata& metadata = {}) {
    write_safetensors(directory / "x", tensors, metadata);
  };
  const FileTensor good{.name = "a", .type = ElementType::u8, .shape = {8}, .bytes = data};
  FileTensor other = good;
  expect_error([&] { write({good, other}); }, {"unique", "'a' twice"});
  other.name = "__metadata__";
  expect_error([&] { write({other}); }, {"__metadata__", "another name"});
  other.name = "\xff";
  expect_error([&] { write({other}); }, {"UTF-8", "\\xff"});
  other = good;
  other.shape = {9};
  expect_error([&] { write({other}); }, {"takes 9 bytes", "received 8"});
  expect_error([&] { write({good}, {{"k", "\xc0\x80"}}); }, {"UTF-8"});
  expect_error([&] { write({good}, {{"\xed\xa0\x80", "v"}}); }, {"UTF-8"});
  FileMetadata many;
  for (int i = 0; i <= 65'536; ++i) many.emplace(std::to_string(i), "");
  expect_error([&] { write({good}, many); }, {"at most 65536", "received 65537"});
  EXPECT_TRUE(directory.names().empty());
}

struct Stored {
  std::string name;
  ElementType type = ElementType::f32;
  Shape shape;
  std::vector<std::byte> bytes;
};

// Unicode of one to four bytes, quotes, backslashes and control characters.
std::string draw_text() {
  static const std::string kPieces[] = {"a",    "B",    "7", ".", "\"", "\\", "/", " ", "\n", std::string(1, '\0'),
                                        "\x1f", "\x7f", "é", "€", "😀",  "{",  "}", ":", ",",  "__metadata__"};
  std::string text;
  for (const auto piece : *rc::gen::container<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, 20))) {
    text += kPieces[piece];
  }
  return text;
}

Stored draw_tensor(std::size_t index) {
  Stored tensor;
  tensor.name = draw_text() + std::to_string(index);
  tensor.type = static_cast<ElementType>(*rc::gen::inRange(0, static_cast<int>(ElementType::boolean) + 1));
  const auto dimensions = *rc::gen::inRange<std::size_t>(0, kMaxDimensions + 1);
  tensor.shape = *rc::gen::container<Shape>(dimensions, rc::gen::inRange<std::int64_t>(0, 4));
  tensor.bytes.resize(static_cast<std::size_t>(dense_bytes(tensor.shape, tensor.type).value()));
  std::uint32_t state = *rc::gen::arbitrary<std::uint32_t>();
  for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>((state = state * 1664525U + 1013904223U) >> 24);
  return tensor;
}

RC_GTEST_PROP(SafetensorsRoundTrip, ReadsWhatWasWritten, ()) {
  std::vector<Stored> stored;
  const auto count = *rc::gen::inRange<std::size_t>(0, 6);
  for (std::size_t i = 0; i < count; ++i) stored.push_back(draw_tensor(i));
  FileMetadata metadata;
  for (int i = *rc::gen::inRange(0, 4); i > 0; --i) metadata[draw_text()] = draw_text();
  std::vector<FileTensor> tensors;
  for (const Stored& s : stored)
    tensors.push_back({.name = s.name, .type = s.type, .shape = s.shape, .bytes = s.bytes});

  const ScratchDirectory directory;
  write_safetensors(directory / "x", tensors, metadata);
  const SafetensorsFile file(directory / "x");
  RC_ASSERT(file.metadata() == metadata);
  RC_ASSERT(file.tensors().size() == stored.size());
  for (const Stored& s : stored) {
    const FileTensor& read = file.at(s.name);
    RC_ASSERT(read.type == s.type);
    RC_ASSERT(read.shape == s.shape);
    RC_ASSERT(std::ranges::equal(read.bytes, s.bytes));
    RC_ASSERT(!AlignedElements(read).is_copy());
  }
}

}  // namespace
}  // namespace annulus
