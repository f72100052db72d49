// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Appending to a disk log: frames get their place, are written, and are synced.
//
//   placed -> written -> synced
//
// Invariants
//  1. A frame gets its place and its sequence in one step. Frames are acknowledged in order: a sync
//     covers the frames before the first frame that is not written yet. So after a crash the log is
//     complete up to the first gap, and no frame after the gap was ever acknowledged.
//  2. Every frame, and every segment's header, carries a mark: the sequence up to which all frames
//     were synced when this frame got its place or this header was made. The next open reads in
//     full only the records after the highest mark.
//  3. After a failed write or sync it is unknown which writes since the last successful sync are on
//     the medium, so the log takes no more frames and acknowledges none until it is opened again.
//
// REQUIRES, for every call: Shared::mutex is held.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "disk/frames.h"
#include "disk/segments.h"

namespace kvstrata::disk {

class Appender {
 public:
  Appender(Shared& shared, Segments& segments);

  // Called once, by recovery: new frames get greater sequences than `sequence`.
  void adopt(std::uint64_t sequence) noexcept { sequence_ = synced_ = sequence; }

  // -- the log's mode

  // The owner closes the log.
  void close() noexcept { stopping_ = true; }
  [[nodiscard]] bool stopping() const noexcept { return stopping_; }
  // A write or a sync failed: the records in the index can be loaded, and nothing is written.
  [[nodiscard]] bool read_only() const noexcept { return read_only_; }
  // Frames are taken, but no segment could be made ready; the next put tries again.
  void set_starved(bool starved) noexcept { starved_ = starved; }
  [[nodiscard]] bool starved() const noexcept { return starved_ && !stopping_ && !read_only_; }
  // Makes the log read-only. `what` says what failed, at which path.
  void write_failed(const std::string& what) noexcept;
  // kRefused, with the reason, if the log takes no frames.
  [[nodiscard]] Status refused() const noexcept;

  // -- places

  // Makes sure that the active segment has room for a frame of `frame_bytes` with `entries` entries
  // in the table. If it has no room, a free segment becomes the active one; with `leave_reserved`,
  // Segments::reserved() segments stay free. nullopt: no segment may be taken. An error: the log
  // takes no frames (refused()).
  [[nodiscard]] std::optional<Status> take_room(std::uint64_t frame_bytes, std::size_t entries,
                                                bool leave_reserved);
  // Gives a frame its place. REQUIRES: take_room() returned OK for a frame of this size, and the
  // mutex was held since.
  [[nodiscard]] PlacedFrame place(FrameHeader header);
  // Called after write_frame() with its status. After an error the log is read-only.
  void written(const PlacedFrame& placed, const Status& status) noexcept;
  // Places a frame without a record and writes it. REQUIRES: see place(). Unlocks the mutex.
  Status append(Lock& lock, FrameHeader header);

  // -- syncs

  // Returns OK when all frames up to this sequence are on the medium. One of the waiting threads
  // syncs for all. An error: a write or a sync failed. Unlocks the mutex.
  Status commit(Lock& lock, std::uint64_t sequence) noexcept;

  [[nodiscard]] std::uint64_t sequence() const noexcept { return sequence_; }  // the last placed
  [[nodiscard]] std::uint64_t synced() const noexcept { return synced_; }

 private:
  [[nodiscard]] bool fits(const Segment& segment, std::uint64_t frame_bytes,
                          std::size_t entries) const noexcept;
  [[nodiscard]] std::uint64_t written_up_to() const noexcept;

  Shared& shared_;
  Segments& segments_;
  bool stopping_ = false;
  bool read_only_ = false;
  bool starved_ = false;
  std::uint64_t run_;
  std::uint64_t sequence_ = 0;
  std::uint64_t synced_ = 0;
  std::set<std::uint64_t> writing_;  // placed, but not written yet
  bool syncing_ = false;             // one thread syncs at a time
};

}  // namespace kvstrata::disk
