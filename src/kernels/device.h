// Options::device, read.
#pragma once

#include <optional>
#include <string>

#include "plan/choice.h"

namespace annulus {

struct Device {
  bool is_gpu = false;
  std::optional<int> index;  // of a GPU; none: the calling thread's current one
};

// What the chooser of strategies should know of it.
Rates rates_of(const Device& device);

// "" and "cpu", "cuda", "cuda:1". Throws InvalidArgument for anything else.
Device parse_device(const std::string& text);

}  // namespace annulus
