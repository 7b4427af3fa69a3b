// JSON strings (RFC 8259), strictly: valid UTF-8, no raw control characters, surrogates only in pairs.
#pragma once

#include <string>
#include <string_view>

#include "io/header_cursor.h"

namespace annulus {

bool is_utf8(std::string_view text);  // shortest forms only, no surrogates, up to U+10FFFF

// Takes a string with its quotes and returns what it means; `what` names it in messages.
std::string read_json_string(HeaderCursor& cursor, std::string_view what);

// The text with quotes and escapes; it must be UTF-8.
std::string json_string(std::string_view text);

}  // namespace annulus
