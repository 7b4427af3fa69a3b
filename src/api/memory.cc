#include "annulus/memory.h"

#include <algorithm>

namespace annulus {

std::int64_t total_bytes(const std::vector<MemoryComponent>& components) {
  std::int64_t total = 0;
  for (const MemoryComponent& component : components) total += component.bytes;
  return total;
}

void MemoryLedger::allocate(const std::string& component, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[component];
  entry.current += bytes;
  entry.peak = std::max(entry.peak, entry.current);
  current_ += bytes;
  peak_ = std::max(peak_, current_);
}

void MemoryLedger::release(const std::string& component, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  entries_[component].current -= bytes;
  current_ -= bytes;
}

std::int64_t MemoryLedger::current_bytes() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

std::int64_t MemoryLedger::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

std::vector<MemoryComponent> MemoryLedger::components() const {
  const std::lock_guard lock(mutex_);
  std::vector<MemoryComponent> result;
  for (const auto& [component, entry] : entries_) result.push_back({component, entry.peak});
  return result;
}

}  // namespace annulus
