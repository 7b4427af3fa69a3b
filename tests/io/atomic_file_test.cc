#include "io/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <string>

#include "io/file_image.h"
#include "io/mapped_file.h"
#include "io/scratch_directory.h"

namespace annulus {
namespace {

using Names = std::vector<std::string>;
namespace fs = std::filesystem;

TEST(AtomicFile, AppearsAtCommit) {
  const ScratchDirectory directory;
  AtomicFile file(directory / "x");
  file.write("one ");
  EXPECT_FALSE(fs::exists(directory / "x"));
  file.write("");
  file.write("two");
  file.commit();
  EXPECT_EQ(read_text(directory / "x"), "one two");
  EXPECT_EQ(directory.names(), Names{"x"});
}

TEST(AtomicFile, WithoutCommitNothingChanges) {
  const ScratchDirectory directory;
  write_text(directory / "x", "old");
  {
    AtomicFile file(directory / "x");
    file.write("new");
    EXPECT_EQ(directory.names().size(), 2U);
  }
  EXPECT_EQ(read_text(directory / "x"), "old");
  EXPECT_EQ(directory.names(), Names{"x"});
}

TEST(AtomicFile, ReplacesAFileThatIsBeingRead) {
  const ScratchDirectory directory;
  write_text(directory / "x", "old and longer");
  const MappedFile old(directory / "x");
  AtomicFile file(directory / "x");
  file.write("new");
  file.commit();
  EXPECT_EQ(text_of(old.bytes()), "old and longer");
  EXPECT_EQ(read_text(directory / "x"), "new");
}

TEST(AtomicFile, KeepsThePermissionsOfTheOldFile) {
  const ScratchDirectory directory;
  write_text(directory / "x", "old");
  fs::permissions(directory / "x", fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read);
  AtomicFile(directory / "x").commit();
  struct stat status {};
  ASSERT_EQ(::stat((directory / "x").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0640U);
}

TEST(AtomicFile, ANewFileFollowsTheUmask) {
  const ScratchDirectory directory;
  const mode_t before = ::umask(027);
  AtomicFile(directory / "x").commit();
  ::umask(before);
  struct stat status {};
  ASSERT_EQ(::stat((directory / "x").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0640U);
}

TEST(AtomicFile, FollowsALink) {
  const ScratchDirectory directory;
  fs::create_directory(directory / "elsewhere");
  write_text(directory / "elsewhere/x", "old");
  fs::create_symlink("elsewhere/x", directory / "link");
  AtomicFile file(directory / "link");
  file.write("new");
  file.commit();
  EXPECT_TRUE(fs::is_symlink(directory / "link"));
  EXPECT_EQ(read_text(directory / "elsewhere/x"), "new");
}

TEST(AtomicFile, TakesTheLongestNameThatAFileMayHave) {
  const ScratchDirectory directory;
  const std::string name(255, 'x');
  AtomicFile(directory / name).commit();
  EXPECT_EQ(directory.names(), Names{name});
}

TEST(AtomicFile, TwoWritersOfOneFileDoNotMix) {
  const ScratchDirectory directory;
  AtomicFile first(directory / "x");
  AtomicFile second(directory / "x");
  first.write("first");
  second.write("second");
  second.commit();
  EXPECT_EQ(read_text(directory / "x"), "second");
  first.commit();
  EXPECT_EQ(read_text(directory / "x"), "first");
}

TEST(AtomicFile, WorksInTheCurrentDirectory) {
  const ScratchDirectory directory;
  const fs::path before = fs::current_path();
  fs::current_path(directory / "");
  AtomicFile file("x");
  file.write("here");
  file.commit();
  fs::current_path(before);
  EXPECT_EQ(read_text(directory / "x"), "here");
}

TEST(AtomicFile, RefusesPathsThatCannotBecomeAFile) {
  const ScratchDirectory directory;
  expect_error([&] { AtomicFile(directory / "absent/x"); },
               {"absent/x", "No such file or directory", "check the path"});
  fs::create_directory(directory / "folder");
  expect_error([&] { AtomicFile(directory / "folder"); }, {"regular file", "a directory"});
  expect_error([&] { AtomicFile(directory / "folder/"); }, {"must name a file"});
  expect_error([] { AtomicFile(""); }, {"must name a file"});
  fs::create_symlink("nowhere", directory / "dangling");
  expect_error([&] { AtomicFile(directory / "dangling"); }, {"dangling", "remove the link"});
  write_text(directory / "file", "");
  expect_error([&] { AtomicFile(directory / "file/below"); }, {"Not a directory"});
  EXPECT_EQ(directory.names().size(), 3U);
}

TEST(AtomicFile, LeavesDevicesAlone) {
  expect_error([] { AtomicFile("/dev/null"); }, {"/dev/null", "regular file", "device"});
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

// The limit on file sizes stands in for a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(AtomicFile, AFailedWriteLeavesTheOldFileAndNoOther) {
  const ScratchDirectory directory;
  write_text(directory / "x", "old");
  const std::vector<std::byte> data(100'000);
  expect_error<DeviceError>(
      [&] {
        const FileSizeLimit limit(50'000);
        AtomicFile file(directory / "x");
        file.write(data);
        file.commit();
      },
      {"cannot write", "File too large"});
  EXPECT_EQ(read_text(directory / "x"), "old");
  EXPECT_EQ(directory.names(), Names{"x"});
}

TEST(AtomicFile, AFailedRenameLeavesNothingBehind) {
  const ScratchDirectory directory;
  {
    AtomicFile file(directory / "x");
    file.write("new");
    fs::create_directory(directory / "x");
    expect_error([&] { file.commit(); }, {"cannot rename", "Is a directory"});
  }
  EXPECT_EQ(directory.names(), Names{"x"});
}

}  // namespace
}  // namespace annulus
