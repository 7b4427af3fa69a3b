// How files fail, in words. A file that breaks a rule is the caller's to mend: InvalidArgument with path, rule, value
// and remedy. A call that the system refused becomes the error that fits its errno. What a file contains is never put
// into a message unescaped: it may be megabytes long, or steer a terminal.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

// "<source>: <rule>; received <received>; <remedy>", as InvalidArgument.
[[noreturn]] void reject_file(std::string_view source, std::string_view rule, std::string_view received,
                              std::string_view remedy);

// "<source>: cannot <action>: <errno in words>; <remedy>": InvalidArgument where the path is at fault, OutOfMemory, or
// DeviceError (a full disk, a failing one).
[[noreturn]] void throw_system_error(std::string_view source, std::string_view action, int error_number);

// 'text' in quotes, all else than ASCII escaped, shortened when long.
std::string printable(std::string_view text);

}  // namespace annulus
