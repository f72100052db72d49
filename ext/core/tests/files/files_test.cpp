// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "files/files.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "support/check.h"
#include "support/hooked_files.h"
#include "support/records.h"
#include "support/volatile_files.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

int interruptions = 0;

int unless_interrupted(long call, auto... arguments) {
  if (interruptions == 0) return static_cast<int>(::syscall(call, arguments...));
  --interruptions;
  errno = EINTR;
  return -1;
}

}  // namespace

// In place of libc's: whether a real signal interrupts them depends on the kernel and on the time.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
  return unless_interrupted(SYS_fallocate, fd, mode, offset, length);
}
extern "C" int fdatasync(int fd) {
  return unless_interrupted(SYS_fdatasync, fd);
}

namespace {

struct Block {
  alignas(4096) unsigned char bytes[4096];
};

// Direct where the file system has it, else buffered: what a test checks holds for both.
std::unique_ptr<File> create(const std::string& path) {
  std::unique_ptr<File> file;
  Status status = posix_files().open(path, FileMode::kCreate, true, &file);
  if (status.code() == StatusCode::kUnsupported)
    status = posix_files().open(path, FileMode::kCreate, false, &file);
  CHECK_OK(status);
  return file;
}

TEST(a_signal_fails_no_call) {
  const TestFolder folder;
  const std::unique_ptr<File> file = create(folder / "file");
  interruptions = 3;
  CHECK_OK(file->allocate(4096));
  CHECK_EQ(interruptions, 0);
  interruptions = 3;
  CHECK_OK(file->sync());
  CHECK_EQ(interruptions, 0);
}

TEST(parts_come_back_in_order_from_memory_of_any_alignment) {
  const TestFolder folder;
  const std::unique_ptr<File> file = create(folder / "file");
  constexpr std::size_t kLength = 3 * (1 << 20) + 4096;
  std::vector<unsigned char> written(kLength + 1);
  for (std::size_t i = 0; i < written.size(); ++i)
    written[i] = static_cast<unsigned char>(i * 7 + i / 4096);
  const WritePart out[] = {{written.data() + 1, 5}, {written.data() + 6, kLength - 5}};
  CHECK_OK(file->write(out, 8192));
  CHECK_OK(file->sync());
  std::vector<unsigned char> read(kLength + 3);
  const ReadPart in[] = {{read.data() + 3, 2 << 20},
                         {read.data() + 3 + (2 << 20), kLength - (2 << 20)}};
  CHECK_OK(file->read(in, 8192));
  CHECK(std::equal(read.begin() + 3, read.end(), written.begin() + 1));
  std::uint64_t length = 0;
  CHECK_OK(file->length(&length));
  CHECK_EQ(length, 8192 + kLength);
}

// A pipe without a writer would hold the thread that opens it for reading.
TEST(nothing_but_a_regular_file_is_opened_or_waited_for) {
  const TestFolder folder;
  std::unique_ptr<File> file;
  std::unique_ptr<FileLock> lock;
  std::string holder;
  create(folder / "file");
  CHECK_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  CHECK_EQ(::symlink((folder / "file").c_str(), (folder / "link").c_str()), 0);
  CHECK_EQ(::symlink("/dev/zero", (folder / "device").c_str()), 0);
  CHECK_OK(posix_files().make_folder(folder / "folder"));
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", (folder / "socket").c_str());
  CHECK_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  for (const char* const name : {"pipe", "link", "device", "folder", "socket"}) {
    for (const FileMode mode : {FileMode::kRead, FileMode::kReadWrite}) {
      for (const bool direct : {false, true}) {
        const Status status = posix_files().open(folder / name, mode, direct, &file);
        CHECK(status.code() == StatusCode::kCorrupt);
      }
    }
    CHECK_EQ(posix_files().open(folder / name, FileMode::kCreate, false, &file).detail(0), EEXIST);
    CHECK(posix_files().lock(folder / name, &lock, &holder).code() == StatusCode::kCorrupt);
  }
  CHECK(posix_files().open("/dev/zero", FileMode::kRead, false, &file).code() ==
        StatusCode::kCorrupt);
  ::close(fd);
}

TEST(folders_are_made_through_links_and_not_through_files) {
  const TestFolder folder;
  FileStat found;
  CHECK_OK(make_folders(posix_files(), folder / "a/b/c"));
  CHECK_OK(make_folders(posix_files(), folder / "a/b/c"));
  CHECK_OK(posix_files().stat(folder / "a/b/c", &found));
  CHECK(found.is_folder);
  CHECK_EQ(::symlink((folder / "a/b").c_str(), (folder / "link").c_str()), 0);
  CHECK_OK(make_folders(posix_files(), folder / "link"));
  CHECK_OK(make_folders(posix_files(), folder / "link/d"));
  CHECK_OK(folder_stat(posix_files(), folder / "a/b/d", &found));
  CHECK(found.is_folder);
  create(folder / "file");
  CHECK_EQ(make_folders(posix_files(), folder / "file/e").detail(0), ENOTDIR);
  CHECK_EQ(make_folders(posix_files(), folder / "file").detail(0), ENOTDIR);
  CHECK_EQ(::symlink((folder / "nowhere").c_str(), (folder / "dangling").c_str()), 0);
  CHECK(!make_folders(posix_files(), folder / "dangling").ok());
}

// Whoever made a folder may have died before he synced the one above.
TEST(folders_that_were_there_are_durable_too) {
  testing::VolatileFiles files;
  CHECK_OK(files.make_folder("/a"));
  CHECK_OK(files.make_folder("/a/b"));
  CHECK_OK(make_folders(files, "/a/b/c"));
  FileStat found;
  CHECK_OK(files.cut(testing::Kept::kNothing, 1)->stat("/a/b/c", &found));
}

// As of one whose parent this user may not read, or which is mounted read-only.
TEST(what_cannot_be_synced_by_this_user_is_no_obstacle_where_it_was_there) {
  for (const int error : {EACCES, EPERM, EROFS, EINVAL, EIO}) {
    testing::VolatileFiles inner;
    CHECK_OK(inner.make_folder("/a"));
    testing::HookedFiles files(inner);
    files.before = [&](const std::string& call, const std::string& path) {
      const bool refused = call == "sync_folder" && path == "/";
      return refused ? Status(StatusCode::kOsError, "sync_folder", error) : Status();
    };
    CHECK_EQ(make_folders(files, "/a/b").ok(), error != EIO);
    CHECK_EQ(make_folders(files, "/c").detail(0), error);  // it was missing: this user made it
  }
}

}  // namespace

TEST(a_folder_is_locked_once_even_if_its_lock_file_is_removed) {
  const TestFolder folder;
  const std::string path = folder / "lock";
  for (const bool removed : {false, true}) {
    std::string holder;
    std::unique_ptr<FileLock> one;
    std::unique_ptr<FileLock> other;
    CHECK_OK(posix_files().lock(path, &one, &holder));
    one->note("somebody");
    if (removed) CHECK_OK(posix_files().unlink(path));
    CHECK(posix_files().lock(path, &other, &holder).code() == StatusCode::kBusy);
    CHECK_EQ(holder, std::string(removed ? "" : "somebody"));
    one.reset();
    CHECK_OK(posix_files().lock(path, &other, &holder));
  }
}
