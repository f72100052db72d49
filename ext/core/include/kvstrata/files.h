// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The file layer: every system call that the media on local file systems (fs, disk) make. Behind an
// interface, so that tests can put a medium with a volatile cache, or one that fails, in its place.
//
// What is promised after a power cut, and no more (posix_files() on a file system with barriers):
//   - bytes and length of a file as of its last sync(); of later writes any subset, torn at 512
//     bytes: a write within one aligned block of 512 bytes happens whole or not at all;
//   - the names in a directory as of its last sync_folder(); of later creations, renames and
//     removals any subset, each by itself whole or not at all (a file is there under its old name,
//     its new one, or both, never under none).
// A process that dies loses nothing that it wrote.
//
// Errors are kOsError with errno in detail(0), unless a function says otherwise. Thread-safe, files
// too. Paths are absolute; a link in the last component is refused, never followed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvstrata/status.h"

namespace kvstrata {

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
  std::uint64_t inode = 0;  // another one for each file of a device that is there
  std::int64_t modified_unix_ns = 0;
  std::int64_t accessed_unix_ns = 0;
};

class File {
 public:
  virtual ~File() = default;

  // Fills all parts, in order, from `offset`. kOutOfRange: the file ends before.
  virtual Status read(std::span<const ReadPart> parts, std::uint64_t offset) noexcept = 0;

  // Writes all parts, in order, at `offset`; after an error any of it may be written.
  virtual Status write(std::span<const WritePart> parts, std::uint64_t offset) noexcept = 0;

  // Bytes and length are on the medium when it returns. After an error nothing written since the
  // last sync that went well can be relied on, and no later sync heals it.
  virtual Status sync() noexcept = 0;

  // Makes the file at least `length` long, what is new reading as zeros. Its blocks are reserved
  // where the file system can; elsewhere a later write may find no space.
  virtual Status allocate(std::uint64_t length) noexcept = 0;

  virtual Status truncate(std::uint64_t length) noexcept = 0;

  // Also where its name is gone or another file's.
  virtual Status stat(FileStat* out) noexcept = 0;
  Status length(std::uint64_t* out) noexcept;

  // What the next stat() says; modification time stays.
  virtual Status set_access_time(std::int64_t unix_ns) noexcept = 0;

  // Bypasses the page cache: offset and whole length of reads and writes are multiples of
  // kFileBlockBytes, else kBadArgument. Memory may have any address, but where one part is not
  // aligned to blocks in address and length, all are copied on the way.
  [[nodiscard]] virtual bool direct() const noexcept = 0;
};

// Held until it is destroyed, or its process ends.
class FileLock {
 public:
  virtual ~FileLock() = default;
  // What the holder says about itself to those who find it locked; a failure is of no consequence.
  virtual void note(const std::string& text) noexcept = 0;
};

enum class FileMode : std::uint8_t {
  kRead,       // must be there
  kReadWrite,  // must be there
  kCreate,     // must not be there (EEXIST)
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

  // Private to this user (0600). kUnsupported: `direct` was asked for and this file system has no
  // direct files; nothing was created.
  virtual Status open(const std::string& path, FileMode mode, bool direct,
                      std::unique_ptr<File>* out) noexcept = 0;

  // Replaces what is at `to`.
  virtual Status rename(const std::string& from, const std::string& to) noexcept = 0;
  virtual Status unlink(const std::string& path) noexcept = 0;
  virtual Status make_folder(const std::string& path) noexcept = 0;  // 0700; EEXIST
  virtual Status sync_folder(const std::string& path) noexcept = 0;

  virtual Status stat(const std::string& path, FileStat* out) noexcept = 0;
  // In any order, without . and .. .
  virtual Status list(const std::string& path, std::vector<FolderEntry>* out) noexcept = 0;
  virtual Status space(const std::string& path, FileSpace* out) noexcept = 0;

  // Makes the file if need be and locks it without waiting. kBusy: another process, or another lock
  // of this one, has it; `holder` is then its note.
  virtual Status lock(const std::string& path, std::unique_ptr<FileLock>* out,
                      std::string* holder) noexcept = 0;
  // As lock(), side by side with others that lock it so. kUnsupported: this layer has no such
  // locks.
  virtual Status lock_shared(const std::string& /*path*/, std::unique_ptr<FileLock>* /*out*/,
                             std::string* /*holder*/) noexcept {
    return Status(StatusCode::kUnsupported, "this file layer has no shared locks");
  }
};

// The operating system's files. Lives for ever.
FileLayer& posix_files() noexcept;

// A sentence for a failed call: "path: No space left on device".
std::string describe_file_error(const std::string& path, const Status& status);

// Whether it is kOsError with this errno.
bool is_os_error(const Status& status, int error) noexcept;

// As FileLayer::stat, of a folder or a link to one; ENOTDIR for anything else.
Status folder_stat(FileLayer& files, const std::string& path, FileStat* out);

// Makes the folders of `path` that are missing, private to this user. The names of all of them are
// durable when it returns, also of those that were there: whoever made them may have died before he
// synced them.
Status make_folders(FileLayer& files, const std::string& path);

}  // namespace kvstrata
