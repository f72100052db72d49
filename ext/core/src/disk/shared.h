// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The options of one disk log, and the state that all its parts share. DiskLog owns it, and it
// outlives them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "files/files.h"
#include "files/notes.h"

namespace kvstrata {

struct DiskOptions {
  std::string folder;  // absolute; made if it is missing
  std::uint64_t capacity_bytes = 0;
  std::uint64_t segment_bytes = 0;  // 0: segment_bytes_for(capacity_bytes)
  // A segment is made only if it leaves this much free on the file system.
  std::uint64_t min_free_bytes = 0;
  bool direct = true;  // bypass the page cache where the file system can
  // Share of a segment that is written again when it retires: its most recently used records.
  std::uint32_t reinsert_percent = 20;
  // True: the log makes segments ready in a thread of its own. False: put_end() makes them ready.
  bool own_threads = true;
};

// A 64th of the capacity; if that is less than 64 MiB, 64 MiB or a 16th of the capacity, whichever
// is less. At most 8 GiB.
constexpr std::uint64_t segment_bytes_for(std::uint64_t capacity_bytes) noexcept {
  const std::uint64_t most = capacity_bytes / 16;
  std::uint64_t bytes = capacity_bytes / 64;
  if (bytes < 64 << 20) bytes = most < 64 << 20 ? most : 64 << 20;
  if (bytes > std::uint64_t{8} << 30) bytes = std::uint64_t{8} << 30;
  return bytes / kFileBlockBytes * kFileBlockBytes;
}

// The least segment_bytes and capacity_bytes with which a log works well.
inline constexpr std::uint64_t kMinSegmentBytes = 8 * kFileBlockBytes;
inline constexpr std::uint64_t kMinDiskBytes = 16 * 2 * kMinSegmentBytes;

}  // namespace kvstrata

namespace kvstrata::disk {

// A function that takes a Lock& is called with the mutex held and returns with it held. If its
// comment says that it unlocks the mutex, it does so around its I/O, and state that the caller has
// read before the call may have changed.
using Lock = std::unique_lock<std::mutex>;

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
  NoteBook notes{};  // its lock is taken with or without the mutex held, and is a leaf
  FileOpener opener{files, options.direct, notes};

  // Guards the counts and all state of all parts. Never held over I/O.
  std::mutex mutex{};
  std::condition_variable changed{};  // frames were written or synced, segments ready or unpinned
  std::condition_variable due{};      // the log's own thread may have work
  Counts counts{};
};

}  // namespace kvstrata::disk
