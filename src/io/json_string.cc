#include "io/json_string.h"

#include <cstddef>
#include <cstdint>

namespace annulus {
namespace {

// RFC 3629, table 3-7 of the Unicode standard: what may follow a lead byte. `low` and `high` bound the second byte; all
// others are 80..BF.
struct LeadByte {
  unsigned char first, last;
  std::size_t more;
  unsigned char low, high;
};

constexpr LeadByte kLeadBytes[] = {
    {0x00, 0x7f, 0, 0x80, 0xbf}, {0xc2, 0xdf, 1, 0x80, 0xbf}, {0xe0, 0xe0, 2, 0xa0, 0xbf},
    {0xe1, 0xec, 2, 0x80, 0xbf}, {0xed, 0xed, 2, 0x80, 0x9f}, {0xee, 0xef, 2, 0x80, 0xbf},
    {0xf0, 0xf0, 3, 0x90, 0xbf}, {0xf1, 0xf3, 3, 0x80, 0xbf}, {0xf4, 0xf4, 3, 0x80, 0x8f},
};

// Bytes of the character that `text` begins with, 0 when it begins with none.
std::size_t utf8_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (const LeadByte& lead : kLeadBytes) {
    if (at(0) < lead.first || at(0) > lead.last) continue;
    if (text.size() <= lead.more) return 0;
    if (lead.more > 0 && (at(1) < lead.low || at(1) > lead.high)) return 0;
    for (std::size_t i = 2; i <= lead.more; ++i) {
      if ((at(i) & 0xc0) != 0x80) return 0;
    }
    return lead.more + 1;
  }
  return 0;
}

void append_utf8(std::string& out, std::uint32_t code_point) {
  const auto tail = [&](unsigned shift) { out += static_cast<char>(0x80 | ((code_point >> shift) & 0x3f)); };
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    out += static_cast<char>(0xc0 | (code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    out += static_cast<char>(0xe0 | (code_point >> 12));
    tail(6);
    tail(0);
  } else {
    out += static_cast<char>(0xf0 | (code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

std::uint32_t read_four_hex_digits(HeaderCursor& cursor) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = cursor.next("a \\u escape");
    std::uint32_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<std::uint32_t>(c - 'a') + 10;
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<std::uint32_t>(c - 'A') + 10;
    } else {
      cursor.fail("a \\u escape must have four hexadecimal digits");
    }
    value = value * 16 + digit;
  }
  return value;
}

std::uint32_t read_code_point(HeaderCursor& cursor) {  // behind \u
  const std::uint32_t unit = read_four_hex_digits(cursor);
  if (unit < 0xd800 || unit > 0xdfff) return unit;
  const bool pair = unit < 0xdc00 && cursor.rest().starts_with("\\u");
  if (pair) {
    cursor.advance(2);
    const std::uint32_t low = read_four_hex_digits(cursor);
    if (low >= 0xdc00 && low <= 0xdfff) return 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
  }
  cursor.fail("surrogates in \\u escapes must come in pairs, high before low");
}

void read_escape(HeaderCursor& cursor, std::string& out) {  // behind the backslash
  static constexpr std::string_view kEscapes = "\"\\/bfnrt";
  static constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const char c = cursor.next("an escape");
  if (c == 'u') {
    append_utf8(out, read_code_point(cursor));
  } else if (const std::size_t i = kEscapes.find(c); i != std::string_view::npos) {
    out += kMeanings[i];
  } else {
    cursor.fail("a backslash must be followed by one of \"\\/bfnrtu");
  }
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string read_json_string(HeaderCursor& cursor, std::string_view what) {
  if (!cursor.take("\"")) cursor.fail("expected " + std::string(what) + ", a string in double quotes");
  std::string out;
  for (;;) {
    const std::string_view rest = cursor.rest();
    if (rest.empty()) cursor.fail(std::string(what) + " must end before the header does");
    if (static_cast<unsigned char>(rest[0]) < 0x20) cursor.fail("control characters in strings must be escaped");
    const std::size_t length = utf8_length(rest);
    if (length == 0) cursor.fail("strings must be valid UTF-8");
    cursor.advance(length);
    if (rest[0] == '"') return out;
    if (rest[0] == '\\') {
      read_escape(cursor, out);
    } else {
      out.append(rest.substr(0, length));
    }
  }
}

std::string json_string(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace annulus
