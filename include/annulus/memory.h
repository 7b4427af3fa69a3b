// The ledger: every allocation has a name, and the plan's prediction can be held against what was really taken.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace annulus {

struct MemoryComponent {
  std::string name;  // q, k, v, out, lse, dout, dq, dk, dv, delta, tiles, ...
  std::int64_t bytes = 0;

  bool operator==(const MemoryComponent&) const = default;
};

std::int64_t total_bytes(const std::vector<MemoryComponent>& components);

// Thread-safe. `peak` is of the sum, so components that never live at the same time do not add up.
class MemoryLedger {
 public:
  void allocate(const std::string& component, std::int64_t bytes);
  void release(const std::string& component, std::int64_t bytes);

  std::int64_t current_bytes() const;
  std::int64_t peak_bytes() const;
  std::vector<MemoryComponent> components() const;  // each component's own peak, by name

 private:
  struct Entry {
    std::int64_t current = 0;
    std::int64_t peak = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::int64_t current_ = 0;
  std::int64_t peak_ = 0;
};

}  // namespace annulus
