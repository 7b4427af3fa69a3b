// HeaderCursor: walks the text header of a tensor file, JSON or Python literal, one token at a time.
//
// The headers of both formats have a fixed, flat grammar, so the readers spell it out token by token instead of
// building a tree: no recursion to exhaust, nothing allocated for what is not wanted, and every fault has the byte
// where it stands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace annulus {

class HeaderCursor {
 public:
  // `source` (the path) and `remedy` (what to do about a bad file of this format) go into every message; both must
  // outlive the cursor, as must `text`.
  HeaderCursor(std::string_view text, std::string_view source, std::string_view remedy)
      : text_(text), source_(source), remedy_(remedy) {}

  // Spaces, tabs and line ends.
  void skip_blanks();
  std::string_view rest() const { return text_.substr(position_); }
  bool at_end() const { return position_ == text_.size(); }
  void advance(std::size_t bytes) { position_ += bytes; }

  // These skip blanks first.
  bool take(std::string_view token);                            // true: it was next, and is behind us now
  void expect(std::string_view token, std::string_view after);  // take or fail
  // Decimal digits: no sign, no leading zero, no fraction, no exponent, below 2^63.
  std::int64_t integer(std::string_view what);

  // The very next character, blanks included.
  char next(std::string_view inside);

  [[noreturn]] void fail(std::string_view rule) const;  // received: what stands at the cursor

 private:
  std::string_view text_;
  std::string_view source_;
  std::string_view remedy_;
  std::size_t position_ = 0;
};

}  // namespace annulus
