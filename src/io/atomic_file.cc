#include "io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>

#include "io/file_error.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

fs::path resolve_target(const fs::path& path) {
  if (!path.has_filename())
    reject_file(path.string(), "output must name a file", printable(path.string()), "add a name");
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    if (!fs::is_symlink(fs::symlink_status(path, error))) return path;
    reject_file(path.string(), "output must not be a link to nowhere", "a dangling link", "remove the link");
  }
  if (status.type() == fs::file_type::none) throw_system_error(path.string(), "look at the output", error.value());
  if (!fs::is_regular_file(status)) {
    reject_file(path.string(), "output must be a regular file, which is replaced when the new one is complete",
                fs::is_directory(status) ? "a directory" : "a pipe, device or socket", "give the path of a file");
  }
  fs::path target = fs::canonical(path, error);
  if (error) throw_system_error(path.string(), "resolve the output's path", error.value());
  return target;
}

// Short and independent of the target's name, which may already be as long as the file system allows.
std::string temporary_name() {
  static std::atomic<unsigned> counter{0};
  return ".annulus-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp";
}

}  // namespace

AtomicFile::AtomicFile(const fs::path& path) : path_(path), target_(resolve_target(path)) {
  fs::path candidate;
  do {  // another machine's process of the same number may use the directory too
    candidate = target_.parent_path() / temporary_name();
    file_ = FileDescriptor(::open(candidate.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  } while (!file_.valid() && errno == EEXIST);
  if (!file_.valid()) throw_system_error(path_.string(), "create a file beside it", errno);
  temporary_ = std::move(candidate);

  struct stat old {};
  // Best effort: where permissions cannot be set (some network file systems), the umask's have to do.
  if (::stat(target_.c_str(), &old) == 0) static_cast<void>(::fchmod(file_.get(), old.st_mode & 07777) == 0);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_.get(), bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_system_error(path_.string(), "write", errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) throw_system_error(path_.string(), "bring to disk", errno);
  if (!file_.close()) throw_system_error(path_.string(), "close", errno);
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) throw_system_error(path_.string(), "rename", errno);
  temporary_.clear();

  // From here on the file is whole, old or new, whatever happens; syncing the directory only makes "new" survive a
  // power cut, so a file system that cannot do it is no error.
  const fs::path parent = target_.has_parent_path() ? target_.parent_path() : fs::path(".");
  const FileDescriptor directory(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.valid()) static_cast<void>(::fsync(directory.get()) == 0);
}

}  // namespace annulus
