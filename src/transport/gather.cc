#include "transport/gather.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "transport/trouble.h"

namespace annulus {
namespace {

class Gathering {
 public:
  Gathering(int rank, int size, const std::function<void(const Exchange&)>& run)
      : rank_(rank), size_(size), run_(run) {}

  // Every rank's item, this rank's first, then those of rank + 1, ... `lengths` has them in the same order.
  std::vector<std::byte> items(std::span<const std::byte> own, const std::vector<std::uint64_t>& lengths) {
    std::vector<std::byte> all(std::accumulate(lengths.begin(), lengths.end(), std::size_t{0}));
    std::ranges::copy(own, all.begin());
    for (int have = 1; have < size_; ++round_) {
      const int more = std::min(have, size_ - have);
      const std::size_t sent = bytes_of(lengths, more);
      const std::span received =
          std::span(all).subspan(bytes_of(lengths, have), bytes_of(lengths, have + more) - bytes_of(lengths, have));
      run_({.plan = kGatherPlan,
            .step = round_,
            .sends = {{.peer = (rank_ + size_ - have) % size_,
                       .blocks = {{.data = all.data(), .run_bytes = static_cast<std::int64_t>(sent)}}}},
            .receives = {{.peer = (rank_ + have) % size_, .bytes = received}}});
      have += more;
    }
    return all;
  }

 private:
  static std::size_t bytes_of(const std::vector<std::uint64_t>& lengths, int first) {
    return std::accumulate(lengths.begin(), lengths.begin() + first, std::size_t{0});
  }

  int rank_;
  int size_;
  const std::function<void(const Exchange&)>& run_;
  std::int64_t round_ = 0;
};

}  // namespace

std::vector<std::string> gather_texts(int rank, int size, const std::string& text,
                                      const std::function<void(const Exchange&)>& run) {
  Gathering gathering(rank, size, run);
  const auto count = static_cast<std::size_t>(size);
  const std::uint64_t length = text.size();
  std::vector<std::uint64_t> lengths(count, sizeof length);
  const std::vector<std::byte> raw = gathering.items(std::as_bytes(std::span(&length, 1)), lengths);
  std::memcpy(lengths.data(), raw.data(), raw.size());

  const std::vector<std::byte> all = gathering.items(std::as_bytes(std::span(text)), lengths);
  std::vector<std::string> texts(count);
  const char* at = reinterpret_cast<const char*>(all.data());
  for (std::size_t i = 0; i < count; ++i) {
    texts[(static_cast<std::size_t>(rank) + i) % count].assign(at, lengths[i]);
    at += lengths[i];
  }
  return texts;
}

}  // namespace annulus
