#include "exec/agreement.h"
#include "kernels/device.h"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <sstream>

namespace annulus {
namespace {

template <class T>
std::string list(const std::vector<T>& values) {
  std::ostringstream text;
  for (std::size_t i = 0; i < values.size(); ++i) text << (i > 0 ? "," : "") << values[i];
  return text.str();
}

std::uint64_t hash(const std::string& text) {  // FNV-1a
  std::uint64_t value = 0xcbf29ce484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return value;
}

// The first line in which the two differ, of each.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream left(a), right(b);
  std::string x, y;
  for (;;) {
    const bool more_left = static_cast<bool>(std::getline(left, x));
    const bool more_right = static_cast<bool>(std::getline(right, y));
    if (!more_left) x = "nothing more";
    if (!more_right) y = "nothing more";
    if (x != y || (!more_left && !more_right)) return {x, y};
  }
}

}  // namespace

std::string describe(const Problem& problem, const Sharding& sharding, const RankOptions& options) {
  std::ostringstream text;
  text << std::setprecision(17);
  text << "version = " << version() << "\nranks = " << sharding.ranks << "\nbatch = " << problem.batch
       << "\ntokens = " << problem.tokens << "\nlayout = " << name(sharding.layout)
       << "\nboundaries = " << list(sharding.boundaries) << "\nstrategy = " << name(options.strategy)
       << "\nslot_bytes = " << options.slot_bytes << "\nheads = " << problem.heads
       << "\nkv_heads = " << problem.kv_heads << "\nhead_dim = " << problem.head_dim
       << "\ndtype = " << name(problem.dtype) << "\ncausal = " << problem.causal << "\nscale = " << *problem.scale
       << "\ndocuments = " << list(problem.documents) << "\nphase = " << name(problem.pattern.phase)
       << "\ngradient = " << name(problem.pattern.gradient) << "\noutput_scale = " << problem.pattern.output_scale
       << "\npad_like_torchscale = " << problem.pattern.pad_like_torchscale << "\n";
  text << "reproducible = " << options.reproducible
       << "\ndevice = " << (parse_device(options.device.device).is_gpu ? "cuda" : "cpu") << "\n";
  for (const Strategy strategy : options.branches) text << "branch strategy = " << name(strategy) << "\n";
  for (const Branch& branch : problem.pattern.branches)
    text << "branch = segment " << branch.segment << ", dilation " << branch.dilation << ", heads " << branch.first_head
         << " + " << branch.head_count << ", classes " << list(branch.classes) << "\n";
  return text.str();
}

std::uint64_t agree(Transport& transport, const std::string& text) {
  // Texts may be long, and ranks many: they travel only where they differ.
  const std::uint64_t own = hash(text);
  const std::vector<std::string> hashes = transport.all_gather(std::to_string(own));
  if (std::adjacent_find(hashes.begin(), hashes.end(), std::not_equal_to<>()) == hashes.end()) return own;
  const std::vector<std::string> all = transport.all_gather(text);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto [first, other] = first_difference(all[0], all[rank]);
    throw TransportError("all ranks must have the same problem; got '" + first + "' on rank 0 and '" + other +
                         "' on rank " + std::to_string(rank) + ": give every rank the same options");
  }
  return own;
}

}  // namespace annulus
