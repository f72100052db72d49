// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// State that all parts of one disk log share. DiskLog owns it, and it outlives them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "disk/options.h"
#include "files/notes.h"

namespace kvstrata::disk {

// A function that takes a Lock& is called with the mutex held and returns with it held. If its
// comment says that it unlocks the mutex, it does so around its I/O, and state that the caller has
// read before the call may have changed.
using Lock = std::unique_lock<std::mutex>;

// Opens files: direct ones if `direct` is true and the file system has direct files.
class FileOpener {
 public:
  FileOpener(FileLayer& files, bool direct) : files_(files), direct_(direct) {}
  Status open(const std::string& path, FileMode mode, std::unique_ptr<File>* out) noexcept;

 private:
  FileLayer& files_;
  bool direct_;
};

struct Counts {
  std::uint64_t put_bytes = 0;
  std::uint64_t written_bytes = 0;
  std::uint64_t reinserted_records = 0;
  std::uint64_t reinserted_bytes = 0;
  std::uint64_t evicted_records = 0;
  std::uint64_t deleted_records = 0;
  std::uint64_t corrupt_records = 0;
  std::uint64_t loaded_records = 0;
  std::uint64_t retired_segments = 0;
  std::uint64_t unreadable_segments = 0;
  std::uint64_t syncs = 0;
};

struct Shared {
  const DiskOptions options;
  FileLayer& files;
  FileOpener opener{files, options.direct};  // for the thread that opens or maintains the log
  NoteBook notes{};  // its lock is taken with or without the mutex held, and is a leaf

  // Guards the counts and all state of all parts. Never held over I/O.
  std::mutex mutex{};
  std::condition_variable changed{};  // frames were written or synced, segments ready or unpinned
  std::condition_variable due{};      // the log's own thread may have work
  Counts counts{};
};

}  // namespace kvstrata::disk
