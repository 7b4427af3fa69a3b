// Dilated attention over p ranks. Each is given its own rows of q, k, v and dout, in the order of its shard, and gives
// back its own rows of out, lse, dq, dk and dv: the rows that one rank alone would have computed.
//
//   annulus::RankAttention attention(problem, {.ranks = 4}, transport);
//   attention.forward({.q = q, .k = k, .v = v, .out = out, .lse = lse});   // all [batch, rows(), heads, head_dim]
//
// All ranks make the same calls in the same order. When one of them fails, the others get a TransportError that names
// it; the transport is then of no more use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/attention.h"
#include "annulus/recorder.h"

namespace annulus {

class Transport;

// Who owns which positions (docs/semantics.md, section 6).
enum class Layout {
  contiguous,  // one block a rank, any boundaries
  zigzag,      // 2p blocks, rank g has blocks g and 2p - 1 - g: a causal load that is even
  striped,     // rank g has the positions that are g modulo p
};

std::string_view name(Layout layout);
Layout parse_layout(std::string_view text);  // throws InvalidArgument

struct Sharding {
  int ranks = 1;
  Layout layout = Layout::contiguous;
  // Contiguous alone: rank g has [boundaries[g], boundaries[g + 1]). Empty: as even as whole positions allow.
  std::vector<std::int64_t> boundaries = {};

  bool operator==(const Sharding&) const = default;
};

// How keys meet queries. The result is the same, but for rounding.
enum class Strategy {
  automatic,   // "auto": for each branch the one that moves the fewest bytes, if all ranks get as much to do
  exchange,    // only the rows that a rank's queries can see, straight from their owner
  reshard,     // a segment over several ranks is dealt out by class, and each class made whole on one of them
  ring,        // every block of keys hops past every rank that needs it or has to pass it on
  gather,      // everything at once: the collective baseline, O(N) memory
  replicated,  // every rank has all queries and some of the keys; partial results travel
};

std::string_view name(Strategy strategy);
Strategy parse_strategy(std::string_view text);  // throws InvalidArgument

struct RankOptions {
  Options device = {};
  Strategy strategy = Strategy::automatic;
  // One a branch: reshard for some, one other strategy for the rest. Empty: `strategy` for all.
  std::vector<Strategy> branches = {};
  // What arrives at once is cut to about this, except by gather, and by reshard, which holds what is dealt out whole.
  std::int64_t slot_bytes = std::int64_t{32} << 20;
  // The same bits for every number of ranks and layout. Needs memory for all rows from the first to the last of the
  // segments that the rank has rows in: of zigzag and striped shards that is the sequence.
  bool reproducible = false;
  Recorder* recorder = nullptr;  // may be null
};

struct RankTraffic {
  std::int64_t sent_bytes = 0;
  std::int64_t received_bytes = 0;

  bool operator==(const RankTraffic&) const = default;
};

class RankAttention {
 public:
  // A collective: ranks that were given different things all throw a TransportError that says who and what. The
  // transport must outlive the attention.
  RankAttention(const Problem& problem, const Sharding& sharding, Transport& transport,
                const RankOptions& options = {});
  ~RankAttention();
  RankAttention(RankAttention&&) noexcept;
  RankAttention& operator=(RankAttention&&) noexcept;

  void forward(const ForwardArgs& args) const;
  void backward(const BackwardArgs& args) const;

  std::int64_t rows() const;        // of this rank: of k, v, dk, dv
  std::int64_t query_rows() const;  // of q, out, lse, dout, dq: the same, or all of them where queries are replicated
  std::vector<std::int64_t> positions() const;  // of its rows, in the order of its memory
  const Problem& problem() const;               // resolved
  std::size_t workspace_bytes(Pass pass) const;
  // Everything that a pass holds on this rank, tensors included, to the byte; without what the transport takes.
  std::vector<MemoryComponent> memory(Pass pass) const;
  // Payload that a pass moves from and to this rank.
  RankTraffic traffic(Pass pass) const;
  const std::vector<Strategy>& strategies() const;  // of each branch: never automatic
  int threads() const;
  std::string instruction_set() const;  // the one in use

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus
