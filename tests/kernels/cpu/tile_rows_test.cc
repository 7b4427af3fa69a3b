// Rows in and out of tiles, on every instruction set: what is finite, rounding, sums and dot products.
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "kernels/cpu/tiles.h"
#include "numeric/half.h"
#include "support/call.h"
#include "support/matrix.h"

namespace annulus::cpu {
namespace {

using Index = std::int64_t;
using support::dot;
using support::HostTensor;
using support::Layout;
using support::Matrix;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

TEST(TileRows, PackingSaysWhetherEverythingIsFinite) {
  std::mt19937_64 random(55);
  for (const Tiles* tiles : available_tiles())
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const Index head_dim : {1, 15, 16, 33}) {
        const ForwardTiles& forward = dtype == DType::bf16 ? tiles->forward_bf16 : tiles->forward;
        const Index rows = 21;
        support::Workspace packed(at(std::max(forward.key_chunk_bytes(head_dim), rows * padded(head_dim) * 4)));
        auto* floats = reinterpret_cast<float*>(packed.span().data());
        const Matrix good(dtype, rows, head_dim, random);
        EXPECT_TRUE(forward.pack_values(good.source(), packed.span().data()));
        EXPECT_TRUE(tiles->backward.pack_rows(good.source(), 1.0f, floats));
        for (const double bad :
             {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)})
          for (const std::size_t element :
               {std::size_t{0}, at(rows * head_dim) - 1, at(rows / 2 * head_dim + head_dim / 2)}) {
            Matrix spoiled = good;
            spoiled.values[element] = bad;
            spoiled.memory.fill(spoiled.values);
            EXPECT_FALSE(forward.pack_values(spoiled.source(), packed.span().data()))
                << tiles->name << " " << element << " " << bad;
            EXPECT_FALSE(tiles->backward.pack_rows(spoiled.source(), 1.0f, floats))
                << tiles->name << " " << element << " " << bad;
          }
        EXPECT_TRUE(packed.guards_intact());
      }
}

// Every number that lies in the middle of two, just beside it, beyond the range or below it.
std::vector<float> awkward_floats() {
  std::vector<float> floats;
  std::mt19937 random(56);
  for (int i = 0; i < 20000; ++i) floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (std::uint32_t bits = 0; bits < 0x10000u; bits += 7)
    for (const std::uint32_t low : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0x1000u, 0x0fffu, 0x1001u})
      floats.push_back(std::bit_cast<float>(bits << 16 | low));
  for (int i = -30; i < 20; ++i)
    for (const float x : {1.0f, 1.00048828125f, 1.000732421875f, 1.5f})
      floats.push_back(std::ldexp(x, i)), floats.push_back(-std::ldexp(x, i));
  for (const float x : {65504.0f, 65519.0f, 65520.0f, 65536.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 3.4e38f})
    floats.push_back(x);
  return floats;
}

TEST(TileRows, StoreRowsRoundsToNearestEven) {
  const std::vector<float> floats = awkward_floats();
  for (const Tiles* tiles : available_tiles())
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const Index head_dim : {1, 16, 37}) {
        const Index width = padded(head_dim), rows = static_cast<Index>(floats.size()) / head_dim;
        std::vector<float> source(at(rows * width), NAN), factors(at(rows), 1.0f);
        for (Index i = 0; i < rows * head_dim; ++i) source[at(i / head_dim * width + i % head_dim)] = floats[at(i)];
        HostTensor target(dtype, {1, rows, 1, head_dim}, Layout::apart);
        const TensorView view = target.view();
        tiles->store_rows(source.data(), rows, factors.data(), {view.data, dtype, view.stride[1], head_dim});
        EXPECT_EQ(target.faults("target"), "");
        const std::vector<double> stored = target.read();
        for (Index i = 0; i < rows * head_dim; ++i) {
          const double want = round_to(dtype, static_cast<double>(floats[at(i)])), got = stored[at(i)];
          ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : want == got)
              << tiles->name << " " << name(dtype) << ": " << floats[at(i)] << " became " << got << ", not " << want;
        }
      }
}

TEST(TileRows, StoreRowsScalesEachRow) {
  for (const Tiles* tiles : available_tiles()) {
    const Index head_dim = 21, width = padded(head_dim);
    std::vector<float> source(at(3 * width), 2.0f);
    const std::vector<float> factors{0.5f, 0.0f, -3.0f};
    HostTensor target(DType::fp32, {1, 3, 1, head_dim}, Layout::apart);
    tiles->store_rows(source.data(), 3, factors.data(),
                      {target.view().data, DType::fp32, target.view().stride[1], head_dim});
    EXPECT_EQ(target.faults("target"), "");
    for (std::size_t i = 0; i < target.count(); ++i)
      ASSERT_EQ(target.read()[i], static_cast<double>(2 * factors[i / 21]));
  }
}

TEST(TileRows, AddRowsAdds) {
  std::mt19937_64 random(57);
  for (const Tiles* tiles : available_tiles())
    for (const Index head_dim : {1, 3, 8, 15, 16, 17, 31, 40, 64, 80}) {
      const Index width = padded(head_dim), rows = 9;
      const Matrix before(DType::fp32, rows, head_dim, random), addend(DType::fp32, rows, head_dim, random);
      std::vector<float> source(at(rows * width), NAN);
      for (Index i = 0; i < rows; ++i)
        for (Index d = 0; d < head_dim; ++d) source[at(i * width + d)] = static_cast<float>(addend(i, d));
      HostTensor target = before.memory;
      tiles->add_rows(source.data(), rows, 0.7f, {target.view().data, DType::fp32, target.view().stride[1], head_dim});
      EXPECT_EQ(target.faults("target"), "");
      const std::vector<double> after = target.read();
      for (std::size_t i = 0; i < after.size(); ++i)
        ASSERT_NEAR(after[i], before.values[i] + static_cast<double>(0.7f) * addend.values[i], 1e-6) << tiles->name;
    }
}

TEST(TileRows, DotRowsOfAnyTwoTypes) {
  std::mt19937_64 random(58);
  for (const Tiles* tiles : available_tiles())
    for (const DType left : {DType::fp32, DType::bf16, DType::fp16})
      for (const DType right : {DType::fp32, DType::bf16, DType::fp16})
        for (const Index head_dim : {1, 3, 16, 17, 80, 512}) {
          const Index rows = 35;
          const Matrix a(left, rows, head_dim, random), b(right, rows, head_dim, random);
          std::vector<float> result(at(rows) + 1, -7.0f);
          tiles->dot_rows(a.source(), b.source(), result.data());
          for (Index i = 0; i < rows; ++i)
            ASSERT_NEAR(static_cast<double>(result[at(i)]), dot(a, b, i, i, 1),
                        2e-7 * (100 + static_cast<double>(head_dim)))
                << tiles->name;
          EXPECT_EQ(result.back(), -7.0f);
        }
}

}  // namespace
}  // namespace annulus::cpu
