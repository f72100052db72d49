// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Makes segments of a disk log ready for new frames: writes the tables of full segments, makes
// files up to the capacity, and after that retires the oldest segment.
//
// A segment retires in this order: the records to keep are written again at the log's end and
// synced; the other records leave the index and are reported as evicted; the loads that read the
// segment end; the header of its next generation is written and synced, or its file is removed.
// Only then may the segment be overwritten.
//
// REQUIRES, for every call: Shared::mutex is held.
#pragma once

#include <cstdint>

#include "disk/append.h"
#include "disk/find.h"
#include "disk/segments.h"

namespace kvstrata::disk {

class Retirer {
 public:
  Retirer(Shared& shared, Segments& segments, Appender& appender, Finder& finder)
      : shared_(shared), segments_(segments), appender_(appender), finder_(finder) {}

  // As Appender::take_room(), for new frames: if no segment is free, makes one ready, or waits up
  // to a second while another thread does so. kTimedOut: none became ready. Unlocks the mutex, but
  // not between its last check and its return.
  Status make_room(Lock& lock, std::uint64_t frame_bytes, std::size_t entries);

  // Writes the tables of full segments, then makes segments free: the reserved one, and one for new
  // frames. Unlocks the mutex. REQUIRES: !maintaining().
  Status maintain(Lock& lock) noexcept;
  [[nodiscard]] bool maintaining() const noexcept { return maintaining_; }
  // Whether the log's own thread should call maintain() now.
  [[nodiscard]] bool is_due() const noexcept;

  // Called by close(): writes the tables of all segments that have frames, so that the next open
  // finds each frame in two places. Unlocks the mutex. REQUIRES: no other thread uses the log.
  void write_last_tables(Lock& lock) noexcept;

  // Called by open(). If the capacity was lowered, removes free segments and then the oldest ones,
  // until the log fits. Unlocks the mutex. REQUIRES: no other thread uses the log.
  Status shrink(Lock& lock) noexcept;

 private:
  void write_tables(Lock& lock) noexcept;
  Status write_table(Lock& lock, Segment& segment) noexcept;
  Status next_segment(Lock& lock) noexcept;
  Status retire(Lock& lock, Segment& segment) noexcept;
  Status drop(Lock& lock, Segment& segment) noexcept;
  void reinsert(Lock& lock, Segment& segment) noexcept;
  void evict_records(Lock& lock, Segment& segment) noexcept;

  Shared& shared_;
  Segments& segments_;
  Appender& appender_;
  Finder& finder_;
  bool maintaining_ = false;  // one thread maintains at a time, and may sync meanwhile
};

}  // namespace kvstrata::disk
