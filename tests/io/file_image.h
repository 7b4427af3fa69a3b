// Files built by hand, byte for byte, so that the readers are not judged by our own writers.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "annulus/errors.h"

namespace annulus {

inline std::string little_endian(std::uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

inline std::string safetensors_image(std::string_view header, std::string_view data) {
  return little_endian(header.size(), 8).append(header).append(data);
}

inline std::string npy_image(std::string_view header, std::string_view data, int major = 1) {
  std::string out = "\x93NUMPY";
  out += static_cast<char>(major);
  out += '\0';
  return out.append(little_endian(header.size(), major == 1 ? 2 : 4)).append(header).append(data);
}

// A copy on the heap of exactly the size, so that a sanitizer sees every step beyond it.
inline std::vector<std::byte> exact_bytes(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The action must throw an E whose message has all of these in it.
template <class E = InvalidArgument, class Action>
void expect_error(Action action, std::initializer_list<std::string_view> fragments) {
  try {
    action();
  } catch (const E& error) {
    const std::string_view message = error.what();
    for (const std::string_view fragment : fragments) {
      EXPECT_NE(message.find(fragment), std::string_view::npos) << "no '" << fragment << "' in: " << message;
    }
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

}  // namespace annulus
