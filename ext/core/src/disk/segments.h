// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The segments of a disk log: their files, their states, the lists that follow from the states, and
// the bytes that they take.
//
// Invariants
//  1. Segment::state says in which list a segment is. Only move() changes the state and the lists,
//     along the moves that it names.
//  2. Full segments are listed in the order in which they were filled, and retire in that order. So
//     a tombstone outlives every record that it removes.
//  3. A load pins its segment; a pinned segment is neither overwritten nor removed.
//  4. The lengths of all segments together never exceed capacity_bytes, unless it was lowered.
//  Files
//     that have a segment's name and are none, or could not be removed, count too.
//
// REQUIRES, for every call: Shared::mutex is held.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "disk/format.h"
#include "disk/shared.h"

namespace kvstrata::disk {

// Where a record's frame begins in a segment, and the first 8 bytes of its key: enough to find the
// record in the index.
struct FramePlace {
  std::uint32_t hash_low, hash_high;
  std::uint32_t block;
};
FramePlace frame_place(const Digest& key, std::uint32_t block) noexcept;

enum class SegmentState : std::uint8_t {
  kAbsent,    // no file has this number
  kFree,      // in the list of free segments: no frame in it counts
  kActive,    // frames are appended to it
  kFull,      // in the list of full segments, and its table is not in the file
  kListed,    // in the list of full segments, and its table is in the file
  kRetiring,  // the oldest in the list of full segments: its records are leaving the index, or have
  kDrained,   // in no list: no record of it is in the index, and no load reads it
};

struct Segment {
  std::uint32_t number = 0;
  SegmentState state = SegmentState::kAbsent;  // changed by Segments::move() alone
  std::uint64_t generation = 1;
  std::uint64_t length = 0;  // of the file, in whole blocks
  std::string path;
  std::shared_ptr<File> file;
  std::uint64_t end = kSegmentHeaderBytes;  // where the next frame goes
  FrameName last;                           // of this generation; zeros: no frame
  std::vector<FramePlace> records;          // the records that were published in this segment
  std::vector<TableEntry> table;            // of all frames; empty once it is in the file
  std::uint32_t pins = 0;
  std::uint32_t uses = 0;     // Finder::uses() when a record was last published in it
  bool dirty = false;         // something written is not synced
  bool table_failed = false;  // the table could not be written, and is not tried again

  [[nodiscard]] bool has_frames() const noexcept { return last != FrameName{}; }
};

class Segments {
 public:
  explicit Segments(Shared& shared) : shared_(shared) {}

  using Map = std::map<std::uint32_t, std::unique_ptr<Segment>>;
  [[nodiscard]] const Map& by_number() const noexcept { return segments_; }
  // REQUIRES: a segment has this number.
  [[nodiscard]] Segment& at(std::uint32_t number) noexcept { return *segments_.at(number); }
  [[nodiscard]] Segment* find(std::uint32_t number) noexcept;
  [[nodiscard]] Segment* active() noexcept { return active_; }
  // Numbers, oldest first.
  [[nodiscard]] const std::deque<std::uint32_t>& full() const noexcept { return full_; }
  [[nodiscard]] const std::deque<std::uint32_t>& free() const noexcept { return free_; }
  // How many free segments are reserved for the records that a retiring segment keeps; 0 if the log
  // has few segments.
  [[nodiscard]] std::size_t reserved() const noexcept;
  // Bytes of all segments and foreign files.
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }

  // REQUIRES one of these moves; for RETIRING -> DRAINED, that pins is 0:
  //
  //   ABSENT   -> FREE      its file was made or found
  //   FREE     -> ACTIVE    it takes the next frames
  //            -> DRAINED   it is to be dropped
  //   ACTIVE   -> FULL      the next frame does not fit
  //   FULL     -> LISTED    its table is in the file
  //   FULL, LISTED, RETIRING -> RETIRING  the records to keep were written again elsewhere
  //   RETIRING -> DRAINED   the last load from it has ended
  //   DRAINED  -> FREE      the header of its next generation is on the medium
  //            -> RETIRING  it could be neither renewed nor dropped
  //            -> ABSENT    its file is to be removed
  void move(Segment& segment, SegmentState to) noexcept;

  void pin(Segment& segment) noexcept { ++segment.pins; }
  void unpin(Segment& segment) noexcept;

  // The files. The next three unlock the mutex. `synced` is the mark in the segment's header.
  //
  // Makes a file and a free segment of it. EEXIST: another file has the name, and the next call
  // takes another number.
  Status create(Lock& lock, std::uint64_t synced) noexcept;
  // Makes a drained segment free: writes and syncs the header of its next generation, before
  // anything of this one is overwritten. After an error the segment is still retiring.
  Status renew(Lock& lock, Segment& segment, std::uint64_t synced) noexcept;
  // Removes the file of a drained segment, durably if it has frames, and destroys the segment.
  // After an error the file is foreign.
  Status drop(Lock& lock, Segment& segment) noexcept;

  // Takes over what recovery has found, once. The segment is ABSENT until the caller moves it.
  Segment& adopt(std::unique_ptr<Segment> segment);
  // A file that has the name of a segment and is left alone.
  void adopt_foreign(std::uint32_t number, std::uint64_t length_bytes) noexcept;

  // Forgets everything and closes the files.
  void clear() noexcept;

 private:
  [[nodiscard]] std::uint32_t unused_number() const noexcept;

  Shared& shared_;
  Map segments_;
  std::set<std::uint32_t> foreign_;  // numbers
  std::deque<std::uint32_t> full_;
  std::deque<std::uint32_t> free_;
  Segment* active_ = nullptr;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace kvstrata::disk
