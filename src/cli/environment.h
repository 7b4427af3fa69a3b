// What the machine is and what it has left: for `info`, for the `environment` of every JSON object, and for refusing in
// time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus::cli {

struct Cache {
  int level = 0;
  std::string type;  // Data, Instruction, Unified
  std::int64_t bytes = 0;
};

// What was typed, without the folder of the tool: words with odd characters stand in quotes. Empty where the system
// does not tell.
std::string command_line();

std::string cpu_model();
std::vector<Cache> caches();  // of the first core; empty where the system does not tell

// Names the cores that this process may run on, such as 0-3,8; empty where the system does not tell.
std::string usable_core_list();

// What may still be allocated, by the system's word and by the control group's limit; nothing where neither is known.
std::optional<std::int64_t> available_memory_bytes();

// The largest resident size of this process so far; 0 where the system does not tell.
std::int64_t process_peak_bytes();

}  // namespace annulus::cli
