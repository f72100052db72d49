// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Frames: how they get their place, are written, synced and published, and how records are read.
#include "kvstrata/disk_log.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <tuple>
#include <utility>

namespace kvstrata {

namespace {

// How long a put waits for a segment that is being made ready, or for another put of its key.
constexpr std::chrono::seconds kRoomWait{1};
// PutItem::copy of one whose key is being put already; no sequence comes so far.
constexpr std::uint64_t kFollows = ~std::uint64_t{0};

bool is_full(const Status& status) noexcept {
  return status.code() == StatusCode::kOsError &&
         (status.detail(0) == ENOSPC || status.detail(0) == EDQUOT);
}

// What a put is told that found no room or could not be written.
std::pair<PutStatus, const char*> failure(const Status& status) noexcept {
  if (status.code() == StatusCode::kRefused) return {PutStatus::kFailed, "read_only"};
  if (is_full(status)) return {PutStatus::kThrottled, "disk_full"};
  if (status.code() == StatusCode::kOsError) return {PutStatus::kFailed, "io"};
  return {PutStatus::kThrottled, "no_room"};
}

DiskPlace place_of(const FrameHeader& header, std::uint32_t segment, std::uint32_t block) {
  return DiskPlace{.sequence = header.name.sequence,
                   .segment = segment,
                   .block = block,
                   .record_bytes = static_cast<std::uint32_t>(header.record_bytes),
                   .loaded = 0};
}

std::uint64_t frame_bytes_of(const DiskPlace& place) noexcept {
  return kFrameHeaderBytes + whole_blocks(place.record_bytes);
}

}  // namespace

DiskLog::DiskLog(DiskOptions options, FileLayer& files)
    : options_(std::move(options)), files_(files), direct_(options_.direct) {
  if (options_.segment_bytes == 0)
    options_.segment_bytes = segment_bytes_for(options_.capacity_bytes);
}

DiskLog::~DiskLog() {
  close();
}

ConnectorCapabilities DiskLog::capabilities() const noexcept {
  ConnectorCapabilities can;
  can.persistent = true;
  can.can_clear = true;
  can.has_heads = true;
  can.lists = true;
  can.exists_is_quick = true;
  return can;
}

std::uint64_t DiskLog::max_record_bytes() const noexcept {
  const std::uint64_t taken = kSegmentHeaderBytes + kFrameHeaderBytes + table_bytes(1);
  return std::min<std::uint64_t>(options_.segment_bytes - taken, UINT32_MAX - kFileBlockBytes);
}

void DiskLog::exists(std::span<ExistsItem> items) noexcept {
  const Lock lock(mutex_);
  for (ExistsItem& item : items) {
    const DiskPlace* const place = index_.find(item.key);
    item.presence = place == nullptr ? Presence::kAbsent : Presence::kPresent;
    item.record_bytes = place == nullptr ? 0 : place->record_bytes;
  }
}

std::uint64_t DiskLog::list(std::uint64_t cursor, std::size_t most,
                            std::vector<Digest>* keys) noexcept {
  keys->reserve(keys->size() + most);
  const Lock lock(mutex_);
  return index_.list(cursor, most, keys);
}

// -- put

void DiskLog::put(std::span<PutItem> piece) noexcept {
  Lock lock(mutex_);
  for (PutItem& item : piece) {
    item.status = PutStatus::kFailed;
    if (item.length > max_record_bytes()) {
      item.reason = "too_large";
      continue;
    }
    if (index_.find(item.key) != nullptr) {
      item.status = PutStatus::kExists;
      item.reason = "";
      continue;
    }
    FrameHeader header{.kind = FrameKind::kRecord,
                       .record_bytes = item.length,
                       .key = item.key,
                       .head_crc = head_crc_of(item.bytes, item.length)};
    Status status = make_room(lock, header.frame_bytes(), 1);
    // (make_room() may have let go of the lock.)
    if (index_.find(item.key) != nullptr || putting_.contains(item.key)) {
      item.copy = kFollows;
      continue;
    }
    if (!status.ok()) {
      std::tie(item.status, item.reason) = failure(status);
      continue;
    }
    const Placed placed = place_frame(std::move(header));
    putting_.emplace(item.key, 0);
    lock.unlock();
    status = write_frame(placed, item.bytes);
    lock.lock();
    written(lock, placed, status);
    if (!status.ok()) {
      putting_.erase(item.key);
      std::tie(item.status, item.reason) = failure(status);
      continue;
    }
    item.copy = placed.header.name.sequence;
    puts_.emplace(item.copy, placed);
  }
}

void DiskLog::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(mutex_);
  std::uint64_t last = 0;
  for (const PutItem& item : batch) {
    if (item.copy != kFollows) last = std::max(last, item.copy);
  }
  const Status status = commit(lock, last);
  for (PutItem& item : batch) {
    if (item.copy == 0 || item.copy == kFollows) continue;
    const auto found = puts_.find(item.copy);
    if (status.ok()) {
      publish(found->second);
      counts_.put_bytes += item.length;
      item.status = PutStatus::kStored;
      item.reason = "";
    } else {
      std::tie(item.status, item.reason) = failure(status);
    }
    puts_.erase(found);
    putting_.erase(item.key);
  }
  changed_.notify_all();
  // Own keys are published by now, so two batches that follow each other both come to an end.
  const auto until = std::chrono::steady_clock::now() + kRoomWait;
  for (PutItem& item : batch) {
    if (item.copy != kFollows) continue;
    changed_.wait_until(lock, until, [&] { return !putting_.contains(item.key); });
    const bool there = index_.find(item.key) != nullptr ||
                       std::any_of(batch.begin(), batch.end(), [&](const PutItem& other) {
                         return other.key == item.key && other.status == PutStatus::kStored;
                       });  // and evicted since, in a small log
    item.status = there ? PutStatus::kExists : PutStatus::kThrottled;
    item.reason = there ? "" : "in_flight";
  }
  // Nobody asked for room here: what cannot be made ready now is tried again by the next put.
  if (!options_.own_threads && !maintaining_) (void)maintain(lock);
}

// A synced record becomes visible, unless something later has overtaken it.
void DiskLog::publish(const Placed& placed) {
  const FrameHeader& header = placed.header;
  const auto found = segments_.find(placed.segment);
  Segment* const segment = found == segments_.end() ? nullptr : found->second.get();
  // (Another file may have the number and the generation of one that was dropped.)
  if (segment == nullptr || segment->file != placed.file ||
      segment->generation != header.generation || segment->retiring) {
    evicted_.push_back(header.key);
    ++counts_.evicted_records;
    return;
  }
  if (putting_[header.key] > header.name.sequence) return;
  const DiskPlace place = place_of(header, placed.segment, placed.block);
  if (const DiskPlace* const other = index_.find(header.key)) {
    live_bytes_ -= frame_bytes_of(*other);
  }
  index_.set(header.key, place);
  live_bytes_ += header.frame_bytes();
  Slot slot{.hash_low = 0, .hash_high = 0, .block = placed.block};
  std::memcpy(&slot.hash_low, header.key.data(), 4);
  std::memcpy(&slot.hash_high, header.key.data() + 4, 4);
  segment->slots.push_back(slot);
}

// -- frames

Status DiskLog::refused() const noexcept {
  if (stopping_) return Status(StatusCode::kRefused, "closed");
  if (read_only_) return Status(StatusCode::kRefused, "a sync failed");
  return Status();
}

bool DiskLog::fits(const Segment& segment, std::uint64_t frame_bytes,
                   std::size_t entries) const noexcept {
  return segment.end + frame_bytes + table_bytes(segment.table.size() + entries) <= segment.length;
}

// Sees to it that the active segment has room for a frame of so many entries in the table. A
// retiring segment's records may take the last free segment, and nothing is waited for; what is new
// leaves it to them. The lock is let go of meanwhile, but not after.
Status DiskLog::make_room(Lock& lock, std::uint64_t frame_bytes, std::size_t entries,
                          bool retiring) {
  const auto until = std::chrono::steady_clock::now() + kRoomWait;
  maintenance_failed_ = false;
  for (;;) {
    KVSTRATA_RETURN_IF_ERROR(refused());
    if (!holes_.empty()) KVSTRATA_RETURN_IF_ERROR(fill_holes(lock));
    if (active_ != nullptr && fits(*active_, frame_bytes, entries)) return Status();
    if (active_ != nullptr) {
      full_.push_back(active_->number);
      active_ = nullptr;
    } else if (free_.size() > (retiring ? 0 : reserved_segments())) {
      active_ = &segment_at(free_.front());
      free_.pop_front();
      due_.notify_all();
    } else if (retiring) {
      return Status(StatusCode::kNoSpace, "no segment is ready");
    } else if (!maintaining_) {
      KVSTRATA_RETURN_IF_ERROR(maintain(lock));
    } else if (changed_.wait_until(lock, until) == std::cv_status::timeout) {
      return Status(StatusCode::kTimedOut, "no segment became ready");
    }
  }
}

// REQUIRES: make_room() said so, under the same lock.
DiskLog::Placed DiskLog::place_frame(FrameHeader header) {
  Segment& segment = *active_;
  header.segment = segment.number;
  header.generation = segment.generation;
  header.name = FrameName{.run = run_, .sequence = ++sequence_};
  header.previous = segment.last;
  header.synced = synced_;
  Placed placed{.file = segment.file,
                .header = std::move(header),
                .segment = segment.number,
                .block = static_cast<std::uint32_t>(segment.end / kFileBlockBytes),
                .table_at = segment.table.size()};
  const FrameHeader& made = placed.header;
  TableEntry entry{.key = made.key,
                   .sequence = made.name.sequence,
                   .block = placed.block,
                   .record_bytes = static_cast<std::uint32_t>(made.record_bytes),
                   .kind = made.kind};
  if (made.kind == FrameKind::kTombstones) {
    for (const Digest& key : made.tombstones) {
      entry.key = key;
      segment.table.push_back(entry);
    }
  } else {
    segment.table.push_back(entry);
  }
  unmarked_ = made.kind != FrameKind::kSkip || made.synced + 1 < made.name.sequence;
  segment.last = made.name;
  segment.end += made.frame_bytes();
  writing_.insert(made.name.sequence);
  return placed;
}

// `record` has header.record_bytes; nullptr: only the frame's header.
Status DiskLog::write_frame(const Placed& placed, const std::uint8_t* record) noexcept {
  DiskBlock header;
  encode(placed.header, &header);
  const std::uint64_t offset = std::uint64_t{placed.block} * kFileBlockBytes;
  if (record == nullptr) {
    const WritePart parts[] = {{header.bytes.data(), kFileBlockBytes}};
    return placed.file->write(parts, offset);
  }
  const std::uint64_t length = placed.header.record_bytes;
  const std::uint64_t whole = length / kFileBlockBytes * kFileBlockBytes;
  DiskBlock tail;
  std::memcpy(tail.bytes.data(), record + whole, length - whole);
  const WritePart parts[] = {{header.bytes.data(), kFileBlockBytes},
                             {record, whole},
                             {tail.bytes.data(), length > whole ? kFileBlockBytes : 0}};
  return placed.file->write(parts, offset);
}

// A frame that could not be written becomes one that is skipped: those behind it need the way.
void DiskLog::written(Lock& lock, const Placed& placed, Status status) noexcept {
  if (!status.ok()) {
    note(true, "cannot write " + describe_file_error(segment_at(placed.segment).path, status));
    Placed skip = placed;
    skip.header.kind = FrameKind::kSkip;
    skip.header.tombstones.clear();
    lock.unlock();
    status = write_frame(skip, nullptr);
    lock.lock();
    std::vector<TableEntry>& table = segment_at(placed.segment).table;
    for (std::size_t at = placed.table_at;
         at < table.size() && table[at].sequence == placed.header.name.sequence; ++at)
      table[at].kind = FrameKind::kSkip;
    if (!status.ok()) {
      holes_.push_back(std::move(skip));
      hole_error_ = status;
      changed_.notify_all();  // who waits to have later frames synced
      return;
    }
  }
  counts_.written_bytes += placed.header.frame_bytes();
  segment_at(placed.segment).dirty = true;
  writing_.erase(placed.header.name.sequence);
  changed_.notify_all();
}

// Writes the frames to skip that could not be written before.
Status DiskLog::fill_holes(Lock& lock) noexcept {
  std::vector<Placed> holes = std::exchange(holes_, {});
  Status failed;
  for (Placed& hole : holes) {
    lock.unlock();
    const Status status = write_frame(hole, nullptr);
    lock.lock();
    if (!status.ok()) {
      failed = hole_error_ = status;
      holes_.push_back(std::move(hole));
      continue;
    }
    segment_at(hole.segment).dirty = true;
    writing_.erase(hole.header.name.sequence);
  }
  changed_.notify_all();
  return failed;
}

// Writes a frame without a record into the room that make_room() found.
Status DiskLog::append(Lock& lock, FrameHeader header) {
  const Placed placed = place_frame(std::move(header));
  lock.unlock();
  const Status status = write_frame(placed, nullptr);
  lock.lock();
  written(lock, placed, status);
  return status;
}

// Writes a frame that says that all frames placed before this call are synced, so that the next
// open has nothing to doubt. False: there is no room for it, or it cannot be written.
bool DiskLog::mark(Lock& lock) noexcept {
  if (!unmarked_) return true;
  if (!commit(lock, sequence_).ok()) return false;
  // Looked at only now: while commit() had let go of the lock, a put may have filled the active
  // segment.
  if (active_ == nullptr || !fits(*active_, kFrameHeaderBytes, 1)) return false;
  // Without a sync of its own: as long as it is not on the medium, the frames before it are read.
  return append(lock, FrameHeader{.kind = FrameKind::kSkip}).ok();
}

std::uint64_t DiskLog::written_up_to() const noexcept {
  return writing_.empty() ? sequence_ : *writing_.begin() - 1;
}

// Returns when all frames up to this one are on the medium. Whoever comes first syncs for all.
Status DiskLog::commit(Lock& lock, std::uint64_t sequence) noexcept {
  while (synced_ < sequence) {
    if (read_only_) return Status(StatusCode::kOsError, "fdatasync", EIO);
    if (std::any_of(holes_.begin(), holes_.end(),
                    [&](const Placed& hole) { return hole.header.name.sequence <= sequence; }))
      return hole_error_;
    if (syncing_ || written_up_to() < sequence) {
      changed_.wait(lock);
      continue;
    }
    syncing_ = true;
    const std::uint64_t up_to = written_up_to();
    std::vector<std::shared_ptr<File>> dirty;
    for (const auto& [number, segment] : segments_) {
      if (!segment->dirty) continue;
      segment->dirty = false;
      dirty.push_back(segment->file);
    }
    lock.unlock();
    Status status;
    for (const std::shared_ptr<File>& file : dirty) {
      if (status.ok()) status = file->sync();
    }
    lock.lock();
    counts_.syncs += dirty.size();
    syncing_ = false;
    if (status.ok()) {
      synced_ = up_to;
    } else {
      read_only_ = true;
      note(true, "a sync failed: " + describe_file_error(options_.folder, status) +
                     "; nothing more is put until the server is started again");
    }
    changed_.notify_all();
    if (!full_.empty() && !segment_at(full_.back()).tabled) due_.notify_all();
  }
  return Status();
}

// -- load

void DiskLog::load(std::span<LoadItem> piece) noexcept {
  Lock lock(mutex_);
  for (LoadItem& item : piece) {
    DiskPlace* const found = index_.find(item.key);
    if (found == nullptr) {
      item.status = LoadStatus::kAbsent;
      item.reason = "";
      continue;
    }
    if (item.length != found->record_bytes) {
      item.status = LoadStatus::kFailed;
      item.reason = "length";
      continue;
    }
    if (++loads_ == 0) loads_ = 1;
    found->loaded = loads_;
    const DiskPlace place = *found;
    Segment& segment = segment_at(place.segment);
    const std::shared_ptr<File> file = segment.file;
    const std::uint64_t generation = segment.generation;
    ++segment.pins;
    ++counts_.loaded_records;
    const std::string segment_path = segment.path;
    lock.unlock();
    Status status;
    const bool sound = read_frame(*file, place, item.key, generation, item.bytes, &status);
    lock.lock();
    unpin(segment);
    item.copy = place.sequence;
    item.status = LoadStatus::kLoaded;
    item.reason = "";
    if (sound) continue;
    note(true, "a record in " + segment_path +
                   (status.ok() ? " is not what was written there, and is removed"
                                : " cannot be read: " + describe_file_error(segment_path, status)));
    if (!status.ok() && status.code() != StatusCode::kOutOfRange) {
      item.status = LoadStatus::kFailed;
      item.reason = "io";
      continue;
    }
    // Something else lies where the frame was.
    Removal gone{.key = item.key, .copy = item.copy};
    lock.unlock();
    remove_copies(std::span(&gone, 1));
    lock.lock();
    item.status = LoadStatus::kAbsent;
  }
}

void DiskLog::heads(std::span<HeadItem> items) noexcept {
  Lock lock(mutex_);
  for (HeadItem& item : items) {
    const DiskPlace* const found = index_.find(item.key);
    if (found == nullptr) continue;
    const DiskPlace place = *found;
    Segment& segment = segment_at(place.segment);
    const std::shared_ptr<File> file = segment.file;
    const std::uint64_t generation = segment.generation;
    ++segment.pins;
    lock.unlock();
    DiskBlock header;
    DiskBlock head;
    const ReadPart parts[] = {{header.bytes.data(), kFileBlockBytes},
                              {head.bytes.data(), kFileBlockBytes}};
    const bool sound = file->read(parts, std::uint64_t{place.block} * kFileBlockBytes).ok() &&
                       frame_of(header, place, item.key, generation).has_value();
    if (sound) {
      item.length = std::min(place.record_bytes, kHeadBytes);
      std::memcpy(item.bytes, head.bytes.data(), item.length);
    }
    lock.lock();
    unpin(segment);
  }
}

void DiskLog::unpin(Segment& segment) noexcept {
  if (--segment.pins == 0) changed_.notify_all();
}

// The record of a frame into `out`, which has the place's record_bytes. False: what lies there is
// not that frame (or could not be read, see `status`).
bool DiskLog::read_frame(File& file, const DiskPlace& place, const Digest& key,
                         std::uint64_t generation, std::uint8_t* out, Status* status) noexcept {
  DiskBlock header;
  DiskBlock tail;
  const std::uint64_t whole = place.record_bytes / kFileBlockBytes * kFileBlockBytes;
  const std::uint64_t rest = place.record_bytes - whole;
  const ReadPart parts[] = {{header.bytes.data(), kFileBlockBytes},
                            {out, whole},
                            {tail.bytes.data(), rest > 0 ? kFileBlockBytes : 0}};
  *status = file.read(parts, std::uint64_t{place.block} * kFileBlockBytes);
  if (!status->ok()) return false;
  std::memcpy(out + whole, tail.bytes.data(), rest);
  return frame_of(header, place, key, generation).has_value();
}

// The frame's header, if it is the one of this record.
std::optional<FrameHeader> DiskLog::frame_of(const DiskBlock& block, const DiskPlace& place,
                                             const Digest& key, std::uint64_t generation) {
  std::optional<FrameHeader> found = decode_frame(block);
  if (found.has_value() && found->kind == FrameKind::kRecord && found->key == key &&
      found->segment == place.segment && found->generation == generation &&
      found->name.sequence == place.sequence && found->record_bytes == place.record_bytes)
    return found;
  return std::nullopt;
}

// -- remove

void DiskLog::remove(std::span<DeleteItem> items) noexcept {
  std::vector<Removal> removals;
  for (const DeleteItem& item : items)
    removals.push_back({.key = item.key});
  remove_copies(removals);
  for (std::size_t i = 0; i < items.size(); ++i)
    items[i].removed = removals[i].removed;
}

void DiskLog::remove_corrupt(const LoadItem& item) noexcept {
  {
    const Lock lock(mutex_);
    note(true, "a record in " + options_.folder + " has a wrong checksum and is removed");
  }
  Removal bad{.key = item.key, .copy = item.copy};
  remove_copies(std::span(&bad, 1));
}

bool DiskLog::is_there(const Removal& removal) noexcept {
  const DiskPlace* const place = index_.find(removal.key);
  if (removal.copy != 0) return place != nullptr && place->sequence == removal.copy;
  return place != nullptr || putting_.contains(removal.key);
}

void DiskLog::remove_copies(std::span<Removal> removals) noexcept {
  Lock lock(mutex_);
  std::uint64_t last = 0;
  std::vector<Removal*> named;
  for (std::size_t begin = 0; begin < removals.size(); begin += kTombstonesOfFrame) {
    const auto group =
        removals.subspan(begin, std::min(kTombstonesOfFrame, removals.size() - begin));
    if (std::none_of(group.begin(), group.end(),
                     [&](const Removal& each) { return is_there(each); }))
      continue;
    const Status room = make_room(lock, kFrameHeaderBytes, group.size());
    // From here to place_frame() the lock is not let go of: what is put after it comes later in
    // the log as well.
    const std::uint64_t sequence = sequence_ + 1;
    FrameHeader header{.kind = FrameKind::kTombstones};
    std::vector<Removal*> members;
    for (Removal& removal : group) {
      if (!is_there(removal)) continue;
      if (const DiskPlace* const place = index_.find(removal.key)) {
        live_bytes_ -= frame_bytes_of(*place);
        index_.erase(removal.key);
      } else if (putting_[removal.key] == sequence) {
        continue;  // twice in this batch
      }
      const auto putting = putting_.find(removal.key);
      if (putting != putting_.end()) putting->second = sequence;
      (removal.copy == 0 ? counts_.deleted_records : counts_.corrupt_records) += 1;
      header.tombstones.push_back(removal.key);
      members.push_back(&removal);
    }
    // What has no tombstone may come back at the next open, and is said to be there still.
    if (members.empty() || !room.ok() || !append(lock, std::move(header)).ok()) continue;
    named.insert(named.end(), members.begin(), members.end());
    last = sequence;
  }
  if (named.empty() || !commit(lock, last).ok()) return;
  for (Removal* const removal : named)
    removal->removed = true;
}

std::uint64_t DiskLog::clear() noexcept {
  DiskIndex gone;
  Lock lock(mutex_);
  if (!make_room(lock, kFrameHeaderBytes, 1).ok()) return 0;
  const std::uint64_t sequence = sequence_ + 1;
  gone.swap(index_);
  live_bytes_ = 0;
  for (auto& [key, tombstone] : putting_)
    tombstone = sequence;
  for (const auto& [number, segment] : segments_)
    segment->slots.clear();
  const std::uint64_t count = gone.size();
  counts_.deleted_records += count;
  if (!append(lock, FrameHeader{.kind = FrameKind::kClear}).ok()) return 0;
  if (!commit(lock, sequence).ok()) return 0;
  lock.unlock();  // freeing a large index takes its time
  return count;
}

// -- numbers

ConnectorUsage DiskLog::usage() noexcept {
  const Lock lock(mutex_);
  return ConnectorUsage{.used_bytes = live_bytes_,
                        .capacity_bytes = options_.capacity_bytes,
                        .records = index_.size()};
}

void DiskLog::counts(std::vector<ConnectorCount>* out) noexcept {
  const Lock lock(mutex_);
  out->push_back({"segments_bytes", total_bytes_});
  out->push_back({"put_bytes", counts_.put_bytes});
  out->push_back({"written_bytes", counts_.written_bytes});
  out->push_back({"reinserted_records", counts_.reinserted_records});
  out->push_back({"reinserted_bytes", counts_.reinserted_bytes});
  out->push_back({"evicted_records", counts_.evicted_records});
  out->push_back({"deleted_records", counts_.deleted_records});
  out->push_back({"corrupt_records", counts_.corrupt_records});
  out->push_back({"loaded_records", counts_.loaded_records});
  out->push_back({"retired_segments", counts_.retired_segments});
  out->push_back({"unreadable_segments", counts_.unreadable_segments});
  out->push_back({"scrubbed_bytes", counts_.scrubbed_bytes});
  out->push_back({"syncs", counts_.syncs});
  out->push_back({"read_only", read_only_ ? 1u : 0u});
}

void DiskLog::take_evicted(std::vector<Digest>* keys) noexcept {
  const Lock lock(mutex_);
  keys->insert(keys->end(), evicted_.begin(), evicted_.end());
  evicted_.clear();
}

void DiskLog::note(bool warning, std::string text) {
  constexpr std::size_t kMaxNotes = 16;
  if (notes_.size() < kMaxNotes) notes_.push_back({warning, std::move(text)});
}

void DiskLog::take_notes(std::vector<ConnectorNote>* notes) noexcept {
  const Lock lock(mutex_);
  notes->insert(notes->end(), notes_.begin(), notes_.end());
  notes_.clear();
}

void DiskLog::close() noexcept {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    due_.notify_all();
  }
  for (std::thread& thread : threads_)
    thread.join();
  threads_.clear();
  {
    Lock lock(mutex_);
    (void)mark(lock);
  }
  segments_.clear();
  active_ = nullptr;
  folder_lock_.reset();
}

}  // namespace kvstrata
