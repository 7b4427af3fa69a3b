#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

#include "io/file_descriptor.h"
#include "io/file_error.h"

namespace annulus {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const std::string source = path.string();
  // O_NONBLOCK: a pipe without a writer is to be refused below, not waited for. It means nothing to regular files.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) throw_system_error(source, "open for reading", errno);

  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_system_error(source, "read its size", errno);
  if (!S_ISREG(status.st_mode)) {
    reject_file(source, "input must be a regular file, so that it can be mapped",
                S_ISDIR(status.st_mode) ? "a directory" : "a pipe, device or socket", "save the data to a file first");
  }
  if (!std::in_range<std::size_t>(status.st_size)) throw_system_error(source, "map", EFBIG);
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;  // mmap refuses length 0

  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) throw_system_error(source, "map", errno);
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace annulus
