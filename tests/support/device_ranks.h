// The product on p ranks that share a GPU: shards go in, the whole result comes out. The counterpart of rank_call.h. It
// asks the backend for everything, so that it serves GPUs and pretend ones.
#pragma once

#include <gtest/gtest.h>

#include "annulus/device_transports.h"
#include "kernels/cuda/load.h"
#include "support/rank_call.h"

namespace annulus::support {

// Skips where there is no GPU, and says why.
class OnSomeGpu : public testing::Test {
 protected:
  void SetUp() override {
    try {
      (void)cuda::load_backend().info(0);
    } catch (const DeviceError& error) {
      GTEST_SKIP() << "no CUDA device: " << error.what();
    }
  }
};

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

// Memory of the GPU full of NaN.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(std::size_t bytes) : bytes_(bytes), memory_(cuda::load_backend().allocate(0, bytes)) {
    memory_->put(std::vector<std::byte>(bytes, std::byte{0xff}).data());
  }
  std::span<std::byte> span() const { return {static_cast<std::byte*>(memory_->data()), bytes_}; }
  void get(void* host) const { memory_->get(host); }

 private:
  std::size_t bytes_;
  std::unique_ptr<cuda::DeviceMemory> memory_;
};

// A host tensor's memory on the GPU, its first element at a multiple of 16 bytes or just of its own size.
class TensorOnGpu {
 public:
  TensorOnGpu(HostTensor& host, bool aligned)
      : host_(host),
        shift_(aligned ? 128 - HostTensor::kGuardBytes : 0),
        image_(host.storage().size() + shift_ + 128),
        memory_(cuda::load_backend().allocate(0, image_.size())) {
    std::ranges::copy(host.storage(), inside());
    memory_->put(image_.data());
  }
  TensorView view() const {
    TensorView view = host_.view();
    view.data = static_cast<std::byte*>(memory_->data()) + shift_ + HostTensor::kGuardBytes;
    return view;
  }
  void bring_back() {
    memory_->get(image_.data());
    std::copy_n(inside(), host_.storage().size(), host_.storage().begin());
  }

 private:
  std::vector<std::byte>::iterator inside() { return image_.begin() + static_cast<std::ptrdiff_t>(shift_); }

  HostTensor& host_;
  std::size_t shift_;
  std::vector<std::byte> image_;
  std::unique_ptr<cuda::DeviceMemory> memory_;
};

// Forward and backward of one rank. `own` are its rows.
inline std::string run_rank_on_device(const RankAttention& attention, Call& own, const DeviceRanksWay& way) {
  TensorOnGpu q(own.q, way.aligned), k(own.k, way.aligned), v(own.v, way.aligned), dout(own.dout, way.aligned),
      out(own.out, way.aligned), dq(own.dq, way.aligned), dk(own.dk, way.aligned), dv(own.dv, way.aligned);
  const std::span<float> lse = own.lse.span();
  const PoisonedMemory lse_memory(lse.size_bytes()), forward(attention.workspace_bytes(Pass::forward)),
      backward(attention.workspace_bytes(Pass::backward));
  auto* numbers = reinterpret_cast<float*>(lse_memory.span().data());
  (void)cuda::load_backend().time(0, [&](void* stream) {
    attention.forward({.q = q.view(),
                       .k = k.view(),
                       .v = v.view(),
                       .out = out.view(),
                       .lse = {numbers, lse.size()},
                       .workspace = forward.span(),
                       .stream = stream});
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
                        .stream = stream});
  });
  if (!lse.empty()) lse_memory.get(lse.data());
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
