// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/retire.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <tuple>
#include <utility>
#include <vector>

#include "base/patience.h"

namespace kvstrata::disk {

namespace {

// How long a put waits for a segment that is being made ready.
constexpr std::chrono::seconds kRoomWait{1};
// How long a retiring segment waits for its running loads before maintain() reports that there is
// no room.
constexpr std::chrono::seconds kPinWait{1};
// Records that are visited before other threads get the mutex.
constexpr std::size_t kRecordsInOneGo = 256;

// After every kRecordsInOneGo records, lets other threads have the mutex.
void yield_mutex(Lock& lock, std::size_t at) noexcept {
  if (at % kRecordsInOneGo != kRecordsInOneGo - 1) return;
  lock.unlock();
  lock.lock();
}

bool needs_table(const Segment& segment, std::uint64_t synced) noexcept {
  return segment.state == SegmentState::kFull && !segment.table_failed &&
         segment.last.sequence <= synced;
}

}  // namespace

Status Retirer::make_room(Lock& lock, std::uint64_t frame_bytes, std::size_t entries) {
  const auto until = std::chrono::steady_clock::now() + patience(kRoomWait);
  appender_.set_starved(false);
  for (;;) {
    if (const auto room = appender_.take_room(frame_bytes, entries, true)) return *room;
    if (!maintaining_)
      KVSTRATA_RETURN_IF_ERROR(maintain(lock));
    else if (shared_.changed.wait_until(lock, until) == std::cv_status::timeout)
      return Status(StatusCode::kTimedOut, Reason::kNoRoom, "no segment became ready");
  }
}

bool Retirer::is_due() const noexcept {
  if (maintaining_ || appender_.read_only()) return false;
  if (segments_.free().size() <= segments_.reserved() && !appender_.starved()) return true;
  return std::any_of(segments_.full().begin(), segments_.full().end(),
                     [this](std::uint32_t number) {
                       return needs_table(segments_.at(number), appender_.synced());
                     });
}

Status Retirer::maintain(Lock& lock) noexcept {
  maintaining_ = true;
  write_tables(lock);
  Status status = appender_.refused();
  while (status.ok() && segments_.free().size() <= segments_.reserved()) {
    status = next_segment(lock);
    if (status.ok()) status = appender_.refused();
  }
  maintaining_ = false;
  shared_.changed.notify_all();
  return status;
}

Status Retirer::shrink(Lock& lock) noexcept {
  const std::uint64_t capacity_bytes = shared_.options.capacity_bytes;
  if (segments_.total_bytes() <= capacity_bytes) return Status();
  maintaining_ = true;
  Status status;
  while (status.ok() && segments_.total_bytes() > capacity_bytes && !segments_.free().empty()) {
    Segment& segment = segments_.at(segments_.free().back());
    segments_.move(segment, SegmentState::kDrained);
    status = drop(lock, segment);
  }
  while (status.ok() && segments_.total_bytes() > capacity_bytes && !segments_.full().empty())
    status = retire(lock, segments_.at(segments_.full().front()));
  maintaining_ = false;
  return status;
}

// -- tables

// A table only saves time at the next open: it gets no sync of its own, and a failure to write it
// is ignored.
void Retirer::write_tables(Lock& lock) noexcept {
  for (std::size_t i = 0; i < segments_.full().size(); ++i) {
    Segment& segment = segments_.at(segments_.full()[i]);
    if (needs_table(segment, appender_.synced())) (void)write_table(lock, segment);
  }
}

void Retirer::write_last_tables(Lock& lock) noexcept {
  if (!appender_.commit(lock, appender_.sequence()).ok()) return;
  Segment* const active = segments_.active();
  if (active != nullptr && active->has_frames()) segments_.move(*active, SegmentState::kFull);
  write_tables(lock);
}

// REQUIRES: the segment is full, all its frames are synced, and it has no table yet.
Status Retirer::write_table(Lock& lock, Segment& segment) noexcept {
  // A file that was cut may have no room.
  if (segment.end + table_bytes(segment.table.size()) > segment.length) {
    segment.table_failed = true;
    return Status(StatusCode::kNoSpace, "room for the table of a segment that was cut");
  }
  SegmentTable table{.segment = segment.number,
                     .generation = segment.generation,
                     .last = segment.last,
                     .end = segment.end,
                     .entries = std::exchange(segment.table, {})};
  lock.unlock();
  std::vector<FileBlock> blocks;
  encode(table, &blocks);
  const std::uint64_t bytes = blocks.size() * kFileBlockBytes;
  const WritePart parts[] = {{blocks.data(), bytes}};
  const Status status = segment.file->write(parts, segment.length - bytes);
  lock.lock();
  if (!status.ok()) {
    segment.table_failed = true;
    segment.table = std::move(table.entries);
    return status;
  }
  if (segment.state == SegmentState::kFull) segments_.move(segment, SegmentState::kListed);
  segment.dirty = true;
  shared_.counts.written_bytes += bytes;
  return Status();
}

// -- segments become free

Status Retirer::next_segment(Lock& lock) noexcept {
  Status created(StatusCode::kNoSpace, Reason::kNoRoom, "the capacity is used");
  if (segments_.total_bytes() + shared_.options.segment_bytes <= shared_.options.capacity_bytes) {
    do
      created = segments_.create(lock, appender_.synced());
    while (is_os_error(created, EEXIST));
    if (created.ok()) return created;
  }
  if (segments_.full().empty()) return created;
  return retire(lock, segments_.at(segments_.full().front()));
}

// Retires the oldest segment: makes it free, or removes its file. After an error it is still
// retiring, with fewer records, or the log is read-only.
Status Retirer::retire(Lock& lock, Segment& segment) noexcept {
  KVSTRATA_RETURN_IF_ERROR(appender_.commit(lock, segment.last.sequence));
  reinsert(lock, segment);
  segments_.move(segment, SegmentState::kRetiring);
  evict_records(lock, segment);
  const auto until = std::chrono::steady_clock::now() + patience(kPinWait);
  while (segment.pins > 0) {
    if (shared_.changed.wait_until(lock, until) == std::cv_status::timeout && segment.pins > 0)
      return Status(StatusCode::kTimedOut, Reason::kNoRoom, "loads keep the segment");
  }
  segments_.move(segment, SegmentState::kDrained);
  const bool goes = segment.length != shared_.options.segment_bytes ||
                    segments_.total_bytes() > shared_.options.capacity_bytes;
  const Status status =
      goes ? drop(lock, segment) : segments_.renew(lock, segment, appender_.synced());
  if (status.ok()) ++shared_.counts.retired_segments;
  return status;
}

// Removes the file of a drained segment. If that fails, segments that were filled later must not be
// used again, since a tombstone must outlive the record that it removes: the log is read-only.
Status Retirer::drop(Lock& lock, Segment& segment) noexcept {
  const std::string path = segment.path;
  const Status status = segments_.drop(lock, segment);
  if (!status.ok()) appender_.write_failed("cannot remove " + describe_file_error(path, status));
  return status;
}

// Writes the most recently used records of the segment again, at the log's end, up to the share
// reinsert_percent and as far as the log has room.
void Retirer::reinsert(Lock& lock, Segment& segment) noexcept {
  struct Hot {
    Digest key;
    DiskPlace place;
  };
  std::vector<Hot> hot;
  const std::uint32_t now = finder_.uses();
  const std::uint32_t old = segments_.at(segments_.full()[segments_.full().size() / 2]).uses;
  for (std::size_t at = 0; at < segment.records.size(); ++at) {
    const DiskIndex::Entry* const entry = finder_.find_at(segment, segment.records[at]);
    if (entry != nullptr && entry->place.used != 0 && now - entry->place.used < now - old)
      hot.push_back({entry->key, entry->place});
    yield_mutex(lock, at);
  }
  // The count of uses may have wrapped, so its distance from the present count gives the order. Of
  // a chain that was used at once, the first record was put first, and stays rather than the
  // others.
  std::sort(hot.begin(), hot.end(), [now](const Hot& a, const Hot& b) {
    return std::tuple(now - a.place.used, a.place.sequence) <
           std::tuple(now - b.place.used, b.place.sequence);
  });
  std::uint64_t left = segment.length / 100 * shared_.options.reinsert_percent;
  std::vector<PlacedFrame> again;
  segments_.pin(segment);
  for (const Hot& record : hot) {
    FrameHeader header{
        .kind = FrameKind::kRecord, .record_bytes = record.place.record_bytes, .key = record.key};
    // One record may always stay: in a small log a record may be larger than the share.
    if (header.frame_bytes() > left && !again.empty()) continue;
    lock.unlock();
    std::vector<FileBlock> memory(whole_blocks(record.place.record_bytes) / kFileBlockBytes);
    unsigned char* const bytes = memory.data()->bytes.data();
    Status status;
    const bool sound =
        read_frame(*segment.file, record.place, record.key, segment.generation, bytes, &status) &&
        may_stay(bytes, record.place.record_bytes, record.key);
    lock.lock();
    if (!sound) {  // the record is evicted with the others
      if (is_missing(status)) ++shared_.counts.corrupt_records;
      continue;
    }
    const std::optional<Status> room = appender_.take_room(header.frame_bytes(), 1, false);
    if (!room.has_value() || !room->ok()) break;
    const DiskPlace* const found = finder_.find(record.key);
    if (found == nullptr || found->sequence != record.place.sequence) continue;
    left -= std::min(left, header.frame_bytes());
    header.head_crc = head_crc_of(bytes, record.place.record_bytes);
    PlacedFrame placed = appender_.place(std::move(header));
    placed.parent = record.place.parent;
    finder_.begin_put(record.key);
    lock.unlock();
    status = write_frame(placed, bytes);
    lock.lock();
    appender_.written(placed, status);
    if (!status.ok()) {
      finder_.end_put(record.key);
      break;
    }
    again.push_back(placed);
  }
  const bool synced =
      again.empty() || appender_.commit(lock, again.back().header.name.sequence).ok();
  for (const PlacedFrame& placed : again) {
    // If the key was deleted meanwhile, its tombstone comes after this frame, and publish() ignores
    // the frame.
    if (synced) {
      finder_.publish(placed);
      ++shared_.counts.reinserted_records;
      shared_.counts.reinserted_bytes += placed.header.frame_bytes();
    }
    finder_.end_put(placed.header.key);
  }
  segments_.unpin(segment);
}

// Takes the records that the segment still holds out of the index, and reports them as evicted.
void Retirer::evict_records(Lock& lock, Segment& segment) noexcept {
  for (std::size_t at = 0; at < segment.records.size(); ++at) {
    finder_.evict_at(segment, segment.records[at]);
    yield_mutex(lock, at);
  }
  segment.records.clear();
  segment.records.shrink_to_fit();
}

}  // namespace kvstrata::disk
