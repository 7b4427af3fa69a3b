// Dilated attention on one rank: make an Attention for a problem once, call it as often as you like.
//
//   annulus::Attention attention({.tokens = n, .heads = h, .head_dim = 64, .pattern = pattern});
//   attention.forward({.q = q, .k = k, .v = v, .out = out, .lse = lse});
//
// Calls check their arguments before anything is written, allocate nothing that grows with the problem when given a
// workspace, and may run concurrently on distinct outputs and workspaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/errors.h"
#include "annulus/memory.h"
#include "annulus/pattern.h"
#include "annulus/problem.h"
#include "annulus/tensor.h"

namespace annulus {

enum class Pass { forward, backward };

struct Options {
  int threads = 0;  // 0: all cores this process may use
  std::string instruction_set =
      {};  // "" or "auto": the best this CPU has; else one of instruction_sets(). GPU: a kernel
  std::string device =
      {};  // "" or "cpu"; "cuda" (the current one) or "cuda:1": every pointer in a call is to its memory
  bool deterministic = false;  // GPU: dq too has the same bits run after run, at some cost. On CPUs always so
};

struct ForwardArgs {
  ConstTensorView q;     // [batch, tokens, heads, head_dim]
  ConstTensorView k;     // [batch, tokens, kv_heads, head_dim]
  ConstTensorView v;     // [batch, tokens, kv_heads, head_dim]
  TensorView out;        // like q
  std::span<float> lse;  // [batch, heads, tokens], natural log; may be empty: not wanted
  std::span<std::byte>
      workspace;           // workspace_bytes(Pass::forward), 64-byte aligned; may be empty: allocated for the call
  void* stream = nullptr;  // on a GPU: the CUDA stream that the work is queued on. The call does not wait for it, and
                           // memory for the call comes from the stream's pool
};

struct BackwardArgs {
  ConstTensorView q, k, v;     // as in forward
  ConstTensorView out;         // the result of forward
  std::span<const float> lse;  // the result of forward
  ConstTensorView dout;        // like q
  TensorView dq;               // like q
  TensorView dk, dv;           // like k
  std::span<std::byte>
      workspace;           // workspace_bytes(Pass::backward), 64-byte aligned; may be empty: allocated for the call
  void* stream = nullptr;  // as in forward
};

class Attention {
 public:
  // Throws InvalidArgument or Unsupported, or DeviceError where the device is missing; nothing is allocated that grows
  // with tokens.
  explicit Attention(const Problem& problem, const Options& options = {});
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) noexcept;

  void forward(const ForwardArgs& args) const;
  void backward(const BackwardArgs& args) const;

  std::size_t workspace_bytes(Pass pass) const;
  // Everything that a pass holds, tensors included, to the byte.
  std::vector<MemoryComponent> memory(Pass pass) const;

  const Problem& problem() const;       // resolved
  int threads() const;                  // 0 on a GPU
  std::string instruction_set() const;  // the one in use; on a GPU the kernel
  std::string explain() const;          // the plan, for people

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What this build and this CPU can run, best first: of avx512_bf16, avx512, avx2, neon, portable.
std::vector<std::string> instruction_sets();

std::string version();

}  // namespace annulus
