// One tile at a time, on every instruction set: packing, the running softmax, eq. 6, and rows in and out, against sums
// in fp64.
#include "kernels/cpu/tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "kernels/softmax_state.h"
#include "kernels/workspace.h"
#include "numeric/half.h"
#include "support/call.h"
#include "support/matrix.h"
#include "support/refusal.h"

namespace annulus::cpu {
namespace {

using Index = std::int64_t;
using support::dot;
using support::Matrix;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

// The running softmax of `rows` rows, `step` apart.
struct State {
  State(Index rows, Index head_dim, Index step_)
      : step(step_),
        maximum(at(rows * step_), kNothing),
        sum(at(rows * step_), 0.0f),
        values(at(rows * step_ * padded(head_dim)), 0.0f) {}

  StateRows rows() { return {maximum.data(), sum.data(), values.data(), step}; }

  Index step;
  std::vector<float> maximum, sum, values;
};

// All of a tile's scratch, of exactly the sizes that the tiles ask for.
class ForwardScratch {
 public:
  ForwardScratch(const ForwardTiles& tiles, Index head_dim) : tiles_(tiles), memory_(measured(tiles, head_dim)) {
    Carver carver(memory_.span().data());
    carve(carver, head_dim);
  }

  void attend(const Matrix& q, const Matrix& k, const Matrix& v, float scale_log2, Index diagonal, State& state) {
    tiles_.pack_queries(q.source(), scale_log2, queries_);
    tiles_.pack_keys(k.source(), keys_);
    AttendTile tile;
    tile.values_finite = tiles_.pack_values(v.source(), values_);
    tile.queries = queries_;
    tile.keys = keys_;
    tile.values = values_;
    tile.query_count = q.rows();
    tile.key_count = k.rows();
    tile.head_dim = q.head_dim();
    tile.diagonal = diagonal;
    tile.scale_log2 = scale_log2;
    tile.scores = scores_;
    tile.state = state.rows();
    tiles_.attend(tile);
    EXPECT_TRUE(memory_.guards_intact());
  }

 private:
  static std::size_t measured(const ForwardTiles& tiles, Index head_dim) {
    Carver carver;
    carver.take<std::byte>("tiles", tiles.query_tile_bytes(head_dim));
    carver.take<std::byte>("tiles", tiles.key_chunk_bytes(head_dim));
    carver.take<std::byte>("tiles", tiles.key_chunk_bytes(head_dim));
    carver.take<std::byte>("tiles", tiles.score_bytes);
    return at(carver.used_bytes());
  }
  void carve(Carver& carver, Index head_dim) {
    queries_ = carver.take<std::byte>("tiles", tiles_.query_tile_bytes(head_dim));
    keys_ = carver.take<std::byte>("tiles", tiles_.key_chunk_bytes(head_dim));
    values_ = carver.take<std::byte>("tiles", tiles_.key_chunk_bytes(head_dim));
    scores_ = carver.take<std::byte>("tiles", tiles_.score_bytes);
  }

  const ForwardTiles& tiles_;
  support::Workspace memory_;
  std::byte *queries_ = nullptr, *keys_ = nullptr, *values_ = nullptr, *scores_ = nullptr;
};

// Rows of the state against softmax in fp64 over the keys that each row sees. `precision`: of one weight.
void expect_softmax(State& state, const Matrix& q, const Matrix& k, const Matrix& v, double scale_log2, Index diagonal,
                    double precision) {
  const Index width = padded(q.head_dim());
  for (Index i = 0; i < q.rows(); ++i) {
    const Index visible = std::clamp<Index>(i + diagonal + 1, 0, k.rows());
    const std::size_t row = at(i * state.step);
    if (visible == 0) {
      EXPECT_EQ(state.maximum[row], kNothing);
      continue;
    }
    double sum = 0;
    std::vector<double> out(at(q.head_dim()));
    for (Index j = 0; j < visible; ++j) {
      const double weight = std::exp2(dot(q, k, i, j, scale_log2));
      sum += weight;
      for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * v(j, static_cast<Index>(d));
    }
    EXPECT_NEAR(static_cast<double>(state.maximum[row]) + std::log2(static_cast<double>(state.sum[row])),
                std::log2(sum), 1e-5);
    for (std::size_t d = 0; d < out.size(); ++d)
      ASSERT_NEAR(static_cast<double>(state.values[row * at(width) + d] / state.sum[row]), out[d] / sum, precision)
          << "row " << i << " of " << d;
  }
}

const std::vector<Index> kHeadDims{1, 3, 8, 15, 16, 17, 31, 40, 64, 80};

TEST(Tiles, AttendIsASoftmax) {
  std::mt19937_64 random(51);
  for (const Tiles* tiles : available_tiles())
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      for (const Index head_dim : kHeadDims) {
        const ForwardTiles& forward = dtype == DType::bf16 ? tiles->forward_bf16 : tiles->forward;
        const double precision = dtype == DType::bf16 ? 0x1p-7 : 2e-6;
        const auto scale_log2 =
            static_cast<float>((head_dim % 2 == 0 ? 1 : -1) * 1.44 / std::sqrt(static_cast<double>(head_dim)));
        ForwardScratch scratch(forward, head_dim);
        for (const Index query_count : {Index{1}, Index{5}, forward.query_tile - 1, forward.query_tile})
          for (const Index key_count : {Index{1}, Index{33}, forward.key_chunk}) {
            const Matrix q(dtype, query_count, head_dim, random), k(dtype, key_count, head_dim, random),
                v(dtype, key_count, head_dim, random);
            for (const Index diagonal : {kNoDiagonal, Index{0}, Index{-3}, key_count - query_count, key_count / 2}) {
              State state(query_count, head_dim, 1 + query_count % 2);
              scratch.attend(q, k, v, scale_log2, diagonal, state);
              SCOPED_TRACE(std::string(tiles->name) + " " + std::string(name(dtype)) + " D " +
                           std::to_string(head_dim) + " queries " + std::to_string(query_count) + " keys " +
                           std::to_string(key_count) + " diagonal " + std::to_string(diagonal));
              expect_softmax(state, q, k, v, static_cast<double>(scale_log2), diagonal, precision);
              if (HasFailure()) return;
            }
          }
      }
}

// Chunk after chunk is one softmax; the maximum may jump up or stay far above.
TEST(Tiles, AttendGoesOn) {
  std::mt19937_64 random(52);
  for (const Tiles* tiles : available_tiles())
    for (const double size : {1.0, 100.0}) {
      const ForwardTiles& forward = tiles->forward;
      const Index chunk = 40, chunks = 5, head_dim = 8;
      Matrix q(DType::fp32, 6, head_dim, random), k(DType::fp32, chunk * chunks, head_dim, random),
          v(DType::fp32, chunk * chunks, head_dim, random);
      for (Index i = 0; i < chunk * chunks * head_dim; ++i)
        k.values[at(i)] = round_to(DType::fp32, k.values[at(i)] * size);
      k.memory.fill(k.values);
      ForwardScratch scratch(forward, head_dim);
      State state(6, head_dim, 1);
      for (Index c = 0; c < chunks; ++c) {
        const auto part = [&](const Matrix& whole) {
          Matrix matrix(DType::fp32, chunk, head_dim, random);
          std::copy_n(whole.values.begin() + c * chunk * head_dim, chunk * head_dim, matrix.values.begin());
          matrix.memory.fill(matrix.values);
          return matrix;
        };
        scratch.attend(q, part(k), part(v), 1.0f, kNoDiagonal, state);
      }
      // Logits of 100s are known to 1e-5 only.
      for (Index i = 0; i < 6; ++i) {
        double top = -1e300, sum = 0, out = 0;
        for (Index j = 0; j < chunk * chunks; ++j) top = std::max(top, dot(q, k, i, j, 1));
        for (Index j = 0; j < chunk * chunks; ++j) {
          const double weight = std::exp2(dot(q, k, i, j, 1) - top);
          sum += weight;
          out += weight * v(j, 0);
        }
        EXPECT_NEAR(static_cast<double>(state.maximum[at(i)]) + std::log2(static_cast<double>(state.sum[at(i)])),
                    top + std::log2(sum), 2e-4);
        EXPECT_NEAR(static_cast<double>(state.values[at(i * padded(head_dim))] / state.sum[at(i)]), out / sum, 2e-3)
            << tiles->name;
      }
    }
}

// What makes the thread count irrelevant: a row's bits do not depend on the rows that share its tile.
TEST(Tiles, ARowIsAloneInItsTile) {
  std::mt19937_64 random(53);
  for (const Tiles* tiles : available_tiles())
    for (const DType dtype : {DType::fp32, DType::bf16})
      for (const bool causal : {false, true}) {
        const ForwardTiles& forward = dtype == DType::bf16 ? tiles->forward_bf16 : tiles->forward;
        const Index head_dim = 19, width = padded(head_dim), queries = forward.query_tile, keys = 100;
        Matrix q(dtype, queries, head_dim, random);
        const Matrix k(dtype, keys, head_dim, random), v(dtype, keys, head_dim, random);
        q.values[at(40 * head_dim)] = NAN;  // a neighbour's trouble is its own
        q.memory.fill(q.values);
        ForwardScratch scratch(forward, head_dim);
        State together(queries, head_dim, 1);
        scratch.attend(q, k, v, 0.3f, causal ? 7 : kNoDiagonal, together);
        for (const Index i : {Index{0}, Index{1}, Index{13}, Index{39}, Index{41}, queries - 1}) {
          Matrix one(dtype, 1, head_dim, random);
          std::copy_n(q.values.begin() + i * head_dim, head_dim, one.values.begin());
          one.memory.fill(one.values);
          State alone(1, head_dim, 1);
          scratch.attend(one, k, v, 0.3f, causal ? 7 + i : kNoDiagonal, alone);
          EXPECT_EQ(alone.maximum[0], together.maximum[at(i)]);
          EXPECT_EQ(alone.sum[0], together.sum[at(i)]) << tiles->name << " row " << i;
          EXPECT_EQ(std::memcmp(alone.values.data(), together.values.data() + i * width, at(width) * sizeof(float)), 0)
              << tiles->name << " row " << i;
        }
      }
}

// Weights can be read off where value j is the j-th unit vector: 2^x to a relative error of 2e-7, and nothing below
// 2^-126.
TEST(Tiles, WeightsArePowersOfTwo) {
  std::mt19937_64 random(54);
  constexpr Index kKeys = 16;
  for (const Tiles* tiles : available_tiles()) {
    ForwardScratch scratch(tiles->forward, kKeys);
    for (int round = 0; round < 200; ++round) {
      Matrix q(DType::fp32, 1, kKeys, random), k(DType::fp32, kKeys, kKeys, random),
          v(DType::fp32, kKeys, kKeys, random);
      std::uniform_real_distribution<double> exponent(-140, 0);
      std::fill(q.values.begin(), q.values.end(), 0.0);
      std::fill(k.values.begin(), k.values.end(), 0.0);
      std::fill(v.values.begin(), v.values.end(), 0.0);
      q.values[0] = 1;
      for (Index j = 0; j < kKeys; ++j) {
        k.values[at(j * kKeys)] =
            j == 0 ? 0 : round_to(DType::fp32, round % 2 == 0 ? exponent(random) : -static_cast<double>(j + round));
        v.values[at(j * kKeys + j)] = 1;
      }
      q.memory.fill(q.values);
      k.memory.fill(k.values);
      v.memory.fill(v.values);
      State state(1, kKeys, 1);
      scratch.attend(q, k, v, 1.0f, kNoDiagonal, state);
      ASSERT_EQ(state.maximum[0], 0.0f);
      for (Index j = 0; j < kKeys; ++j) {
        const double x = k(j, 0), weight = static_cast<double>(state.values[at(j)]);
        const double error = x >= -126 ? std::abs(weight / std::exp2(x) - 1) : 0;
        ASSERT_LE(error, 3e-7) << tiles->name << " 2^" << x;
        ASSERT_LE(weight, x >= -126 ? 1.0 : x > -128 ? 0x1p-126 : 0.0) << tiles->name << " 2^" << x;
      }
    }
  }
}

TEST(Tiles, AreKnownByName) {
  const std::vector<std::string> names = instruction_sets();
  ASSERT_EQ(names.size(), available_tiles().size());
  for (std::size_t i = 0; i < names.size(); ++i) EXPECT_EQ(find_tiles(names[i]).name, available_tiles()[i]->name);
  for (const char* best : {"", "auto"}) EXPECT_EQ(&find_tiles(best), available_tiles().front());
  const std::vector<std::string> known{"avx512_bf16", "avx512", "avx2", "neon", "portable"};
  for (const std::string& instruction_set : names)
    EXPECT_NE(std::find(known.begin(), known.end(), instruction_set), known.end()) << instruction_set;
  std::vector<std::string> parts = names;
  parts.insert(parts.end(), {"instruction set", "auto", "'sse9'"});
  support::expect_refused([] { find_tiles("sse9"); }, parts);
}

}  // namespace
}  // namespace annulus::cpu
