// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Opening a disk log: finds its segments and frames, the end of the log, and the records that
// count.
//
//   1. Every segment's header is read. If another version has written one, the open fails before
//      anything has changed.
//   2. The table of each segment is read, or, if it has none, its frames one after the other.
//   3. Frames behind the highest mark (disk/append.h, invariant 2) count up to the first gap, or up
//      to the first record that is not whole. The frames behind that point were never acknowledged
//      and are made unreachable. If a read fails, the log is not opened and nothing has changed.
//   4. The frames that count are synced: a process that died may have left them in a cache.
//
// Only step 3 reads payloads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "disk/segments.h"

namespace kvstrata::disk {

// The result of a recovery; Segments, Appender and Finder each adopt their part of it, once.
struct Recovered {
  struct FoundSegment {
    std::unique_ptr<Segment> segment;
    bool listed = false;              // its table is in the file
    std::vector<TableEntry> entries;  // of that table; if not listed, segment->table has them
  };
  struct ForeignFile {
    std::uint32_t number;
    std::uint64_t length_bytes;  // counts as used
  };

  std::vector<FoundSegment> segments;  // first the empty ones, then from oldest to newest
  std::vector<ForeignFile> foreign;
  std::vector<Leftover> leftovers;  // files of segments that were being made
  std::uint64_t sequence = 0;       // of the last frame that counts; all frames up to it are synced
  bool unmarked = false;            // records may lie behind the highest mark
  std::uint64_t unreadable_segments = 0;
};

// Returns an empty string, or a message that says why the log cannot be opened and what to do;
// after a message nothing has changed on the medium, except that step 3 may have overwritten frames
// that do not count. REQUIRES: the folder exists and is locked, and no other thread uses the log.
std::string recover(Shared& shared, Recovered* out);

// Visits, in any order, the records that count: those that no later tombstone or clear removes.
void for_each_record(const Recovered& recovered,
                     const std::function<void(Segment& segment, const TableEntry& entry)>& visit);

}  // namespace kvstrata::disk
