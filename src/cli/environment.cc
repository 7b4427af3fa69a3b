#include "cli/environment.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace annulus::cli {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Text behind `key` in a file of "key value" or "key : value" lines.
std::optional<std::string> value_of(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const auto begin = line.find_first_not_of(" \t:", key.size());
    if (begin == key.size()) continue;  // a longer word that begins alike
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return std::nullopt;
}

// "123 kB", "32K", "123"; nothing for other text such as "max".
std::optional<std::int64_t> bytes_of(const std::optional<std::string>& text) {
  if (!text || text->empty() || (*text)[0] < '0' || (*text)[0] > '9') return std::nullopt;
  std::size_t used = 0;
  const std::int64_t number = std::stoll(*text, &used);
  const auto unit = text->find_first_not_of(' ', used);
  if (unit == std::string::npos) return number;
  switch ((*text)[unit]) {
    case 'k':
    case 'K':
      return number << 10;
    case 'M':
      return number << 20;
    case 'G':
      return number << 30;
    default:
      return number;
  }
}

// What one control group (version 2) leaves: its limit less what it holds that cannot be dropped.
std::optional<std::int64_t> left_in_group(const fs::path& group) {
  const auto limit = bytes_of(first_line(group / "memory.max"));
  const auto used = bytes_of(first_line(group / "memory.current"));
  if (!limit || !used) return std::nullopt;
  const std::int64_t droppable = bytes_of(value_of(group / "memory.stat", "active_file")).value_or(0) +
                                 bytes_of(value_of(group / "memory.stat", "inactive_file")).value_or(0);
  return std::max<std::int64_t>(0, *limit - *used + droppable);
}

}  // namespace

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string line;
  for (std::string word; std::getline(file, word, '\0');) {
    if (line.empty()) word = fs::path(word).filename();
    const bool plain =
        !word.empty() &&
        word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=.,:/+@") ==
            std::string::npos;
    if (!plain) {
      std::string quoted = "'";
      for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
      word = quoted + "'";
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return line;
}

std::string cpu_model() {
  for (const char* key : {"model name", "Model", "Hardware", "cpu model"})
    if (const auto model = value_of("/proc/cpuinfo", key); model && !model->empty()) return *model;
  const std::string implementer = value_of("/proc/cpuinfo", "CPU implementer").value_or("");
  const std::string part = value_of("/proc/cpuinfo", "CPU part").value_or("");
  return implementer.empty() ? "unknown" : "implementer " + implementer + ", part " + part;
}

std::vector<Cache> caches() {
  std::vector<Cache> found;
  for (int index = 0;; ++index) {
    const fs::path folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    const auto level = bytes_of(first_line(folder / "level"));
    const auto bytes = bytes_of(first_line(folder / "size"));
    if (!level || !bytes) return found;
    found.push_back({static_cast<int>(*level), first_line(folder / "type"), *bytes});
  }
}

std::string usable_core_list() { return value_of("/proc/self/status", "Cpus_allowed_list").value_or(""); }

std::optional<std::int64_t> available_memory_bytes() {
  std::optional<std::int64_t> least = bytes_of(value_of("/proc/meminfo", "MemAvailable"));
  // "0::/path" names the group; its parents may be tighter. Inside a container the path is the root itself.
  const std::string line = first_line("/proc/self/cgroup");
  if (line.starts_with("0::/")) {
    const fs::path root = "/sys/fs/cgroup";
    for (fs::path path = line.substr(4);; path = path.parent_path()) {
      if (const auto left = left_in_group(root / path)) least = std::min(least.value_or(*left), *left);
      if (path.empty()) break;
    }
  }
  return least;
}

std::int64_t process_peak_bytes() { return bytes_of(value_of("/proc/self/status", "VmHWM")).value_or(0); }

}  // namespace annulus::cli
