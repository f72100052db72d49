// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/log.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/patience.h"
#include "base/threads.h"
#include "disk/recover.h"
#include "files/outcome.h"
#include "record/record.h"

namespace kvstrata {

using disk::Lock;
using disk::PlacedFrame;
using disk::SegmentState;

namespace {

constexpr char kLockName[] = "/.kvstrata.lock";
// How long the end of a batch waits for other puts of its keys.
constexpr std::chrono::seconds kFollowWait{1};
// PutItem::copy of an item whose key another put is storing; no sequence is that high.
constexpr std::uint64_t kFollows = ~std::uint64_t{0};

// The outcome of a put that found no room or whose frame could not be written.
PutOutcome failure(const Status& status) noexcept {
  if (status.reason() != Reason::kNone) return put_refusal(status.reason());
  if (status.code() == StatusCode::kOsError) return put_refusal(file_reason(status));
  return put_refusal(Reason::kNoRoom);
}

DiskOptions with_segment_bytes(DiskOptions options) {
  if (options.segment_bytes == 0) options.segment_bytes = segment_bytes_for(options.capacity_bytes);
  return options;
}

}  // namespace

DiskLog::DiskLog(DiskOptions options, FileLayer& files)
    : shared_{.options = with_segment_bytes(std::move(options)), .files = files} {}

DiskLog::~DiskLog() {
  close();
}

ConnectorCapabilities DiskLog::capabilities() const noexcept {
  ConnectorCapabilities can;
  can.persistent = true;
  can.can_clear = true;
  can.lists = true;
  can.exists_is_quick = true;
  return can;
}

std::uint64_t DiskLog::max_record_bytes() const noexcept {
  const std::uint64_t taken = kSegmentHeaderBytes + kFrameHeaderBytes + table_bytes(1);
  return std::min<std::uint64_t>(shared_.options.segment_bytes - taken,
                                 UINT32_MAX - kFileBlockBytes);
}

// -- open and close

std::string DiskLog::open(const ConnectorContext& context) {
  std::string failed = lock_folder(context);
  if (!failed.empty()) return failed;
  failed = recover();
  if (!failed.empty()) {
    segments_.clear();
    folder_lock_.reset();
    return failed;
  }
  if (shared_.options.own_threads) maintainer_ = start_thread([this] { keep_maintaining(); });
  return "";
}

std::string DiskLog::lock_folder(const ConnectorContext& context) {
  const std::string& folder = shared_.options.folder;
  const std::string wrong = "base_path: '" + folder + "' cannot be used: ";
  Status status = make_folders(shared_.files, folder);
  if (!status.ok())
    return stops_start(status) + wrong + describe_file_error(folder, status) +
           "; give a directory that this user may write";
  std::string holder;
  status = shared_.files.lock(folder + kLockName, &folder_lock_, &holder);
  if (status.code() == StatusCode::kBusy)
    return "base_path: '" + folder + "' belongs to another running server (" +
           (holder.empty() ? "unknown" : holder) + "); give each server a directory of its own";
  if (!status.ok())
    return wrong + describe_file_error(folder + kLockName, status) +
           "; give a directory that this user may write and lock";
  folder_lock_->note("pid " + std::to_string(::getpid()) + ", instance " + context.instance_id);
  return "";
}

std::string DiskLog::recover() {
  disk::Recovered recovered;
  std::string failed = disk::recover(shared_, &recovered);
  Lock lock(shared_.mutex);
  shared_.counts.unreadable_segments += recovered.unreadable_segments;
  shared_.counts.corrupt_records += recovered.lost_frames;
  if (!failed.empty()) return failed;
  appender_.adopt(recovered.sequence);
  for (const auto& [number, length_bytes] : recovered.foreign)
    segments_.adopt_foreign(number, length_bytes);
  disk::for_each_record(recovered, [this](disk::Segment& segment, const TableEntry& entry) {
    finder_.adopt(segment, entry);
  });
  for (disk::Recovered::FoundSegment& found : recovered.segments) {
    const bool newest = &found == &recovered.segments.back();
    disk::Segment& segment = segments_.adopt(std::move(found.segment));
    segments_.move(segment, SegmentState::kFree);
    if (!segment.has_frames()) continue;
    segments_.move(segment, SegmentState::kActive);
    if (newest && !found.listed) continue;
    segments_.move(segment, SegmentState::kFull);
    if (found.listed) segments_.move(segment, SegmentState::kListed);
  }
  shared_.notes.add(false, shared_.options.folder + " holds " + std::to_string(finder_.size()) +
                               " records, " + std::to_string(finder_.live_bytes()) + " bytes");
  const Status status = retirer_.shrink(lock);
  if (!status.ok())
    return "base_path: '" + shared_.options.folder +
           "' cannot be read: " + describe_file_error(shared_.options.folder, status);
  return "";
}

void DiskLog::close() noexcept {
  {
    const Lock lock(shared_.mutex);
    appender_.close();
    shared_.changed.notify_all();
    shared_.due.notify_all();
  }
  if (maintainer_.joinable()) maintainer_.join();
  {
    Lock lock(shared_.mutex);
    retirer_.write_last_tables(lock);
    segments_.clear();
  }
  folder_lock_.reset();
}

// Runs in the log's own thread: writes tables and makes segments free.
void DiskLog::keep_maintaining() {
  Lock lock(shared_.mutex);
  for (;;) {
    shared_.due.wait(lock, [this] { return appender_.stopping() || retirer_.is_due(); });
    if (appender_.stopping()) return;
    const Status status = retirer_.maintain(lock);
    appender_.set_starved(!status.ok());
  }
}

// -- records

void DiskLog::exists(std::span<ExistsItem> items) noexcept {
  const Lock lock(shared_.mutex);
  finder_.exists(items);
}

std::uint64_t DiskLog::list(std::uint64_t cursor, std::size_t most,
                            std::vector<Digest>* keys) noexcept {
  keys->reserve(keys->size() + most);
  const Lock lock(shared_.mutex);
  return finder_.list(cursor, most, keys);
}

void DiskLog::put(std::span<PutItem> piece) noexcept {
  Lock lock(shared_.mutex);
  for (PutItem& item : piece)
    put_one(lock, item);
}

void DiskLog::put_one(Lock& lock, PutItem& item) noexcept {
  item.status = PutStatus::kFailed;
  if (item.length > max_record_bytes()) {
    set_outcome(item, put_refusal(Reason::kTooLarge));
    return;
  }
  if (finder_.find(item.key) != nullptr) {
    set_outcome(item, PutOutcome{PutStatus::kExists, Reason::kNone});
    return;
  }
  FrameHeader header{.kind = FrameKind::kRecord,
                     .record_bytes = item.length,
                     .key = item.key,
                     .head_crc = head_crc_of(item.bytes, item.length)};
  const std::uint64_t parent = DiskIndex::hash(parent_of_record(item.bytes, item.length));
  finder_.used(parent);
  Status status = retirer_.make_room(lock, header.frame_bytes(), 1);
  // (make_room() may have unlocked the mutex.)
  if (finder_.find(item.key) != nullptr || finder_.is_being_put(item.key)) {
    item.copy = kFollows;
    return;
  }
  if (!status.ok()) {
    set_outcome(item, failure(status));
    return;
  }
  PlacedFrame placed = appender_.place(std::move(header));
  placed.parent = parent;
  finder_.begin_put(item.key);
  lock.unlock();
  status = write_frame(placed, item.bytes);
  lock.lock();
  appender_.written(placed, status);
  if (!status.ok()) {
    finder_.end_put(item.key);
    set_outcome(item, failure(status));
    return;
  }
  item.copy = placed.header.name.sequence;
  puts_.emplace(item.copy, placed);
}

void DiskLog::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(shared_.mutex);
  std::uint64_t last = 0;
  for (const PutItem& item : batch) {
    if (item.copy != kFollows) last = std::max(last, item.copy);
  }
  const Status status = appender_.commit(lock, last);
  for (PutItem& item : batch) {
    if (item.copy == 0 || item.copy == kFollows) continue;
    const auto found = puts_.find(item.copy);
    if (status.ok()) {
      finder_.publish(found->second);
      shared_.counts.put_bytes += item.length;
      set_outcome(item, PutOutcome{PutStatus::kStored, Reason::kNone});
    } else {
      set_outcome(item, failure(status));
    }
    puts_.erase(found);
    finder_.end_put(item.key);
  }
  shared_.changed.notify_all();
  // This batch's own keys are published by now, so two batches that wait for each other's keys both
  // end.
  const auto until = std::chrono::steady_clock::now() + patience(kFollowWait);
  for (PutItem& item : batch) {
    if (item.copy != kFollows) continue;
    shared_.changed.wait_until(lock, until, [&] { return !finder_.is_being_put(item.key); });
    // A small log may have evicted a record of this batch already; it counts as stored.
    const bool there = finder_.find(item.key) != nullptr ||
                       std::any_of(batch.begin(), batch.end(), [&](const PutItem& other) {
                         return other.key == item.key && other.status == PutStatus::kStored;
                       });
    set_outcome(item, there ? PutOutcome{PutStatus::kExists, Reason::kNone}
                            : put_refusal(Reason::kInFlight));
  }
  // An error is ignored, because no put waits for this segment: the next put that needs room tries
  // again.
  if (!shared_.options.own_threads && !retirer_.maintaining()) (void)retirer_.maintain(lock);
}

void DiskLog::load(std::span<LoadItem> piece) noexcept {
  Lock lock(shared_.mutex);
  for (LoadItem& item : piece) {
    if (finder_.load(lock, item)) remove_copy(lock, item);
  }
}

void DiskLog::remove(std::span<DeleteItem> items) noexcept {
  Lock lock(shared_.mutex);
  remove(lock, items, 0);
}

bool DiskLog::is_there(const Digest& key, std::uint64_t copy) noexcept {
  const DiskPlace* const place = finder_.find(key);
  if (copy != 0) return place != nullptr && place->sequence == copy;
  return place != nullptr || finder_.is_being_put(key);
}

void DiskLog::remove(Lock& lock, std::span<DeleteItem> items, std::uint64_t copy) noexcept {
  std::uint64_t last = 0;
  std::vector<DeleteItem*> named;
  for (std::size_t begin = 0; begin < items.size(); begin += kTombstonesOfFrame) {
    const auto group = items.subspan(begin, std::min(kTombstonesOfFrame, items.size() - begin));
    if (std::none_of(group.begin(), group.end(),
                     [&](const DeleteItem& each) { return is_there(each.key, copy); }))
      continue;
    const Status room = retirer_.make_room(lock, kFrameHeaderBytes, group.size());
    // The mutex is held from here until the frame has its place, so a record that is put after the
    // removal also comes after the tombstone in the log.
    const std::uint64_t sequence = appender_.sequence() + 1;
    FrameHeader header{.kind = FrameKind::kTombstones};
    std::vector<DeleteItem*> members;
    for (DeleteItem& item : group) {
      if (!is_there(item.key, copy) || !finder_.remove(item.key, sequence)) continue;
      (copy == 0 ? shared_.counts.deleted_records : shared_.counts.corrupt_records) += 1;
      header.tombstones.push_back(item.key);
      members.push_back(&item);
    }
    if (members.empty() || !room.ok() || !appender_.append(lock, std::move(header)).ok()) continue;
    named.insert(named.end(), members.begin(), members.end());
    last = sequence;
  }
  if (named.empty() || !appender_.commit(lock, last).ok()) return;
  for (DeleteItem* const item : named)
    item->removed = true;
}

void DiskLog::remove_copy(Lock& lock, const LoadItem& item) noexcept {
  DeleteItem gone{.key = item.key};
  remove(lock, std::span(&gone, 1), item.copy);
}

void DiskLog::remove_corrupt(const LoadItem& item) noexcept {
  shared_.notes.add(
      true, "a record in " + shared_.options.folder + " has a wrong checksum and is removed");
  Lock lock(shared_.mutex);
  remove_copy(lock, item);
}

std::uint64_t DiskLog::clear() noexcept {
  DiskIndex gone;  // freed without the mutex, because freeing a large index takes time
  Lock lock(shared_.mutex);
  if (!retirer_.make_room(lock, kFrameHeaderBytes, 1).ok()) return 0;
  const std::uint64_t sequence = appender_.sequence() + 1;
  gone = finder_.remove_all(sequence);
  const std::uint64_t count = gone.size();
  shared_.counts.deleted_records += count;
  if (!appender_.append(lock, FrameHeader{.kind = FrameKind::kClear}).ok()) return 0;
  return appender_.commit(lock, sequence).ok() ? count : 0;
}

// -- numbers

ConnectorUsage DiskLog::usage() noexcept {
  const Lock lock(shared_.mutex);
  return ConnectorUsage{.used_bytes = finder_.live_bytes(),
                        .capacity_bytes = shared_.options.capacity_bytes,
                        .records = finder_.size()};
}

void DiskLog::counts(std::vector<ConnectorCount>* out) noexcept {
  const Lock lock(shared_.mutex);
  const disk::Counts& counts = shared_.counts;
  out->push_back({"segments_bytes", segments_.total_bytes()});
  out->push_back({"put_bytes", counts.put_bytes});
  out->push_back({"written_bytes", counts.written_bytes});
  out->push_back({"reinserted_records", counts.reinserted_records});
  out->push_back({"reinserted_bytes", counts.reinserted_bytes});
  out->push_back({"evicted_records", counts.evicted_records});
  out->push_back({"deleted_records", counts.deleted_records});
  out->push_back({"corrupt_records", counts.corrupt_records});
  out->push_back({"loaded_records", counts.loaded_records});
  out->push_back({"retired_segments", counts.retired_segments});
  out->push_back({"unreadable_segments", counts.unreadable_segments});
  out->push_back({"syncs", counts.syncs});
  out->push_back({"read_only", appender_.read_only() ? 1u : 0u});
}

void DiskLog::take_evicted(std::vector<Digest>* keys) noexcept {
  const Lock lock(shared_.mutex);
  finder_.take_evicted(keys);
}

void DiskLog::take_notes(std::vector<ConnectorNote>* notes) noexcept {
  shared_.notes.take(notes);
}

}  // namespace kvstrata
