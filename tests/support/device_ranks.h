// The product on p ranks that share a GPU: shards go in, the whole result comes out. The counterpart of rank_call.h.
#pragma once

#include "annulus/device_transports.h"
#include "support/device_call.h"
#include "support/rank_call.h"

namespace annulus::support {

// How the ranks of a process share a GPU.
struct DeviceRanksWay {
  Options options = {.device = "cuda:0"};
  Layout layout = Layout::dense;
  bool aligned = true;
};

inline std::string describe(const DeviceRanksWay& way) {
  return "kernel " + (way.options.instruction_set.empty() ? "auto" : way.options.instruction_set) +
         (way.options.deterministic ? " deterministic" : "") + (way.aligned ? "" : " misaligned") + " layout " +
         std::to_string(static_cast<int>(way.layout));
}

// Memory of a GPU full of NaN.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(std::size_t bytes) : memory_(bytes) {
    if (bytes > 0) cuda::check(cudaMemset(memory_.data(), 0xff, bytes), "poison memory");
  }
  std::span<std::byte> span() const { return {memory_.data(), memory_.bytes()}; }

 private:
  cuda::DeviceBuffer memory_;
};

// Forward and backward of one rank. `own` are its rows.
inline std::string run_rank_on_device(const RankAttention& attention, Call& own, const DeviceRanksWay& way) {
  DeviceTensor q(own.q, way.aligned), k(own.k, way.aligned), v(own.v, way.aligned), dout(own.dout, way.aligned),
      out(own.out, way.aligned), dq(own.dq, way.aligned), dk(own.dk, way.aligned), dv(own.dv, way.aligned);
  const std::span<float> lse = own.lse.span();
  const PoisonedMemory lse_memory(lse.size_bytes()), forward(attention.workspace_bytes(Pass::forward)),
      backward(attention.workspace_bytes(Pass::backward));
  const cuda::Stream stream;
  cuda::check(cudaDeviceSynchronize(), "prepare");
  auto* numbers = reinterpret_cast<float*>(lse_memory.span().data());
  attention.forward({.q = q.view(),
                     .k = k.view(),
                     .v = v.view(),
                     .out = out.view(),
                     .lse = {numbers, lse.size()},
                     .workspace = forward.span(),
                     .stream = stream.get()});
  attention.backward({.q = q.view(),
                      .k = k.view(),
                      .v = v.view(),
                      .out = out.view(),
                      .lse = {numbers, lse.size()},
                      .dout = dout.view(),
                      .dq = dq.view(),
                      .dk = dk.view(),
                      .dv = dv.view(),
                      .workspace = backward.span(),
                      .stream = stream.get()});
  stream.wait();
  if (!lse.empty())
    cuda::check(cudaMemcpy(lse.data(), numbers, lse.size_bytes(), cudaMemcpyDeviceToHost), "copy lse back");
  std::string fault;
  for (const auto& [tensor, host, name] : {std::tuple{&out, &own.out, "out"}, std::tuple{&dq, &own.dq, "dq"},
                                           std::tuple{&dk, &own.dk, "dk"}, std::tuple{&dv, &own.dv, "dv"}}) {
    tensor->bring_back();
    if (fault.empty()) fault = host->faults(name);
  }
  return fault.empty() ? own.lse.faults() : fault;
}

inline ShardResult compute_shard_on_device(const Problem& problem, const reference::Inputs& inputs,
                                           const Sharding& sharding, Transport& transport, RankOptions options,
                                           const DeviceRanksWay& way) {
  options.device = way.options;
  const RankAttention attention(problem, sharding, transport, options);
  const ShardOfVector shard(attention.positions(), problem.batch, problem.tokens);
  const std::int64_t q_row = problem.heads * problem.head_dim, k_row = problem.kv_heads * problem.head_dim;
  Problem local = problem;
  local.tokens = attention.rows();
  local.documents = {0, local.tokens};
  Call own(local,
           {.q = shard.take(inputs.q, q_row),
            .k = shard.take(inputs.k, k_row),
            .v = shard.take(inputs.v, k_row),
            .dout = shard.take(inputs.dout, q_row)},
           {.options = {}, .inputs = way.layout, .outputs = way.layout});
  ShardResult result;
  result.fault = run_rank_on_device(attention, own, way);
  result.result = own.result();
  result.counted = {transport.sent_bytes(), transport.received_bytes()};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    result.planned.sent_bytes += attention.traffic(pass).sent_bytes;
    result.planned.received_bytes += attention.traffic(pass).received_bytes;
  }
  return result;
}

inline RankResult compute_on_device_ranks(const Problem& problem, const reference::Inputs& inputs,
                                          const Sharding& given, const RankOptions& options,
                                          const DeviceRanksWay& way = {}) {
  const Sharding sharding = resolve(given, problem.tokens);
  auto transports = make_device_thread_group(sharding.ranks, std::vector<int>(static_cast<std::size_t>(sharding.ranks)),
                                             {.timeout = std::chrono::seconds(30)});
  std::vector<ShardResult> shards(static_cast<std::size_t>(sharding.ranks));
  const auto errors = run_ranks(sharding.ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    shards[r] = compute_shard_on_device(problem, inputs, sharding, *transports[r], options, way);
  });
  return put_together(problem, sharding, shards, errors);
}

}  // namespace annulus::support
