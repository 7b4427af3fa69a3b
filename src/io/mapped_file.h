// A file as memory, for reading: nothing is copied, and what is not touched is not read from disk.
//
// The map shows the file as it is. Whoever overwrites it in place meanwhile changes what we read, and whoever truncates
// it makes the read of a lost page fatal (SIGBUS); replace files by renaming, as AtomicFile does, and an open map is
// unharmed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace annulus {

class MappedFile {
 public:
  // Throws InvalidArgument when the path is not that of a regular file that can be opened. An empty file is an empty
  // span.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  // Page-aligned; valid as long as the map, wherever the MappedFile is moved to.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace annulus
