// A file that appears whole or not at all: written under a temporary name in the same directory, synced, then renamed.
//
//   AtomicFile file("out.npy");
//   file.write(header);
//   file.write(data);
//   file.commit();
//
// Without commit(), and on any failure, the temporary file is removed and what stood at the path before stays as it
// was. Only a killed process leaves one behind (`.annulus-<process>-<number>.tmp`).
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "io/file_descriptor.h"

namespace annulus {

class AtomicFile {
 public:
  // A link is followed, so the file it points to is replaced and the link stays. What exists there must be a regular
  // file (nobody wants /dev/null renamed away); its permissions are kept.
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();

 private:
  std::filesystem::path path_;       // as given, for messages
  std::filesystem::path target_;     // with links resolved
  std::filesystem::path temporary_;  // empty: nothing to remove
  FileDescriptor file_;
};

}  // namespace annulus
