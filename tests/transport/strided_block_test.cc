#include "annulus/strided_block.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "transport/payload.h"

namespace annulus {
namespace {

TEST(StridedBlock, PacksRowsOfOneHead) {
  Bytes memory(64);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  // Two batches 32 bytes apart, three rows with stride 8, runs of 2 bytes from offset 4.
  const StridedBlock block{.data = memory.data() + 4, .axes = {{{2, 32}, {1, 0}, {1, 0}, {3, 8}}}, .run_bytes = 2};
  Bytes packed(static_cast<std::size_t>(block.bytes()) + 1, std::byte{0xee});
  EXPECT_EQ(pack(block, packed.data()), packed.data() + 12);
  const std::array<int, 13> expected{4, 5, 12, 13, 20, 21, 36, 37, 44, 45, 52, 53, 0xee};
  for (std::size_t i = 0; i < packed.size(); ++i) EXPECT_EQ(static_cast<int>(packed[i]), expected[i]) << i;
}

TEST(StridedBlock, RepeatsWithStrideZero) {
  const Bytes memory = payload(1, 6);
  const StridedBlock block{.data = memory.data(), .axes = {{{3, 0}, {1, 0}, {1, 0}, {2, 4}}}, .run_bytes = 2};
  Bytes packed(12);
  pack(block, packed.data());
  for (std::size_t i = 0; i < packed.size(); ++i) EXPECT_EQ(packed[i], memory[(i % 4) / 2 * 4 + i % 2]) << i;
}

TEST(StridedBlock, WalksBackwards) {
  const Bytes memory = payload(2, 12);
  const StridedBlock block{.data = memory.data() + 8, .axes = {{{1, 0}, {1, 0}, {1, 0}, {3, -4}}}, .run_bytes = 4};
  Bytes packed(12);
  pack(block, packed.data());
  for (std::size_t i = 0; i < packed.size(); ++i) EXPECT_EQ(packed[i], memory[8 - i / 4 * 4 + i % 4]) << i;
}

TEST(StridedBlock, EmptyBlocksAreNothing) {
  const std::vector<StridedBlock> blocks{{}, {.axes = {{{5, 1}, {0, 1}, {1, 0}, {1, 0}}}, .run_bytes = 8}};
  EXPECT_EQ(total_bytes(blocks), 0);
  std::byte here{};
  EXPECT_EQ(pack(blocks[1], &here), &here);
  PackCursor cursor(blocks);
  EXPECT_EQ(cursor.remaining_bytes(), 0);
  cursor.pack({});
}

RC_GTEST_PROP(PackCursor, PacksTheSameInPiecesOfAnySize, ()) {
  const auto key = *rc::gen::inRange<std::uint64_t>(0, 1'000'000);
  const auto bytes = *rc::gen::inRange<std::int64_t>(0, 200'000);
  const ScatteredMessage message(key, bytes);
  RC_ASSERT(total_bytes(message.blocks()) == bytes);
  PackCursor cursor(message.blocks());
  Bytes packed(static_cast<std::size_t>(bytes));
  const auto largest = *rc::gen::inRange<std::size_t>(1, 20'000);
  std::mt19937_64 random(key);
  for (std::size_t at = 0; at < packed.size();) {
    const std::size_t piece =
        std::min(packed.size() - at, std::uniform_int_distribution<std::size_t>(0, largest)(random));
    cursor.pack(std::span(packed).subspan(at, piece));
    at += piece;
    RC_ASSERT(cursor.remaining_bytes() == bytes - static_cast<std::int64_t>(at));
  }
  RC_ASSERT(first_wrong(packed, key) == -1);
}

RC_GTEST_PROP(StridedBlock, PartsAreCutFromThePackedForm, ()) {
  const auto key = *rc::gen::inRange<std::uint64_t>(0, 1'000'000);
  const auto bytes = *rc::gen::inRange<std::int64_t>(0, 100'000);
  const auto piece = *rc::gen::inRange<std::int64_t>(1, 30'000);
  const ScatteredMessage message(key, bytes);
  Bytes packed(static_cast<std::size_t>(bytes));
  std::byte* to = packed.data();
  for (std::int64_t first = 0; first < bytes; first += piece) {
    const std::vector<StridedBlock> part = part_of(message.blocks(), first, std::min(piece, bytes - first));
    RC_ASSERT(total_bytes(part) == std::min(piece, bytes - first));
    for (const StridedBlock& block : part) to = pack(block, to);
  }
  RC_ASSERT(first_wrong(packed, key) == -1);
}

}  // namespace
}  // namespace annulus
