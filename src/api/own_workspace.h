// What every call holds: the caller's tensors, and a workspace that is made for one call when the caller brought none.
#pragma once

#include <new>
#include <span>
#include <string>
#include <vector>

#include "annulus/attention.h"
#include "api/checks.h"

namespace annulus {

class OwnWorkspace {
 public:
  explicit OwnWorkspace(std::size_t bytes) : bytes_(bytes) {
    data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment}, std::nothrow));
    if (data_ == nullptr)
      throw OutOfMemory("the workspace needs " + std::to_string(bytes) +
                        " bytes; the system has no more: use fewer threads or tokens");
  }
  ~OwnWorkspace() { ::operator delete (data_, std::align_val_t{kAlignment}); }
  OwnWorkspace(const OwnWorkspace&) = delete;
  OwnWorkspace& operator=(const OwnWorkspace&) = delete;

  std::span<std::byte> span() { return {data_, bytes_}; }

 private:
  static constexpr std::size_t kAlignment = 64;

  std::byte* data_;
  std::size_t bytes_;
};

// The tensors of a pass, then the parts of its workspace.
inline std::vector<MemoryComponent> all_memory(const Problem& problem, const RowCounts& rows, Pass pass,
                                               const std::vector<MemoryComponent>& workspace) {
  const std::int64_t row_bytes = problem.batch * problem.head_dim * size_of(problem.dtype);
  const std::int64_t of_q = rows.queries * problem.heads * row_bytes;
  const std::int64_t of_k = rows.keys * problem.kv_heads * row_bytes;
  const std::int64_t of_lse = problem.batch * rows.queries * problem.heads * 4;
  std::vector<MemoryComponent> result{{"q", of_q}, {"k", of_k}, {"v", of_k}, {"out", of_q}, {"lse", of_lse}};
  if (pass == Pass::backward)
    for (const MemoryComponent& gradient : {MemoryComponent{"dout", of_q}, {"dq", of_q}, {"dk", of_k}, {"dv", of_k}})
      result.push_back(gradient);
  result.insert(result.end(), workspace.begin(), workspace.end());
  return result;
}

}  // namespace annulus
