// The product on p ranks in one process: shards go in, the whole result comes out.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "annulus/ranks.h"
#include "plan/shard.h"
#include "reference/reference.h"
#include "support/call.h"
#include "transport/threads.h"

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

struct RankResult {
  reference::Result result;
  std::vector<RankTraffic> planned, counted;  // of each rank, both passes together
  std::string fault;                          // what a rank did to memory that it should not have
};

inline std::vector<std::int64_t> positions_of(const Sharding& sharding, std::int64_t tokens, int rank) {
  std::vector<std::int64_t> positions;
  for (const Rows& piece : pieces_of(sharding, tokens, rank))
    for (std::int64_t i = 0; i < piece.count; ++i) positions.push_back(piece[i]);
  return positions;
}

// Forward and backward of a resolved problem. Throws what the first rank threw that did.
inline RankResult compute_on_ranks(const Problem& problem, const reference::Inputs& inputs, const Sharding& given,
                                   const RankOptions& options, const Way& way = {}) {
  const Sharding sharding = resolve(given, problem.tokens);
  const auto ranks = static_cast<std::size_t>(sharding.ranks);
  const std::int64_t q_row = problem.heads * problem.head_dim, k_row = problem.kv_heads * problem.head_dim;
  RankResult all;
  all.planned.resize(ranks);
  all.counted.resize(ranks);
  const auto tokens = static_cast<std::size_t>(problem.batch * problem.tokens);
  for (std::vector<double>* tensor : {&all.result.out, &all.result.dq})
    tensor->resize(tokens * static_cast<std::size_t>(q_row));
  for (std::vector<double>* tensor : {&all.result.dk, &all.result.dv})
    tensor->resize(tokens * static_cast<std::size_t>(k_row));
  all.result.lse.resize(tokens * static_cast<std::size_t>(problem.heads));

  auto transports = make_thread_group(sharding.ranks);
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<std::string> faults(ranks);
  const auto run_rank = [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    Transport& transport = *transports[r];
    RankOptions rank_options = options;
    rank_options.device = way.options;
    const RankAttention attention(problem, sharding, transport, rank_options);
    const ShardOfVector shard(positions_of(sharding, problem.tokens, rank), problem.batch, problem.tokens);
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
    faults[r] = call.fault();
    const reference::Result result = call.result();
    shard.put(result.out, q_row, all.result.out);
    shard.put(result.dq, q_row, all.result.dq);
    shard.put(result.dk, k_row, all.result.dk);
    shard.put(result.dv, k_row, all.result.dv);
    shard.of_lse(problem.heads).put(result.lse, 1, all.result.lse);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      all.planned[r].sent_bytes += attention.traffic(pass).sent_bytes;
      all.planned[r].received_bytes += attention.traffic(pass).received_bytes;
    }
    all.counted[r] = {transport.sent_bytes(), transport.received_bytes()};
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < sharding.ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        run_rank(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  for (const std::string& fault : faults)
    if (!fault.empty()) all.fault = fault;
  return all;
}

}  // namespace annulus::support
