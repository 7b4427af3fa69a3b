// The tensors of one problem in memory, by name, with every byte in the ledger.
//
//   Workload work(problem);
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

#include "annulus/attention.h"

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

class Workload {
 public:
  explicit Workload(const Problem& problem);  // resolved

  // New inputs take the room of the workspace of the pass before. `draw` draws all that are not there yet.
  void draw(std::uint64_t seed, int threads, Pass pass);
  void borrow(const std::string& name, const void* data);

  // Memory for the results of a pass that something else than an Attention computes, and the way into it.
  void hold_results(Pass pass);
  std::byte* result(const std::string& name) { return tensors_.at(name).own.data(); }

  // Wall-clock seconds of the call alone. Results stay; the workspace does until a pass needs another.
  double forward(const Attention& attention);
  double backward(const Attention& attention);

  const Problem& problem() const { return problem_; }
  const MemoryLedger& ledger() const { return ledger_; }

  bool has(const std::string& name) const { return tensors_.contains(name); }
  const void* data(const std::string& name) const { return tensors_.at(name).data; }
  DType dtype(const std::string& name) const;
  std::vector<std::int64_t> shape(const std::string& name) const;
  std::int64_t elements(const std::string& name) const;
  std::int64_t bytes(const std::string& name) const { return elements(name) * size_of(dtype(name)); }

 private:
  struct Tensor {
    Buffer own;  // empty: borrowed
    const void* data = nullptr;
  };

  void allocate(const std::string& name);
  void prepare(const Attention& attention, Pass pass);
  void release_workspace();
  std::array<std::int64_t, 4> shape4(const std::string& name) const;
  ConstTensorView read(const std::string& name) const;
  TensorView write(const std::string& name);
  std::span<float> lse();

  Problem problem_;
  MemoryLedger ledger_;
  std::map<std::string, Tensor> tensors_;
  Buffer workspace_;
  std::size_t workspace_bytes_ = 0;
  std::vector<MemoryComponent> workspace_parts_;  // as the ledger has them
};

// Throws OutOfMemory with both numbers when `needed_bytes` are more than the machine has left.
void check_memory(std::int64_t needed_bytes, const std::string& what);

}  // namespace annulus::cli
