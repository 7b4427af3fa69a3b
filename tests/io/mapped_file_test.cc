#include "io/mapped_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <utility>

#include "io/file_image.h"
#include "io/scratch_directory.h"

namespace annulus {
namespace {

TEST(MappedFile, ShowsTheBytesOfTheFile) {
  const ScratchDirectory directory;
  write_text(directory / "x", std::string("one\0two", 7));
  const MappedFile file(directory / "x");
  EXPECT_EQ(text_of(file.bytes()), std::string("one\0two", 7));
}

TEST(MappedFile, AnEmptyFileIsAnEmptySpan) {
  const ScratchDirectory directory;
  write_text(directory / "x", "");
  EXPECT_TRUE(MappedFile(directory / "x").bytes().empty());
}

TEST(MappedFile, SurvivesMovesAndTheRemovalOfTheFile) {
  const ScratchDirectory directory;
  write_text(directory / "x", "first");
  write_text(directory / "y", "second");
  MappedFile x(directory / "x");
  const std::byte* address = x.bytes().data();
  MappedFile moved(std::move(x));
  EXPECT_EQ(moved.bytes().data(), address);
  moved = MappedFile(directory / "y");
  EXPECT_EQ(text_of(moved.bytes()), "second");
  std::filesystem::remove(directory / "y");
  EXPECT_EQ(text_of(moved.bytes()), "second");
}

TEST(MappedFile, ErrorsNameThePathAndTheReason) {
  const ScratchDirectory directory;
  expect_error([&] { MappedFile(directory / "absent.npy"); },
               {"absent.npy", "cannot open", "No such file or directory", "check the path"});
  write_text(directory / "file", "");
  expect_error([&] { MappedFile(directory / "file" / "below"); }, {"Not a directory", "check the path"});
  expect_error([&] { MappedFile(directory / std::string(300, 'x')); }, {"File name too long"});
}

TEST(MappedFile, RefusesWhatIsNotARegularFile) {
  const ScratchDirectory directory;
  expect_error([&] { MappedFile(directory / ""); }, {"regular file", "a directory"});
  expect_error([] { MappedFile("/dev/null"); }, {"/dev/null", "regular file", "device"});
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  expect_error([&] { MappedFile(directory / "pipe"); }, {"regular file", "pipe"});  // and does not wait for a writer
}

}  // namespace
}  // namespace annulus
