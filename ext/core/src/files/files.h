// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The file layer: every system call of the adapters for local file systems (fs, disk). It is an
// interface, so that tests can replace it with a medium with a volatile cache, or one that fails.
//
// Only these bytes and names survive a power cut (posix_files() on a file system with barriers):
//   - the bytes and the length of a file as of its last sync(). Of later writes any subset may
//     survive, torn at 512 bytes: a write within one aligned block of 512 bytes happens whole or
//     not at all.
//   - the names in a directory as of its last sync_folder(). Of later creations, renames and
//     removals any subset may survive, each whole or not at all: a renamed file has its old name,
//     its new name or both, never neither.
// The death of a process loses nothing that the process wrote.
//
// Errors are kOsError with errno in detail(0), unless a function says otherwise. Everything here is
// thread-safe, File objects too. Paths are absolute. If the last component of a path is a symbolic
// link, open() and the locks refuse it, and stat() reports the link itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvstrata {

class NoteBook;  // files/notes.h

// Offsets and lengths of direct files are multiples of this.
inline constexpr std::uint64_t kFileBlockBytes = 4096;

struct ReadPart {
  void* bytes;
  std::size_t length;
};

struct WritePart {
  const void* bytes;
  std::size_t length;
};

struct FileStat {
  bool is_file = false;  // a regular one
  bool is_folder = false;
  std::uint64_t length = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;  // unique among the existing files of a device
  std::int64_t modified_unix_ns = 0;
  std::int64_t accessed_unix_ns = 0;
};

class File {
 public:
  virtual ~File() = default;

  // Fills all parts, in order, from `offset`. kOutOfRange: the file ends before the last part is
  // full. After an error the parts are undefined.
  virtual Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept = 0;

  // Writes all parts, in order, at `offset`. After an error any of their bytes may have been
  // written.
  virtual Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept = 0;

  // Returns OK when the bytes and the length are on the medium. After an error no byte that was
  // written since the last successful sync can be relied on, and no later sync repairs that.
  virtual Status sync() noexcept = 0;

  // The first offset from `offset` on that may hold bytes other than zeros; the file's length or
  // more if there is none. A file system that does not know returns `offset`.
  virtual std::uint64_t next_data(std::uint64_t offset) noexcept { return offset; }

  // Makes the file at least `length` bytes long; new bytes read as zeros. Reserves its blocks where
  // the file system can; elsewhere a later write may find no space.
  virtual Status allocate(std::uint64_t length) noexcept = 0;

  virtual Status truncate(std::uint64_t length) noexcept = 0;

  // Describes this open file, also when its name was removed or now belongs to another file.
  virtual Status stat(FileStat* out) noexcept = 0;
  Status length(std::uint64_t* out) noexcept;

  // Sets the access time that stat() reports; the modification time stays.
  virtual Status set_access_time(std::int64_t unix_ns) noexcept = 0;

  // Whether reads and writes bypass the page cache. If they do, the offset and the total length of
  // each must be multiples of kFileBlockBytes, otherwise kBadArgument. Parts may have any address
  // and length, but unless every part is aligned to blocks in both, all bytes are copied through a
  // buffer.
  [[nodiscard]] virtual bool direct() const noexcept = 0;
};

// The lock is held until the object is destroyed or the process ends.
class FileLock {
 public:
  virtual ~FileLock() = default;
  // Writes `text` about the holder into the file, for processes that find it locked. Failures are
  // ignored.
  virtual void note(const std::string& text) noexcept = 0;
};

enum class FileMode : std::uint8_t {
  kRead,       // the file must exist
  kReadWrite,  // the file must exist
  kCreate,     // the file must not exist (EEXIST)
};

struct FolderEntry {
  std::string name;
  bool is_file = false;  // a regular one
  bool is_folder = false;
};

struct FileSpace {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // for users without privileges
};

class FileLayer {
 public:
  virtual ~FileLayer() = default;

  // A created file is private to this user (0600). kCorrupt: the name belongs to something other
  // than a regular file (a pipe, a socket, a device, a folder, a link); the call does not wait for
  // it. kUnsupported: `direct` was requested, and this file system has no direct files; nothing was
  // created.
  virtual Status open(const std::string& path, FileMode mode, bool direct,
                      std::unique_ptr<File>* out) noexcept = 0;

  // Replaces the file at `to`, if there is one.
  virtual Status rename(const std::string& from, const std::string& to) noexcept = 0;
  virtual Status unlink(const std::string& path) noexcept = 0;
  // The new folder is private to this user (0700). EEXIST: the path exists.
  virtual Status make_folder(const std::string& path) noexcept = 0;
  // Returns OK when the names in the folder are on the medium.
  virtual Status sync_folder(const std::string& path) noexcept = 0;

  virtual Status stat(const std::string& path, FileStat* out) noexcept = 0;
  // Lists the entries in any order, without "." and "..".
  virtual Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept = 0;
  virtual Status space(const std::string& path, FileSpace* out) noexcept = 0;

  // Creates the file if it is missing and locks it, without waiting. kBusy: another process, or
  // another FileLock of this one, holds the lock; `holder` is then that holder's note. kCorrupt: as
  // for open(). The folder of `path` is locked as well, so that nobody gets a second lock by
  // removing the file. (The file alone is locked where folders cannot be, and between the hosts of
  // a network file system.)
  virtual Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
                      std::string* holder) noexcept = 0;
};

// Opens files: direct ones if `direct` is true and the file system has direct files; that it has
// none becomes a note. All references must outlive it.
class FileOpener {
 public:
  FileOpener(FileLayer& files, bool direct, NoteBook& notes) noexcept
      : files_(files), notes_(notes), direct_(direct) {}
  Status open(const std::string& path, FileMode mode, std::unique_ptr<File>* out);

 private:
  FileLayer& files_;
  NoteBook& notes_;
  std::atomic<bool> direct_;
};

// The operating system's files. The object is never destroyed.
FileLayer& posix_files() noexcept;

// "!" (see Connector::open) if no folder can ever be used at the path that failed so, else "".
[[nodiscard]] const char* stops_start(const Status& status);

// Describes a failed call: "path: No space left on device".
std::string describe_file_error(const std::string& path, const Status& status);

// Whether the status is kOsError with this errno.
bool is_os_error(const Status& status, int error) noexcept;

// Whether the file system or a quota is full, or a limit of ours on its free space is reached.
bool is_no_space(const Status& status) noexcept;

// Whether the file or directory does not exist.
bool is_not_there(const Status& status) noexcept;

// As FileLayer::stat, but follows a link to a folder; ENOTDIR for anything that is not a folder.
Status folder_stat(FileLayer& files, const std::string& path, FileStat* out);

// Creates the missing folders of `path`, private to this user. When it returns OK, the names of all
// folders of `path` are durable, also of those that existed, whose creator may have died before it
// synced their names.
Status make_folders(FileLayer& files, const std::string& path);

}  // namespace kvstrata
