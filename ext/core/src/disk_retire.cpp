// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Segments of the disk log come, are listed in their tables, retire and come again; the scrubber.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "kvstrata/disk_log.h"
#include "kvstrata/record.h"

namespace kvstrata {

namespace {

// How long loads may keep a segment from being used again before a put is told that there is no
// room.
constexpr std::chrono::seconds kPinWait{1};
// Records looked at in one go while everybody waits.
constexpr std::size_t kSlotsInOneGo = 256;
constexpr std::size_t kSegmentsWithReserve = 4;
constexpr double kScrubPauseSeconds = 60;
constexpr std::uint64_t kScrubStepBytes = 8 << 20;

struct FreeBytes {
  void operator()(void* bytes) const noexcept { std::free(bytes); }
};

// Memory for one record, such as direct files take. Nothing when there is none.
std::unique_ptr<std::uint8_t, FreeBytes> record_memory(std::uint32_t record_bytes) noexcept {
  return std::unique_ptr<std::uint8_t, FreeBytes>(
      static_cast<std::uint8_t*>(std::aligned_alloc(kFileBlockBytes, whole_blocks(record_bytes))));
}

// What another version wrote cannot be judged, and stays.
bool may_stay(const std::uint8_t* record, std::uint32_t length, const Digest& key) noexcept {
  const Status status = verify_stored_record(record, length, &key);
  return status.ok() || status.code() == StatusCode::kIncompatible;
}

}  // namespace

// -- the log's own thread

bool DiskLog::work_is_due() const noexcept {
  if (maintaining_ || read_only_) return false;
  if (free_.size() <= reserved_segments() && !maintenance_failed_) return true;
  return std::any_of(full_.begin(), full_.end(), [this](std::uint32_t number) {
    const Segment& segment = *segments_.at(number);
    return !segment.tabled && !segment.table_failed && segment.last.sequence <= synced_;
  });
}

void DiskLog::work() {
  Lock lock(mutex_);
  for (;;) {
    due_.wait(lock, [this] { return stopping_ || work_is_due(); });
    if (stopping_) return;
    maintenance_failed_ = !maintain(lock).ok();
  }
}

// What is free and only for what a retiring segment is to keep; none where there are few segments.
std::size_t DiskLog::reserved_segments() const noexcept {
  return full_.size() + free_.size() >= kSegmentsWithReserve ? 1 : 0;
}

// Tables of what is full, then free segments: the reserved one and one for what is new. REQUIRES:
// !maintaining_.
Status DiskLog::maintain(Lock& lock) noexcept {
  maintaining_ = true;
  write_tables(lock);
  Status status = refused();
  while (status.ok() && free_.size() <= reserved_segments()) {
    status = next_segment(lock);
    if (status.ok()) status = refused();
  }
  maintaining_ = false;
  changed_.notify_all();
  return status;
}

// A table only saves time at the next open: it is not synced for its own sake, and one that could
// not be written is done without.
void DiskLog::write_tables(Lock& lock) noexcept {
  for (std::size_t i = 0; i < full_.size(); ++i) {
    Segment& segment = segment_at(full_[i]);
    if (!segment.tabled && !segment.table_failed && segment.last.sequence <= synced_)
      (void)write_table(lock, segment);
  }
}

// REQUIRES: the segment is full, all its frames are synced, and it has no table yet.
Status DiskLog::write_table(Lock& lock, Segment& segment) noexcept {
  SegmentTable table{.segment = segment.number,
                     .generation = segment.generation,
                     .last = segment.last,
                     .end = segment.end,
                     .entries = std::move(segment.table)};
  segment.table = {};
  lock.unlock();
  std::vector<DiskBlock> blocks;
  encode(table, &blocks);
  const std::uint64_t bytes = blocks.size() * kFileBlockBytes;
  const WritePart parts[] = {{blocks.data(), bytes}};
  const Status status = segment.file->write(parts, segment.length - bytes);
  lock.lock();
  segment.tabled = status.ok();
  segment.table_failed = !status.ok();
  if (!status.ok()) {
    segment.table = std::move(table.entries);
    return status;
  }
  segment.dirty = true;
  counts_.written_bytes += bytes;
  return Status();
}

// -- segments come and go

Status DiskLog::next_segment(Lock& lock) noexcept {
  const Status removed = remove_leftovers(lock);
  Status created(StatusCode::kNoSpace, "the capacity is used");
  if (total_bytes_ + options_.segment_bytes <= options_.capacity_bytes) {
    do
      created = create_segment(lock);
    while (is_os_error(created, EEXIST));
    if (created.ok()) return created;
  }
  KVSTRATA_RETURN_IF_ERROR(removed);
  if (full_.empty()) return created;
  return retire(lock, segment_at(full_.front()));
}

// The lowest number that no file in the folder has.
std::uint32_t DiskLog::unused_number() const noexcept {
  std::uint32_t number = 0;
  while (segments_.contains(number) || taken_numbers_.contains(number))
    ++number;
  return number;
}

Status DiskLog::create_segment(Lock& lock) noexcept {
  auto segment = std::make_unique<Segment>();
  segment->number = unused_number();
  segment->length = options_.segment_bytes;
  char name[16];
  std::snprintf(name, sizeof(name), "/%08x.seg", segment->number);
  segment->path = options_.folder + name;
  const SegmentHeader header{.segment = segment->number,
                             .generation = segment->generation,
                             .length = segment->length,
                             .synced = synced_};
  lock.unlock();
  FileSpace space;
  Status status = files_.space(options_.folder, &space);
  if (status.ok() && space.free_bytes < options_.min_free_bytes + segment->length)
    status = Status(StatusCode::kOsError, "space", ENOSPC);
  if (status.ok()) {
    std::unique_ptr<File> file;
    status = open_file(segment->path, FileMode::kCreate, &file);
    segment->file = std::move(file);
    DiskBlock block;
    encode(header, &block);
    const WritePart parts[] = {{block.bytes.data(), kFileBlockBytes}};
    // The header is synced with the first frame behind it.
    if (status.ok()) status = segment->file->allocate(segment->length);
    if (status.ok()) status = segment->file->write(parts, 0);
    if (status.ok()) status = files_.sync_folder(options_.folder);
  }
  lock.lock();
  // A file that came after open() has this name.
  if (is_os_error(status, EEXIST)) taken_numbers_.insert(segment->number);
  if (!status.ok() && segment->file != nullptr) {
    leave_file(*segment, segment->length);
    (void)remove_leftovers(lock);
  }
  if (!status.ok()) return status;
  counts_.written_bytes += kSegmentHeaderBytes;
  segment->dirty = true;
  total_bytes_ += segment->length;
  free_.push_back(segment->number);
  segments_[segment->number] = std::move(segment);
  return Status();
}

// Frees the oldest segment. An error leaves it full, with fewer records.
Status DiskLog::retire(Lock& lock, Segment& segment) noexcept {
  KVSTRATA_RETURN_IF_ERROR(commit(lock, segment.last.sequence));
  reinsert(lock, segment);
  segment.retiring = true;
  drop_records(lock, segment);
  const auto until = std::chrono::steady_clock::now() + kPinWait;
  while (segment.pins > 0) {
    if (changed_.wait_until(lock, until) == std::cv_status::timeout && segment.pins > 0)
      return Status(StatusCode::kTimedOut, "loads keep the segment");
  }
  full_.pop_front();
  const std::uint32_t number = segment.number;
  const bool goes =
      segment.length != options_.segment_bytes || total_bytes_ > options_.capacity_bytes;
  const Status status = goes ? drop_segment(lock, segment) : renew(lock, segment);
  if (!status.ok() && segments_.contains(number)) {
    full_.push_front(number);
    return status;
  }
  ++counts_.retired_segments;
  if (!goes) free_.push_back(number);
  return status;
}

// Writes again, at the log's end, what was loaded most recently, as far as there is room.
void DiskLog::reinsert(Lock& lock, Segment& segment) noexcept {
  struct Hot {
    Digest key;
    DiskPlace place;
  };
  std::vector<Hot> hot;
  for (std::size_t at = 0; at < segment.slots.size(); ++at) {
    const Slot& slot = segment.slots[at];
    const DiskIndex::Entry* const entry =
        index_.find_at(slot.hash_low, slot.hash_high, segment.number, slot.block);
    if (entry != nullptr && entry->place.loaded != 0) hot.push_back({entry->key, entry->place});
    if (at % kSlotsInOneGo == kSlotsInOneGo - 1) {
      lock.unlock();
      lock.lock();
    }
  }
  // The count of loads may have wrapped: distance from now tells the order.
  std::sort(hot.begin(), hot.end(), [now = loads_](const Hot& a, const Hot& b) {
    return now - a.place.loaded < now - b.place.loaded;
  });
  std::uint64_t left = segment.length / 100 * options_.reinsert_percent;
  std::vector<Placed> again;
  ++segment.pins;
  for (const Hot& record : hot) {
    FrameHeader header{
        .kind = FrameKind::kRecord, .record_bytes = record.place.record_bytes, .key = record.key};
    // One may always stay: in a small log a record may be larger than its share.
    if (header.frame_bytes() > left && !again.empty()) continue;
    const auto memory = record_memory(record.place.record_bytes);
    if (memory == nullptr) break;
    lock.unlock();
    Status status;
    const bool sound = read_frame(*segment.file, record.place, record.key, segment.generation,
                                  memory.get(), &status) &&
                       may_stay(memory.get(), record.place.record_bytes, record.key);
    lock.lock();
    if (!sound) {  // it leaves with the others
      if (status.ok() || status.code() == StatusCode::kOutOfRange) ++counts_.corrupt_records;
      continue;
    }
    const DiskPlace* const now = index_.find(record.key);
    if (now == nullptr || now->sequence != record.place.sequence) continue;
    if (!make_room(lock, header.frame_bytes(), 1, true).ok()) break;
    left -= std::min(left, header.frame_bytes());
    header.head_crc = head_crc_of(memory.get(), record.place.record_bytes);
    const Placed placed = place_frame(std::move(header));
    putting_.emplace(record.key, 0);
    lock.unlock();
    status = write_frame(placed, memory.get());
    lock.lock();
    written(lock, placed, status);
    if (!status.ok()) {
      putting_.erase(record.key);
      break;
    }
    again.push_back(placed);
  }
  const bool synced = again.empty() || commit(lock, again.back().header.name.sequence).ok();
  for (const Placed& placed : again) {
    // Whoever deleted it meanwhile left a tombstone that comes after.
    if (synced) {
      publish(placed);
      ++counts_.reinserted_records;
      counts_.reinserted_bytes += placed.header.frame_bytes();
    }
    putting_.erase(placed.header.key);
  }
  unpin(segment);
}

// What the segment still holds leaves the index and is reported.
void DiskLog::drop_records(Lock& lock, Segment& segment) noexcept {
  for (std::size_t at = 0; at < segment.slots.size(); ++at) {
    const Slot& slot = segment.slots[at];
    const DiskIndex::Entry* const entry =
        index_.find_at(slot.hash_low, slot.hash_high, segment.number, slot.block);
    if (entry != nullptr) {
      const Digest key = entry->key;
      live_bytes_ -= kFrameHeaderBytes + whole_blocks(entry->place.record_bytes);
      index_.erase(key);
      evicted_.push_back(key);
      ++counts_.evicted_records;
    }
    if (at % kSlotsInOneGo == kSlotsInOneGo - 1) {
      lock.unlock();
      lock.lock();
    }
  }
  segment.slots.clear();
  segment.slots.shrink_to_fit();
}

// The next generation, on the medium before anything of this one is overwritten.
Status DiskLog::renew(Lock& lock, Segment& segment) noexcept {
  const SegmentHeader header{.segment = segment.number,
                             .generation = segment.generation + 1,
                             .length = segment.length,
                             .synced = synced_};
  const std::shared_ptr<File> file = segment.file;
  lock.unlock();
  DiskBlock block;
  encode(header, &block);
  const WritePart parts[] = {{block.bytes.data(), kFileBlockBytes}};
  Status status = file->write(parts, 0);
  if (status.ok()) status = file->sync();
  lock.lock();
  if (!status.ok()) return status;
  counts_.written_bytes += kSegmentHeaderBytes;
  ++counts_.syncs;
  segment.generation = header.generation;
  segment.end = kSegmentHeaderBytes;
  segment.last = FrameName{};
  segment.table.clear();
  segment.tabled = segment.table_failed = false;
  segment.retiring = false;
  return Status();
}

// Its file is removed. REQUIRES: it is neither full nor free nor active, and nobody reads it.
Status DiskLog::drop_segment(Lock& lock, Segment& segment) noexcept {
  KVSTRATA_RETURN_IF_ERROR(say_synced(lock));
  total_bytes_ -= segment.length;
  leave_file(segment, segment.length);
  segments_.erase(segment.number);
  return remove_leftovers(lock);
}

// A file that is to go, and takes so many bytes of the capacity until then.
void DiskLog::leave_file(const Segment& segment, std::uint64_t length_bytes) noexcept {
  total_bytes_ += length_bytes;
  taken_numbers_.insert(segment.number);
  leftovers_.push_back({.path = segment.path,
                        .number = segment.number,
                        .length = length_bytes,
                        .has_frames = segment.last != FrameName{}});
}

// REQUIRES: this thread maintains, or opens.
Status DiskLog::remove_leftovers(Lock& lock) noexcept {
  while (!leftovers_.empty()) {
    Leftover& file = leftovers_.front();
    lock.unlock();
    Status status;
    if (!file.unlinked) status = files_.unlink(file.path);
    if (is_os_error(status, ENOENT)) status = Status();
    file.unlinked = status.ok();
    // Tombstones go after the records that they speak of. (An empty segment may come back.)
    if (status.ok() && file.has_frames) status = files_.sync_folder(options_.folder);
    lock.lock();
    if (!status.ok()) {
      if (!file.told)
        note(true, "cannot remove " + describe_file_error(file.path, status) +
                       "; its bytes count as used until it is gone");
      file.told = true;
      return status;
    }
    total_bytes_ -= file.length;
    taken_numbers_.erase(file.number);
    leftovers_.pop_front();
  }
  return Status();
}

// Makes it durable, in a segment that stays, that all frames are on the medium: without those of a
// segment that goes, the ones behind them would count no more. A mark says it, or, where none has
// room, the table of the newest full segment, for which there always is.
Status DiskLog::say_synced(Lock& lock) noexcept {
  KVSTRATA_RETURN_IF_ERROR(refused());
  if (mark(lock)) return commit(lock, sequence_);
  KVSTRATA_RETURN_IF_ERROR(refused());
  if (active_ != nullptr) {
    full_.push_back(active_->number);
    active_ = nullptr;
  }
  if (full_.empty()) return Status();  // no frame is left
  // Puts may fill more segments while the lock is let go of. This one stays the one that was
  // chosen, and no other thread retires it.
  Segment& newest = segment_at(full_.back());
  KVSTRATA_RETURN_IF_ERROR(commit(lock, newest.last.sequence));
  if (!newest.tabled) KVSTRATA_RETURN_IF_ERROR(write_table(lock, newest));
  lock.unlock();
  const Status status = newest.file->sync();
  lock.lock();
  // Whether the table is on the medium is not known now, and only a table written again can be.
  newest.tabled = status.ok();
  return status;
}

// -- the scrubber

std::uint64_t DiskLog::scrub(std::uint64_t bytes) noexcept {
  Lock lock(mutex_);
  std::uint64_t read = 0;
  // Each segment once, and the first one again up to where it began.
  for (std::size_t visited = 0; visited <= segments_.size() && read < bytes && !stopping_;) {
    const auto at = segments_.find(scrub_segment_);
    if (at == segments_.end() || scrub_slot_ >= at->second->slots.size()) {
      const auto next = segments_.upper_bound(scrub_segment_);
      scrub_segment_ = next == segments_.end() ? 0 : next->first;
      scrub_slot_ = 0;
      ++visited;
      continue;
    }
    Segment* const segment = at->second.get();
    const Slot slot = segment->slots[scrub_slot_++];
    const DiskIndex::Entry* const entry =
        index_.find_at(slot.hash_low, slot.hash_high, segment->number, slot.block);
    if (entry == nullptr) continue;
    const Digest key = entry->key;
    const DiskPlace place = entry->place;
    const auto memory = record_memory(place.record_bytes);
    if (memory == nullptr) break;
    ++segment->pins;
    const std::uint64_t generation = segment->generation;
    const std::shared_ptr<File> file = segment->file;
    const std::string path = segment->path;
    lock.unlock();
    Status status;
    const bool sound = read_frame(*file, place, key, generation, memory.get(), &status) &&
                       may_stay(memory.get(), place.record_bytes, key);
    lock.lock();
    unpin(*segment);
    read += kFrameHeaderBytes + place.record_bytes;
    if (sound || (!status.ok() && status.code() != StatusCode::kOutOfRange)) continue;
    Removal bad{.key = key, .copy = place.sequence};
    lock.unlock();
    remove_copies(std::span(&bad, 1));
    lock.lock();
    note(true, "the scrubber found a bad record in " + path);
    // Another copy may have been put meanwhile.
    if (index_.find(key) == nullptr) evicted_.push_back(key);
  }
  counts_.scrubbed_bytes += read;
  return read;
}

void DiskLog::scrub_always() {
  const std::uint64_t step = std::min(kScrubStepBytes, options_.scrub_bytes_per_s);
  Lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const std::uint64_t read = scrub(step);
    lock.lock();
    double seconds = static_cast<double>(read) / static_cast<double>(options_.scrub_bytes_per_s);
    if (read < step) seconds += kScrubPauseSeconds;  // all records were visited
    due_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopping_; });
  }
}

}  // namespace kvstrata
