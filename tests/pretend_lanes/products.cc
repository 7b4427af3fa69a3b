#include "pretend_lanes/products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

namespace annulus::machine {
namespace {

constexpr int kDepth = 16;  // what one instruction sums over
constexpr int kRows = 16;   // of a warp
constexpr int kMostColumns = 256;

struct Scratch {
  float a[kRows][kDepth], b[kMostColumns * kDepth], turned[kDepth][kMostColumns], sums[kRows][kMostColumns];
};
[[gnu::noinline]] Scratch& scratch() {  // sanitizers make every look at it dear, so there is one
  static thread_local Scratch of_thread;
  return of_thread;
}

float number(std::uint16_t bits, bool is_fp16) { return is_fp16 ? __half{bits} : __nv_bfloat16{bits}; }

// An operand's rows (of A) or columns (of B) as [row][16], from `first` on.
void read(const Operand& operand, int first, int count, bool is_fp16, float* to) {
  const std::uint64_t d = operand.descriptor;
  const auto field = [&](int shift) { return static_cast<std::uint32_t>(d >> shift & 0x3fff) * 16; };
  const std::uint32_t start = field(0), leading = field(16), stride = field(32);
  const bool swizzled = d >> 62 == 1;
  if (!swizzled && d >> 62 != 0) fail("a descriptor of a layout that no kernel here uses");
  if (!swizzled && operand.along) fail("a plain operand that is stored along its rows");
  const auto eight = [&](std::uint32_t offset) {  // neighbours in memory
    std::uint32_t address = start + offset;
    if (swizzled) address ^= (address >> 7 & 7) << 4;
    return reinterpret_cast<const std::uint16_t*>(shared_place(address, 16));
  };
  const auto row_of = [&](int row) { return static_cast<std::uint32_t>(first + row); };
  for (int row = 0; row < count; row += operand.along ? 8 : 1)
    for (int k = 0; k < kDepth; k += operand.along ? 1 : 8) {
      const std::uint32_t i = row_of(row), j = static_cast<std::uint32_t>(k);
      const std::uint16_t* const from = operand.along
                                            ? eight(i / 64 * leading + j / 8 * stride + j % 8 * 128 + i % 64 * 2)
                                        : swizzled ? eight(i / 8 * stride + i % 8 * 128 + j * 2)
                                                   : eight(i / 8 * stride + j / 8 * leading + i % 8 * 16 + j % 8 * 2);
      for (int e = 0; e < 8; ++e)
        to[(operand.along ? row + e : row) * kDepth + (operand.along ? k : k + e)] = number(from[e], is_fp16);
    }
}

}  // namespace

// A lane has rows lane / 4 and lane / 4 + 8 of A and D, columns 2 (lane % 4) and the next one of D, column lane / 4 of
// B. Of the summed index it has a pair from 2 (lane % 4) on and one 8 further; of TF32, one number a word, half as
// many.
void multiply(Number number_of, const LaneRegisters* lanes) {
  constexpr int kColumns = 8;
  float a[kRows][kDepth], b[kDepth][kColumns], sums[kRows][kColumns];
  const bool is_tf32 = number_of == Number::tf32, is_fp16 = number_of == Number::fp16;
  const int depth = is_tf32 ? kDepth / 2 : kDepth;
  const auto each_number = [&](std::uint32_t word, int quad, int half, auto put) {
    if (is_tf32) return put(quad + 4 * half, __uint_as_float(word & 0xffffe000u));
    put(2 * quad + 8 * half, number(static_cast<std::uint16_t>(word), is_fp16));
    put(2 * quad + 8 * half + 1, number(static_cast<std::uint16_t>(word >> 16), is_fp16));
  };
  const auto each_sum = [&](auto f) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) f(lanes[lane].d[i], sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  };
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i)
      each_number(lanes[lane].a[i], lane % 4, i / 2, [&](int k, float x) { a[lane / 4 + i % 2 * 8][k] = x; });
    for (int i = 0; i < 2; ++i) each_number(lanes[lane].b[i], lane % 4, i, [&](int k, float x) { b[k][lane / 4] = x; });
  }
  each_sum([](const float& d, float& sum) { sum = d; });
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < kColumns; ++n) sums[row][n] += a[row][k] * b[k][n];
  each_sum([](float& d, const float& sum) { d = sum; });
}

void multiply(const Product& product, const Fragments& fragments) {
  auto& [a, b, turned, sums] = scratch();
  const int columns = product.columns;
  if (product.a_is_shared)
    read(product.a, fragments.first_row, kRows, product.is_fp16, a[0]);
  else
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t pair = fragments.a[lane][i];
        float* const to = &a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
        to[0] = number(static_cast<std::uint16_t>(pair), product.is_fp16);
        to[1] = number(static_cast<std::uint16_t>(pair >> 16), product.is_fp16);
      }
  read(product.b, 0, columns, product.is_fp16, b);
  for (int n = 0; n < columns; ++n)
    for (int k = 0; k < kDepth; ++k) turned[k][n] = b[n * kDepth + k];

  // A lane has columns 2 (lane % 4) and the next one of every 8, of rows lane / 4 and lane / 4 + 8.
  const auto each = [&](auto f) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < columns / 2; ++i)
        f(fragments.d[lane][i], sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
  };
  if (product.accumulates)
    each([](const float& d, float& sum) { sum = d; });
  else
    std::memset(sums, 0, sizeof(sums));
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth; ++k) {
      const float x = a[row][k];
      for (int n = 0; n < columns; ++n) sums[row][n] += x * turned[k][n];
    }
  each([](float& d, const float& sum) { d = sum; });
}

}  // namespace annulus::machine
