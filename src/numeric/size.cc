#include "numeric/size.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

#include "annulus/errors.h"

namespace annulus {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int64_t>::max();
constexpr std::size_t kMaxTextBytes = 64;  // 2^-30 has 30 decimals: no size needs more

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

[[noreturn]] void reject(std::string_view text, std::string_view rule) {
  std::string shown;
  for (const char c : text.substr(0, kMaxTextBytes)) shown += c >= 0x20 && c < 0x7f ? c : '?';
  throw InvalidArgument("size: " + std::string(rule) + "; received '" + shown +
                        (text.size() > kMaxTextBytes ? "...'" : "'") +
                        "; write a size such as 4096, 64k, 1.5M or 1B (k = 2^10, M = 2^20, G or B = 2^30)");
}

// The exponent of the suffix that `text` ends with, which is removed; 0 for none.
int take_suffix(std::string_view& text) {
  if (text.empty()) return 0;
  int shift = 0;
  switch (text.back()) {
    case 'k':
    case 'K':
      shift = 10;
      break;
    case 'm':
    case 'M':
      shift = 20;
      break;
    case 'g':
    case 'G':
    case 'b':
    case 'B':
      shift = 30;
      break;
    default:
      return 0;
  }
  text.remove_suffix(1);
  return shift;
}

// 0.<digits> * 2^shift. Doubling the decimals `shift` times pushes out the bits of the result one by one; what is left
// of the decimals then is what no whole number can express.
std::int64_t scale_fraction(std::string digits, int shift, std::string_view text) {
  std::int64_t value = 0;
  for (int i = 0; i < shift; ++i) {
    int carry = 0;
    for (std::size_t j = digits.size(); j-- > 0;) {
      const int twice = 2 * (digits[j] - '0') + carry;
      digits[j] = static_cast<char>('0' + twice % 10);
      carry = twice / 10;
    }
    value = 2 * value + carry;
  }
  if (digits.find_first_not_of('0') != std::string::npos) reject(text, "a fraction must give a whole number");
  return value;
}

}  // namespace

std::int64_t parse_size(std::string_view text) {
  if (text.empty()) reject(text, "must not be empty");
  if (text.size() > kMaxTextBytes) reject(text, "must have at most " + std::to_string(kMaxTextBytes) + " characters");
  if (text.front() == '-') reject(text, "must not be negative");

  std::string_view number = text;
  const int shift = take_suffix(number);
  const std::size_t dot = std::min(number.find('.'), number.size());
  const std::string_view whole = number.substr(0, dot);
  const std::string_view fraction = number.substr(std::min(dot + 1, number.size()));
  const bool has_dot = dot < number.size();
  if (whole.empty() || has_dot == fraction.empty() || !std::ranges::all_of(whole, is_digit) ||
      !std::ranges::all_of(fraction, is_digit)) {
    reject(text, "must be digits, perhaps with a fraction, and at most one suffix of k, M, G, B");
  }

  std::int64_t value = 0;
  const auto append = [&](std::int64_t factor, std::int64_t addend) {
    if (value > (kMaxSize - addend) / factor) reject(text, "must be at most 2^63 - 1");
    value = value * factor + addend;
  };
  for (const char c : whole) append(10, c - '0');
  append(std::int64_t{1} << shift, scale_fraction(std::string(fraction), shift, text));
  return value;
}

std::vector<std::int64_t> parse_sizes(std::string_view text) {
  std::vector<std::int64_t> sizes;
  for (;;) {
    const std::size_t comma = text.find(',');
    const std::string_view element = text.substr(0, comma);
    if (element.empty()) {
      throw InvalidArgument("list of sizes: no element may be empty; received nothing as element " +
                            std::to_string(sizes.size() + 1) + "; write a list such as 2048,4096 without blanks");
    }
    sizes.push_back(parse_size(element));
    if (comma == std::string_view::npos) return sizes;
    text.remove_prefix(comma + 1);
  }
}

std::string format_size(std::int64_t size) {
  struct Suffix {
    int shift;
    std::string_view text;
  };
  for (const Suffix& suffix : {Suffix{30, "B"}, Suffix{20, "M"}, Suffix{10, "k"}}) {
    const std::int64_t unit = std::int64_t{1} << suffix.shift;
    if (size != 0 && size % unit == 0) return std::to_string(size / unit) + std::string(suffix.text);
  }
  return std::to_string(size);
}

std::string format_count(std::int64_t count) {
  std::string text = std::to_string(count);
  const std::size_t first_digit = count < 0 ? 1 : 0;
  for (std::size_t i = text.size(); i > first_digit + 3;) text.insert(i -= 3, 1, ',');
  return text;
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr std::array<std::string_view, 6> kUnits{" KiB", " MiB", " GiB", " TiB", " PiB", " EiB"};
  const std::string sign = bytes < 0 ? "-" : "";
  const std::uint64_t size = bytes < 0 ? ~static_cast<std::uint64_t>(bytes) + 1 : static_cast<std::uint64_t>(bytes);
  if (size < 1024) return sign + std::to_string(size) + " B";

  // In tenths, in integers: the same text whatever the locale. 1023.96 KiB rounds to 1.0 MiB.
  std::size_t i = 0;
  std::uint64_t tenths = 0;
  for (;; ++i) {
    const unsigned shift = 10 * static_cast<unsigned>(i + 1);
    const std::uint64_t remainder = size & ((std::uint64_t{1} << shift) - 1);
    tenths = (size >> shift) * 10 + ((remainder * 10 + (std::uint64_t{1} << (shift - 1))) >> shift);
    if (tenths < 10240 || i + 1 == kUnits.size()) break;
  }
  return sign + std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + std::string(kUnits[i]);
}

}  // namespace annulus
