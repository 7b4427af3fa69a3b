// The tensors of one problem that one rank holds, by name, with every byte in the ledger.
//
//   Workload work(problem, holding);
//   work.draw(seed, threads, Pass::forward);
//   work.forward(attention);        // seconds
//   work.data("out")
//
// Names are q, k, v, dout (inputs) and out, lse, dq, dk, dv (results). Inputs may lie in somebody else's memory, such
// as a mapped file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/ranks.h"
#include "annulus/transport.h"
#include "cli/shard_map.h"
#include "kernels/cuda/load.h"

namespace annulus::cli {

// Memory aligned to 64 bytes, as vectors and cache lines like it. Throws OutOfMemory.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes);
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
};

std::vector<std::string> input_names(Pass pass);
std::vector<std::string> result_names(Pass pass);

bool is_key_side(const std::string& name);
// Rather than a part of a workspace.
bool is_tensor(const std::string& name);

class Workload {
 public:
  // A resolved problem, and what this rank holds of it; without that, all rows.
  Workload(const Problem& problem, Holding holding);
  explicit Workload(const Problem& problem)
      : Workload(problem, {whole_sequence(problem.tokens), whole_sequence(problem.tokens)}) {}

  // New inputs take the room of the workspace of the pass before. `draw` draws all that are not there yet.
  void draw(std::uint64_t seed, int threads, Pass pass);
  void borrow(const std::string& name, const void* data);
  // This rank's rows of a whole tensor, whose bytes need not be aligned.
  void copy(const std::string& name, std::span<const std::byte> whole);

  // Memory for the results of a pass that something else than an Attention computes, and the way into it.
  void hold_results(Pass pass);
  std::byte* result(const std::string& name) { return tensors_.at(name).own.data(); }

  // Calls compute on this device from now on ("cuda:1"), in memory of its own: inputs go there before the next call,
  // results come back when they are asked for. While a rank waits for its GPU, the transport answers for it: nobody
  // shall take it for lost.
  void compute_on(const std::string& device, Transport& transport);

  // Wall-clock seconds of the call alone, until a GPU is done with it. Results stay; the workspace does until a pass
  // needs another.
  double forward(const RankAttention& attention);
  double backward(const RankAttention& attention);

  const Problem& problem() const { return problem_; }
  const Holding& holding() const { return holding_; }
  const ShardMap& shard(const std::string& name) const;
  const MemoryLedger& ledger() const { return ledger_; }

  bool has(const std::string& name) const { return tensors_.contains(name); }
  const void* data(const std::string& name) const;
  DType dtype(const std::string& name) const;
  std::vector<std::int64_t> shape(const std::string& name) const { return shape_of(name, shard(name).rows()); }
  std::vector<std::int64_t> whole_shape(const std::string& name) const { return shape_of(name, problem_.tokens); }
  RowShape row_shape(const std::string& name) const;
  std::int64_t elements(const std::string& name) const;
  std::int64_t bytes(const std::string& name) const { return elements(name) * size_of(dtype(name)); }

 private:
  struct Tensor {
    Buffer own;  // empty: borrowed
    const void* data = nullptr;
    std::unique_ptr<cuda::DeviceMemory> on_device;
    mutable bool is_newer_there = false;  // `data` brings it back
  };

  void allocate(const std::string& name);
  void prepare(const RankAttention& attention, Pass pass);
  void release_workspace();
  std::vector<std::int64_t> shape_of(const std::string& name, std::int64_t tokens) const;
  std::array<std::int64_t, 4> shape4(const std::string& name) const;
  ConstTensorView read(const std::string& name);
  TensorView write(const std::string& name);
  std::span<float> lse(bool writes);
  void* place_on_device(const std::string& name, bool writes);
  std::span<std::byte> workspace() const;
  template <class Call>
  double timed(const Call& call) const;

  Problem problem_;
  Holding holding_;
  MemoryLedger ledger_;
  std::map<std::string, Tensor> tensors_;
  const cuda::Backend* gpu_ = nullptr;  // null: the CPU
  int gpu_index_ = 0;
  Transport* transport_ = nullptr;  // where there is a GPU
  Buffer workspace_;
  std::unique_ptr<cuda::DeviceMemory> device_workspace_;
  std::size_t workspace_bytes_ = 0;
  std::vector<MemoryComponent> workspace_parts_;  // as the ledger has them
};

}  // namespace annulus::cli
