#include "io/header_cursor.h"

#include <algorithm>
#include <charconv>

#include "io/file_error.h"

namespace annulus {
namespace {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

void HeaderCursor::skip_blanks() { position_ = std::min(text_.find_first_not_of(" \t\r\n", position_), text_.size()); }

bool HeaderCursor::take(std::string_view token) {
  skip_blanks();
  if (!rest().starts_with(token)) return false;
  advance(token.size());
  return true;
}

void HeaderCursor::expect(std::string_view token, std::string_view after) {
  if (!take(token)) fail("expected " + printable(token) + " after " + std::string(after));
}

std::int64_t HeaderCursor::integer(std::string_view what) {
  skip_blanks();
  const std::string_view text = rest();
  const auto digits = static_cast<std::size_t>(std::ranges::find_if_not(text, is_digit) - text.begin());
  const bool leading_zero = digits > 1 && text[0] == '0';
  const bool goes_on = digits < text.size() && text.find_first_of(".eE_xXlL", digits) == digits;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, value);
  if (digits == 0 || leading_zero || goes_on || error != std::errc{}) {
    fail(std::string(what) + " must be an integer from 0 to 2^63 - 1, in plain digits");
  }
  advance(digits);
  return value;
}

char HeaderCursor::next(std::string_view inside) {
  if (at_end()) fail(std::string(inside) + " must end before the header does");
  return text_[position_++];
}

void HeaderCursor::fail(std::string_view rule) const {
  const std::string where = std::string(source_) + ": byte " + std::to_string(position_) + " of the header";
  reject_file(where, rule, at_end() ? "the end of the header" : printable(rest().substr(0, 24)), remedy_);
}

}  // namespace annulus
