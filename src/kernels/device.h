// Options::device, read.
#pragma once

#include <optional>
#include <string>

namespace annulus {

struct Device {
  bool is_gpu = false;
  std::optional<int> index;  // of a GPU; none: the calling thread's current one
};

// "" and "cpu", "cuda", "cuda:1". Throws InvalidArgument for anything else.
Device parse_device(const std::string& text);

}  // namespace annulus
