// A checksum of a tensor's bits in global order, to compare runs without files.
//
//   checksum = sum over i of mix(bits_i + (i + 1) * 0x9e3779b97f4a7c15)   modulo 2^64
//
// bits_i is element i's bit pattern as an unsigned number, i its index in the dense tensor, mix the finaliser of
// SplitMix64. Being a sum, it can be taken in parts by whoever holds the elements: threads, ranks, in any order.
#pragma once

#include <cstdint>
#include <string>

#include "cli/shard_map.h"

namespace annulus::cli {

// Of `count` elements of 2 or 4 bytes.
std::uint64_t checksum(const void* data, std::int64_t element_bytes, std::int64_t count, int threads);

// The part of that sum that the rows of one shard add.
std::uint64_t checksum(const void* data, std::int64_t element_bytes, const ShardMap& shard, const RowShape& shape,
                       int threads);

// 16 hexadecimal digits.
std::string checksum_text(std::uint64_t value);

}  // namespace annulus::cli
