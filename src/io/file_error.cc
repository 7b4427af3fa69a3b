#include "io/file_error.h"

#include <cerrno>
#include <cstddef>
#include <system_error>

#include "annulus/errors.h"

namespace annulus {
namespace {

constexpr std::size_t kMaxShownBytes = 64;

}  // namespace

void reject_file(std::string_view source, std::string_view rule, std::string_view received, std::string_view remedy) {
  std::string message(source);
  message.append(": ").append(rule).append("; received ").append(received).append("; ").append(remedy);
  throw InvalidArgument(message);
}

void throw_system_error(std::string_view source, std::string_view action, int error_number) {
  std::string message(source);
  message.append(": cannot ").append(action).append(": ").append(std::generic_category().message(error_number));
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      throw InvalidArgument(message + "; check the path: the file, or a directory on the way to it, is missing");
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      throw InvalidArgument(message + "; give the path of a file");
    case EACCES:
    case EPERM:
    case EROFS:
      throw InvalidArgument(message + "; change the permissions or choose another path");
    case ENOMEM:
      throw OutOfMemory(message + "; free some memory or raise the limit of this process");
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      throw DeviceError(message + "; free some space, raise the limit or choose another path");
    default:
      throw DeviceError(message + "; check the disk, or choose another path");
  }
}

std::string printable(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kMaxShownBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    }
  }
  if (text.size() > kMaxShownBytes) out += "...";
  out += "'";
  return out;
}

}  // namespace annulus
