// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/log.h"

#include <unistd.h>

#include <utility>

#include "base/threads.h"
#include "disk/recover.h"

namespace kvstrata {

using disk::Lock;
using disk::Removal;
using disk::SegmentState;

namespace {

constexpr char kLockName[] = "/.kvstrata.lock";

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
  return putter_.max_record_bytes();
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
  putter_.put(lock, piece);
}

void DiskLog::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(shared_.mutex);
  putter_.end(lock, batch);
}

void DiskLog::load(std::span<LoadItem> piece) noexcept {
  Lock lock(shared_.mutex);
  for (LoadItem& item : piece) {
    if (!finder_.load(lock, item)) continue;
    Removal gone{.key = item.key, .copy = item.copy};
    remover_.remove(lock, std::span(&gone, 1));
  }
}

void DiskLog::remove(std::span<DeleteItem> items) noexcept {
  std::vector<Removal> removals;
  for (const DeleteItem& item : items)
    removals.push_back({.key = item.key});
  {
    Lock lock(shared_.mutex);
    remover_.remove(lock, removals);
  }
  for (std::size_t i = 0; i < items.size(); ++i)
    items[i].removed = removals[i].removed;
}

void DiskLog::remove_corrupt(const LoadItem& item) noexcept {
  shared_.notes.add(
      true, "a record in " + shared_.options.folder + " has a wrong checksum and is removed");
  Removal bad{.key = item.key, .copy = item.copy};
  Lock lock(shared_.mutex);
  remover_.remove(lock, std::span(&bad, 1));
}

std::uint64_t DiskLog::clear() noexcept {
  return remover_.clear();
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
