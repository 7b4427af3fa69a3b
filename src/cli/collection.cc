#include "cli/collection.h"

#include <algorithm>
#include <cstring>

namespace annulus::cli {
namespace {

constexpr std::int64_t kWindowBytes = std::int64_t{4} << 20;
constexpr std::uint64_t kTensorPlan = 0x636f6c6c6563745f;  // names of plans in messages
constexpr std::uint64_t kTextPlan = 0x746578745f746f30;

// Rows of one shard inside a window: `count` of them from row `memory` of [outer * rows] on, which are rows `first`,
// `first` + stride, ... of the window.
struct Stretch {
  std::int64_t memory = 0;
  std::int64_t first = 0;
  std::int64_t stride = 1;
  std::int64_t count = 0;
};

// The window is rows [begin, end) of [outer * tokens].
std::vector<Stretch> stretches_of(const ShardMap& shard, std::int64_t begin, std::int64_t end) {
  std::vector<Stretch> result;
  const std::int64_t rows = shard.rows();
  for (std::int64_t outer = begin / shard.tokens; outer * shard.tokens < end; ++outer) {
    const std::int64_t start = outer * shard.tokens;
    std::int64_t before = 0;  // rows of earlier pieces
    for (const Rows& piece : shard.pieces) {
      const Rows inside = cut(piece, begin - start, end - start);
      if (!inside.empty())
        result.push_back({outer * rows + before + lower_index(piece, inside.first), start + inside.first - begin,
                          inside.stride, inside.count});
      before += piece.count;
    }
  }
  return result;
}

void place(const std::vector<Stretch>& stretches, const std::byte* source, bool packed, std::int64_t row_bytes,
           std::byte* window) {
  for (const Stretch& stretch : stretches) {
    const std::byte* from = packed ? source : source + stretch.memory * row_bytes;
    if (stretch.stride == 1)
      std::memcpy(window + stretch.first * row_bytes, from, static_cast<std::size_t>(stretch.count * row_bytes));
    else
      for (std::int64_t i = 0; i < stretch.count; ++i)
        std::memcpy(window + (stretch.first + i * stretch.stride) * row_bytes, from + i * row_bytes,
                    static_cast<std::size_t>(row_bytes));
    if (packed) source += stretch.count * row_bytes;
  }
}

std::int64_t bytes_of(const std::vector<Stretch>& stretches, std::int64_t row_bytes) {
  std::int64_t rows = 0;
  for (const Stretch& stretch : stretches) rows += stretch.count;
  return rows * row_bytes;
}

}  // namespace

void collect(Transport& transport, const std::vector<ShardMap>& shards, const LocalRows& rows,
             const std::function<void(std::span<const std::byte>)>& sink) {
  const std::int64_t tokens = shards.front().tokens;
  const std::int64_t all = rows.outer * tokens;
  if (all == 0 || rows.row_bytes == 0) return;
  if (transport.size() == 1) return sink({rows.data, static_cast<std::size_t>(all * rows.row_bytes)});

  const std::int64_t step = std::max<std::int64_t>(1, kWindowBytes / rows.row_bytes);
  const bool is_root = transport.rank() == 0;
  std::vector<std::byte> window, arrived;
  if (is_root) window.resize(static_cast<std::size_t>(std::min(step, all) * rows.row_bytes));
  if (is_root) arrived.resize(window.size());
  for (std::int64_t begin = 0; begin < all; begin += step) {
    const std::int64_t end = std::min(all, begin + step);
    Exchange exchange{.plan = kTensorPlan, .step = begin / step, .sends = {}, .receives = {}};
    const auto own = stretches_of(shards[static_cast<std::size_t>(transport.rank())], begin, end);
    if (!is_root) {
      if (own.empty()) continue;
      Send send{.peer = 0, .blocks = {}};
      for (const Stretch& stretch : own)
        send.blocks.push_back({rows.data + stretch.memory * rows.row_bytes, {}, stretch.count * rows.row_bytes});
      exchange.sends.push_back(std::move(send));
      transport.post(exchange);
      transport.wait();
      continue;
    }
    std::byte* here = arrived.data();
    std::vector<std::vector<Stretch>> theirs(shards.size());
    for (std::size_t peer = 1; peer < shards.size(); ++peer) {
      theirs[peer] = stretches_of(shards[peer], begin, end);
      const std::int64_t bytes = bytes_of(theirs[peer], rows.row_bytes);
      if (bytes == 0) continue;
      exchange.receives.push_back({static_cast<int>(peer), {here, static_cast<std::size_t>(bytes)}});
      here += bytes;
    }
    if (!exchange.receives.empty()) {
      transport.post(exchange);
      transport.wait();
    }
    place(own, rows.data, false, rows.row_bytes, window.data());
    for (const Receive& receive : exchange.receives)
      place(theirs[static_cast<std::size_t>(receive.peer)], receive.bytes.data(), true, rows.row_bytes, window.data());
    sink({window.data(), static_cast<std::size_t>((end - begin) * rows.row_bytes)});
  }
}

std::vector<std::string> collect_texts(Transport& transport, const std::string& text) {
  const std::vector<std::string> lengths = transport.all_gather(std::to_string(text.size()));
  if (transport.rank() > 0) {
    if (text.empty()) return {};
    const StridedBlock block{
        reinterpret_cast<const std::byte*>(text.data()), {}, static_cast<std::int64_t>(text.size())};
    transport.post(
        {.plan = kTextPlan, .step = transport.rank(), .sends = {{.peer = 0, .blocks = {block}}}, .receives = {}});
    transport.wait();
    return {};
  }
  std::vector<std::string> texts = {text};
  for (int peer = 1; peer < transport.size(); ++peer) {
    std::string& other = texts.emplace_back(std::stoull(lengths[static_cast<std::size_t>(peer)]), '\0');
    if (other.empty()) continue;
    transport.post(
        {.plan = kTextPlan, .step = peer, .sends = {}, .receives = {{peer, std::as_writable_bytes(std::span(other))}}});
    transport.wait();
  }
  return texts;
}

}  // namespace annulus::cli
