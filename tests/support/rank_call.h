// The product on p ranks in one process: shards go in, the whole result comes out.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "annulus/ranks.h"
#include "annulus/thread_group.h"
#include "plan/shard.h"
#include "reference/reference.h"
#include "support/call.h"

namespace annulus::support {

// Copies rows of a tensor [batch, tokens, heads * head_dim] out of the whole, or back into it.
class ShardOfVector {
 public:
  ShardOfVector(std::vector<std::int64_t> positions, std::int64_t batch, std::int64_t tokens)
      : positions_(std::move(positions)), batch_(batch), tokens_(tokens) {}

  std::vector<double> take(const std::vector<double>& whole, std::int64_t row) const {
    std::vector<double> part;
    for_each_row(row, [&](std::size_t from, std::size_t) {
      part.insert(part.end(), whole.begin() + static_cast<std::ptrdiff_t>(from),
                  whole.begin() + static_cast<std::ptrdiff_t>(from) + row);
    });
    return part;
  }
  void put(const std::vector<double>& part, std::int64_t row, std::vector<double>& whole) const {
    for_each_row(row, [&](std::size_t to, std::size_t from) {
      std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(from), row,
                  whole.begin() + static_cast<std::ptrdiff_t>(to));
    });
  }
  // [batch, heads, tokens] is a batch of batch * heads sequences of rows of one.
  ShardOfVector of_lse(std::int64_t heads) const { return {positions_, batch_ * heads, tokens_}; }

 private:
  template <class F>
  void for_each_row(std::int64_t row, F f) const {
    std::size_t local = 0;
    for (std::int64_t b = 0; b < batch_; ++b)
      for (const std::int64_t position : positions_) {
        f(static_cast<std::size_t>((b * tokens_ + position) * row), local);
        local += static_cast<std::size_t>(row);
      }
  }

  std::vector<std::int64_t> positions_;
  std::int64_t batch_;
  std::int64_t tokens_;
};

inline std::vector<std::int64_t> positions_of(const Sharding& sharding, std::int64_t tokens, int rank) {
  std::vector<std::int64_t> positions;
  for (const Rows& piece : pieces_of(sharding, tokens, rank))
    for (std::int64_t i = 0; i < piece.count; ++i) positions.push_back(piece[i]);
  return positions;
}

inline std::string describe(const Sharding& sharding, const RankOptions& options) {
  std::string text = " on " + std::to_string(sharding.ranks) + " ranks, " + std::string(name(sharding.layout)) + ", " +
                     std::string(name(options.strategy)) + ", slots of " + std::to_string(options.slot_bytes);
  for (const std::int64_t boundary : sharding.boundaries) text += " " + std::to_string(boundary);
  return text;
}

// What one rank computed, and what it moved in both passes together.
struct ShardResult {
  reference::Result result;  // of its own rows
  RankTraffic planned, counted;
  std::string fault;  // what it did to memory that it should not have
};

inline ShardResult compute_shard(const Problem& problem, const reference::Inputs& inputs, const Sharding& sharding,
                                 Transport& transport, RankOptions options, const Way& way) {
  const std::int64_t q_row = problem.heads * problem.head_dim, k_row = problem.kv_heads * problem.head_dim;
  options.device = way.options;
  const RankAttention attention(problem, sharding, transport, options);
  const ShardOfVector shard(attention.positions(), problem.batch, problem.tokens);
  Problem local = problem;
  local.tokens = attention.rows();
  local.documents = {0, local.tokens};
  Call call(local,
            {.q = shard.take(inputs.q, q_row),
             .k = shard.take(inputs.k, k_row),
             .v = shard.take(inputs.v, k_row),
             .dout = shard.take(inputs.dout, q_row)},
            way);
  call.forward(attention);
  call.backward(attention);
  ShardResult result{call.result(), {}, {transport.sent_bytes(), transport.received_bytes()}, call.fault()};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const RankTraffic traffic = attention.traffic(pass);
    result.planned.sent_bytes += traffic.sent_bytes;
    result.planned.received_bytes += traffic.received_bytes;
  }
  return result;
}

// The whole from the results of all ranks.
inline reference::Result assemble(const Problem& problem, const Sharding& sharding,
                                  const std::vector<reference::Result>& parts) {
  const std::int64_t q_row = problem.heads * problem.head_dim, k_row = problem.kv_heads * problem.head_dim;
  const auto sized = [&](std::int64_t row) {
    return std::vector<double>(static_cast<std::size_t>(problem.batch * problem.tokens * row));
  };
  reference::Result whole{
      .out = sized(q_row), .lse = sized(problem.heads), .dq = sized(q_row), .dk = sized(k_row), .dv = sized(k_row)};
  for (int rank = 0; rank < sharding.ranks; ++rank) {
    const ShardOfVector shard(positions_of(sharding, problem.tokens, rank), problem.batch, problem.tokens);
    const reference::Result& part = parts[static_cast<std::size_t>(rank)];
    shard.put(part.out, q_row, whole.out);
    shard.put(part.dq, q_row, whole.dq);
    shard.put(part.dk, k_row, whole.dk);
    shard.put(part.dv, k_row, whole.dv);
    shard.of_lse(problem.heads).put(part.lse, 1, whole.lse);
  }
  return whole;
}

// Runs f(rank) in a thread for each rank. Returns what each threw.
template <class F>
std::vector<std::exception_ptr> run_ranks(int ranks, F f) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        f(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

struct RankResult {
  reference::Result result;
  std::vector<RankTraffic> planned, counted;  // of each rank
  std::string fault;
};

// Throws what the first rank threw that did.
inline RankResult put_together(const Problem& problem, const Sharding& sharding, const std::vector<ShardResult>& shards,
                               const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  RankResult all;
  std::vector<reference::Result> parts;
  for (const ShardResult& shard : shards) {
    parts.push_back(shard.result);
    all.planned.push_back(shard.planned);
    all.counted.push_back(shard.counted);
    if (!shard.fault.empty()) all.fault = shard.fault;
  }
  all.result = assemble(problem, sharding, parts);
  return all;
}

// "" or which rank moved other bytes than its plan said.
inline std::string traffic_faults(const RankResult& ranks) {
  std::string fault;
  std::int64_t sent = 0, received = 0;
  for (std::size_t r = 0; r < ranks.planned.size(); ++r) {
    const RankTraffic &counted = ranks.counted[r], &planned = ranks.planned[r];
    if (planned != counted)
      fault += "rank " + std::to_string(r) + " moved " + std::to_string(counted.sent_bytes) + " and " +
               std::to_string(counted.received_bytes) + " bytes, planned " + std::to_string(planned.sent_bytes) +
               " and " + std::to_string(planned.received_bytes) + "; ";
    sent += counted.sent_bytes;
    received += counted.received_bytes;
  }
  return sent == received ? fault : fault + "sent is not received; ";
}

// Forward and backward of a resolved problem, on threads.
inline RankResult compute_on_ranks(const Problem& problem, const reference::Inputs& inputs, const Sharding& given,
                                   const RankOptions& options, const Way& way = {}) {
  const Sharding sharding = resolve(given, problem.tokens);
  auto transports = make_thread_group(sharding.ranks);
  std::vector<ShardResult> shards(static_cast<std::size_t>(sharding.ranks));
  const auto errors = run_ranks(sharding.ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    shards[r] = compute_shard(problem, inputs, sharding, *transports[r], options, way);
  });
  return put_together(problem, sharding, shards, errors);
}

}  // namespace annulus::support
