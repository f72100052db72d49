// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Opening a disk log: finds its segments and frames, the end of the log, and the records that
// count.
//
//   1. Every segment's header is read. If another version has written one, the open fails before
//      anything has changed.
//   2. The table of each segment is read, or, if it has none, its frames one after the other.
//   3. A frame behind the highest mark (disk/append.h, invariant 2) counts if it is whole. The
//      others were never acknowledged, and their headers are overwritten. If a read fails, the log
//      is not opened and nothing has changed.
//   4. The frames that count are synced: a process that died may have left them in a cache.
//
// Only step 3 reads payloads. Damage costs the frames that it hits: where no frame begins, step 2
// searches on, up to where nothing was written in this generation of the segment. A segment whose
// header is damaged has the generation of its frames. What is lost is counted and noted.
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
  std::uint64_t sequence = 0;  // new frames get greater ones; all frames up to it are synced
  std::uint64_t unreadable_segments = 0;
  std::uint64_t lost_frames = 0;  // damaged ones, as far as others show that they are missing
};

// Returns an empty string, or a message that says why the log cannot be opened and what to do;
// after a message nothing has changed on the medium, except that step 3 may have overwritten frames
// that do not count. REQUIRES: the folder exists and is locked, and no other thread uses the log.
std::string recover(Shared& shared, Recovered* out);

// Visits, in any order, the records that count: those that no later tombstone or clear removes.
void for_each_record(const Recovered& recovered,
                     const std::function<void(Segment& segment, const TableEntry& entry)>& visit);

}  // namespace kvstrata::disk
