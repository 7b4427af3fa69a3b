// Whatever went wrong, as an exit code and one line.
#pragma once

#include <exception>
#include <string>

namespace annulus::cli {

// Exit codes; docs/command-line.md.
inline constexpr int kRight = 0;
inline constexpr int kWrongResult = 1;
inline constexpr int kBadUsage = 2;
inline constexpr int kEnvironment = 3;

struct Failure {
  int code = kEnvironment;
  std::string message;           // one line, whatever the exception said
  bool by_another_rank = false;  // a TransportError: the cause lies elsewhere
};

Failure failure_of(const std::exception_ptr& error);

// "annulus: message" on stderr, in one piece: lines of several ranks must not mix.
void print_error(const std::string& message);

// Thrown when all has been printed already.
struct Reported {
  int code = kEnvironment;
};

}  // namespace annulus::cli
