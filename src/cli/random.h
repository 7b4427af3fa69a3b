// Inputs out of nothing: normal(0, 1) values that depend on (seed, tensor, global index) alone.
//
// Philox4x32-10 is a counter-based generator: a keyed bijection of 128-bit counters, so element i needs no element
// before it, and any thread or rank may draw any part. Uniform bits become normal values by Box and Muller's method,
// with own series for the logarithm and the circle: libm differs from machine to machine in the last bit, these do not.
#pragma once

#include <array>
#include <cstdint>

#include "annulus/tensor.h"
#include "cli/shard_map.h"

namespace annulus::cli {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key);

// Which tensor: its own stream of the same seed.
enum class Stream : std::uint32_t { q, k, v, dout };

// Element `index` of the tensor, before it is rounded to the tensor's type.
float normal_value(std::uint64_t seed, Stream stream, std::int64_t index);

// The rows of one shard of a dense tensor, of shape.inner elements each.
void fill_normal(std::uint64_t seed, Stream stream, DType dtype, void* data, const ShardMap& shard,
                 const RowShape& shape, int threads);
// Elements [0, count) of a dense tensor.
void fill_normal(std::uint64_t seed, Stream stream, DType dtype, void* data, std::int64_t count, int threads);

}  // namespace annulus::cli
