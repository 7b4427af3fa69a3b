#include "io/file_tensor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "io/file_image.h"

namespace annulus {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

using Shape = std::vector<std::int64_t>;

TEST(ElementTypes, NamesAndSizesAreThoseOfSafetensors) {
  const std::pair<std::string_view, std::int64_t> known[] = {
      {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8}, {"I32", 4}, {"I16", 2},
      {"I8", 1},  {"U64", 8}, {"U32", 4}, {"U16", 2},  {"U8", 1},  {"BOOL", 1}};
  for (const auto& [text, size] : known) {
    const std::optional<ElementType> type = find_element_type(text);
    ASSERT_TRUE(type) << text;
    EXPECT_EQ(name(*type), text);
    EXPECT_EQ(size_of(*type), size) << text;
    EXPECT_NE(element_type_names().find(text), std::string::npos);
  }
  for (const std::string_view text : {"", "f32", "F33", "F8_E4M3", "F32 "})
    EXPECT_FALSE(find_element_type(text)) << text;
}

TEST(DenseBytes, MultipliesWithoutOverflow) {
  EXPECT_EQ(dense_bytes(Shape{}, ElementType::f32), 4);
  EXPECT_EQ(dense_bytes(Shape{2, 3, 5}, ElementType::bf16), 60);
  EXPECT_EQ(dense_bytes(Shape{0, 7}, ElementType::f64), 0);
  EXPECT_EQ(dense_bytes(Shape{kMax}, ElementType::u8), kMax);
  EXPECT_EQ(dense_bytes(Shape{kMax}, ElementType::u16), std::nullopt);
  EXPECT_EQ(dense_bytes(Shape{std::int64_t{1} << 31, std::int64_t{1} << 31}, ElementType::u8), std::int64_t{1} << 62);
  EXPECT_EQ(dense_bytes(Shape{std::int64_t{1} << 31, std::int64_t{1} << 32}, ElementType::u8), std::nullopt);
  EXPECT_EQ(dense_bytes(Shape{-1}, ElementType::u8), std::nullopt);
}

TEST(DenseBytes, AZeroDoesNotHideAnOverflow) {
  EXPECT_EQ(dense_bytes(Shape{kMax, kMax, 0}, ElementType::u8), std::nullopt);
  EXPECT_EQ(dense_bytes(Shape{0, kMax, kMax}, ElementType::u8), std::nullopt);
  EXPECT_EQ(dense_bytes(Shape{0, kMax}, ElementType::u8), 0);
}

TEST(DTypeOf, TakesTheTypeOfTheFile) {
  EXPECT_EQ(dtype_of({.name = "q", .type = ElementType::f32, .shape = {}, .bytes = {}}), DType::fp32);
  EXPECT_EQ(dtype_of({.name = "q", .type = ElementType::bf16, .shape = {}, .bytes = {}}), DType::bf16);
  EXPECT_EQ(dtype_of({.name = "q", .type = ElementType::f16, .shape = {}, .bytes = {}}), DType::fp16);
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
    const FileTensor tensor{.name = "q", .type = element_type(dtype), .shape = {}, .bytes = {}};
    EXPECT_EQ(dtype_of(tensor), dtype);
    EXPECT_EQ(dtype_of(tensor, dtype), dtype);
    EXPECT_EQ(size_of(tensor.type), size_of(dtype));
  }
}

TEST(DTypeOf, RefusesWhatAttentionCannotTake) {
  for (const ElementType type : {ElementType::f64, ElementType::i32, ElementType::boolean}) {
    expect_error([&] { dtype_of({.name = "dout", .type = type, .shape = {}, .bytes = {}}); },
                 {"'dout'", "F32, BF16 or F16", name(type), "convert"});
  }
  const FileTensor half{.name = "q", .type = ElementType::f16, .shape = {}, .bytes = {}};
  expect_error([&] { dtype_of(half, DType::bf16); }, {"must be BF16", "received F16"});
}

TEST(DTypeOf, IntegersOf16BitsAreBf16OnlyWhenAskedFor) {
  const FileTensor bits{.name = "q", .type = ElementType::u16, .shape = {}, .bytes = {}};
  expect_error([&] { dtype_of(bits); }, {"received U16", "ask for bf16"});
  expect_error([&] { dtype_of(bits, DType::fp16); }, {"must be F16", "received U16"});
  EXPECT_EQ(dtype_of(bits, DType::bf16), DType::bf16);
}

TEST(AlignedElements, CopiesOnlyWhatIsMisaligned) {
  alignas(8) std::byte storage[64];
  for (std::size_t i = 0; i < sizeof storage; ++i) storage[i] = static_cast<std::byte>(i);
  for (const ElementType type : {ElementType::f64, ElementType::f32, ElementType::bf16, ElementType::u8}) {
    const auto size = static_cast<std::size_t>(size_of(type));
    for (std::size_t offset = 0; offset < 16; ++offset) {
      const FileTensor tensor{.name = "x", .type = type, .shape = {3}, .bytes = {storage + offset, 3 * size}};
      const AlignedElements elements(tensor);
      EXPECT_EQ(elements.is_copy(), offset % size != 0);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(elements.data()) % size, 0U);
      EXPECT_EQ(std::memcmp(elements.data(), storage + offset, 3 * size), 0);
    }
  }
}

TEST(AlignedElements, AnEmptyTensorNeedsNoMemory) {
  const AlignedElements elements({.name = "x", .type = ElementType::f32, .shape = {0}, .bytes = {}});
  EXPECT_FALSE(elements.is_copy());
}

TEST(CheckConsistent, NamesWhatDisagrees) {
  const std::vector<std::byte> bytes(24);
  check_consistent({.name = "q", .type = ElementType::f32, .shape = {2, 3}, .bytes = bytes}, "x");
  expect_error(
      [&] {
        check_consistent({.name = "q", .type = ElementType::f32, .shape = {2, 4}, .bytes = bytes}, "x");
      },
      {"x:", "'q'", "[2, 4] of F32 takes 32 bytes", "received 24"});
  expect_error(
      [&] {
        check_consistent({.name = "q", .type = ElementType::f32, .shape = {-2, 3}, .bytes = bytes}, "x");
      },
      {"at least 0", "[-2, 3]"});
  expect_error(
      [&] { check_consistent({.name = "q", .type = ElementType::u8, .shape = Shape(9, 1), .bytes = bytes}, "x"); },
      {"at most 8 dimensions", "received 9"});
}

}  // namespace
}  // namespace annulus
