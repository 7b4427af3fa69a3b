#include "kernels/device.h"

#include <charconv>
#include <string_view>

#include "annulus/errors.h"

namespace annulus {

Device parse_device(const std::string& text) {
  constexpr std::string_view kNumbered = "cuda:";
  if (text.empty() || text == "cpu") return {};
  if (text == "cuda") return {true, {}};
  int index = -1;
  if (text.starts_with(kNumbered)) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + kNumbered.size(), end, index);
    if (error != std::errc() || stop != end) index = -1;
  }
  if (index < 0)
    throw InvalidArgument("device must be cpu, cuda or cuda:N; got '" + text + "': leave it out for the CPU");
  return {true, index};
}

}  // namespace annulus
