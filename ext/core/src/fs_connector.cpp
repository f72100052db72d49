// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/fs_connector.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <tuple>

namespace kvstrata {

namespace {

// A load is written to the file's access time when the last one written is older than this.
constexpr std::int64_t kRecencyNs = std::int64_t{3600} * 1'000'000'000;

// That help to sync the directories of a batch.
constexpr std::size_t kSyncThreads = 3;

}  // namespace

std::string prepare_fs_directory(FileLayer& layer, const FsPaths& paths, const FsOptions& options,
                                 std::uint64_t* min_free_bytes) {
  const auto unusable = [&](const std::string& path, const Status& status) {
    return "base_path: '" + paths.base() +
           "' cannot be used: " + describe_file_error(path, status) +
           "; give a directory that this user may write and lock";
  };
  Status status = make_folders(layer, paths.tmp());
  if (!status.ok()) return unusable(paths.tmp(), status);
  FileStat tmp;
  FileStat base;
  status = folder_stat(layer, paths.tmp(), &tmp);
  if (!status.ok()) return unusable(paths.tmp(), status);
  status = folder_stat(layer, paths.base(), &base);
  if (!status.ok()) return unusable(paths.base(), status);
  if (tmp.device != base.device)
    return "relative_tmp_dir: '" + options.relative_tmp_dir +
           "' is on another file system than base_path, so files cannot be published by a rename;"
           " choose one on the same";
  FileSpace space;
  status = layer.space(paths.base(), &space);
  if (!status.ok()) return unusable(paths.base(), status);
  *min_free_bytes = options.min_free_bytes.value_or(std::max(
      space.total_bytes / 100, std::min<std::uint64_t>(256 << 20, space.total_bytes / 10)));
  return "";
}

std::string fs_holder_note(const std::string& instance_id) {
  return "pid " + std::to_string(::getpid()) + ", instance " + instance_id + "\n";
}

std::string lock_fs_directory(FileLayer& layer, const FsPaths& paths, bool shared,
                              const std::string& instance_id, std::unique_ptr<FileLock>* out) {
  std::string holder;
  const Status status = shared ? layer.lock_shared(paths.lock(), out, &holder)
                               : layer.lock(paths.lock(), out, &holder);
  if (status.code() == StatusCode::kBusy) {
    while (!holder.empty() && std::isspace(static_cast<unsigned char>(holder.back())))
      holder.pop_back();
    return "base_path: '" + paths.base() + "' belongs to another running server (" +
           (holder.empty() ? "unknown" : holder) + (shared ? ") that does not share it" : ")") +
           "; give each server a directory of its own, or all of them \"shared\": true";
  }
  if (!status.ok())
    return "base_path: '" + paths.base() +
           "' cannot be locked: " + describe_file_error(paths.lock(), status) +
           "; give a directory that this user may write and lock";
  (*out)->note(fs_holder_note(instance_id));
  return "";
}

FsConnector::FsConnector(FsOptions options, FileLayer& layer)
    : options_(std::move(options)),
      paths_(options_.base_path, options_.relative_tmp_dir),
      layer_(layer),
      files_(layer, paths_, options_.use_odirect, notes_, options_.own_threads ? kSyncThreads : 0) {
}

FsConnector::~FsConnector() {
  close();
}

ConnectorCapabilities FsConnector::capabilities() const noexcept {
  return {.persistent = true,
          .can_clear = true,
          .has_heads = true,
          .lists = true,
          .exists_is_quick = true};
}

std::string FsConnector::open(const ConnectorContext& context) {
  std::string wrong = prepare_fs_directory(layer_, paths_, options_, &min_free_bytes_);
  if (!wrong.empty()) return wrong;
  wrong = lock_fs_directory(layer_, paths_, false, context.instance_id, &lock_);
  if (!wrong.empty()) return wrong;
  if (options_.own_threads)
    scanner_ = std::thread([this] { scan(); });
  else
    scan();
  return "";
}

bool FsConnector::ready() noexcept {
  const Lock lock(mutex_);
  return scanned_;
}

// Why nothing can be done, or an empty string.
const char* FsConnector::wait_until_scanned(Lock& lock) {
  changed_.wait(lock, [this] { return scanned_; });
  return scan_failed_;
}

void FsConnector::exists(std::span<ExistsItem> items) noexcept {
  Lock lock(mutex_);
  const char* const failed = wait_until_scanned(lock);
  for (ExistsItem& item : items) {
    if (*failed != '\0') {
      item.presence = Presence::kUnknown;
      item.reason = failed;
    } else if (const FsRecord* const record = index_.find(item.key); record != nullptr) {
      item.presence = Presence::kPresent;
      item.record_bytes = record->length;
    } else {
      item.presence = Presence::kAbsent;
    }
  }
}

void FsConnector::heads(std::span<HeadItem> items) noexcept {
  for (HeadItem& item : items)
    files_.read_head(item);
}

std::uint64_t FsConnector::list(std::uint64_t cursor, std::size_t most,
                                std::vector<Digest>* keys) noexcept {
  keys->reserve(keys->size() + most);
  const Lock lock(mutex_);
  return index_.list(cursor, most, keys);
}

void FsConnector::put(std::span<PutItem> piece) noexcept {
  for (PutItem& item : piece) {
    std::tie(item.status, item.reason) = put_one(item);
    item.hold.reset();  // the medium has the bytes, or never will
  }
}

// With item.copy set, put_end() has the outcome: that of the part which this call wrote
// (kStored), or of the same one that another item writes (kExists).
FsPutOutcome FsConnector::put_one(PutItem& item) {
  Lock lock(mutex_);
  if (const char* const failed = wait_until_scanned(lock); *failed != '\0')
    return {PutStatus::kFailed, failed};
  if (item.length < kMinRecordBytes) return {PutStatus::kFailed, "bad_item"};
  changed_.wait(lock, [&] {
    const auto mark = marks_.find(item.key);
    return mark == marks_.end() || mark->second != Mark::kPublishing;
  });
  // One of another length cannot be whole: what is put now heals it.
  if (const FsRecord* const record = index_.find(item.key);
      record != nullptr && record->length == item.length)
    return {PutStatus::kExists, ""};
  if (parts_.join(item)) return {PutStatus::kExists, ""};
  const std::uint64_t charge = fs_charge(item.length);
  if (!take_room(lock, charge)) return {PutStatus::kThrottled, "capacity"};
  const std::uint64_t number = ++next_part_;
  FsPart& part = parts_.make(number, item);
  for (bool again = false;; again = true) {
    lock.unlock();
    FileSpace space;
    Status status = layer_.space(paths_.base(), &space);
    if (status.ok() && space.free_bytes < item.length + min_free_bytes_)
      status = Status(StatusCode::kOsError, "min_free_gb", ENOSPC);
    if (status.ok())
      status = files_.write_part(paths_.part(item.key, number), item.bytes, item.length);
    lock.lock();
    if (is_no_space(status) && !again && evict(lock, charge)) continue;
    if (status.ok())
      part.state = FsPart::State::kWritten;
    else
      settle(part, fs_put_failure(status));
    changed_.notify_all();
    return {PutStatus::kStored, ""};
  }
}

void FsConnector::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(mutex_);
  parts_.end(lock, batch, [this](Lock& held, std::vector<std::uint64_t> claimed) {
    publish(held, std::move(claimed));
  });
}

void FsConnector::load(std::span<LoadItem> piece) noexcept {
  for (LoadItem& item : piece) {
    std::tie(item.status, item.reason) = load_one(item);
    item.hold.reset();
  }
}

FsLoadOutcome FsConnector::load_one(LoadItem& item) {
  Lock lock(mutex_);
  if (const char* const failed = wait_until_scanned(lock); *failed != '\0')
    return {LoadStatus::kFailed, failed};
  FsRecord* record = index_.find(item.key);
  if (record == nullptr) return {LoadStatus::kAbsent, ""};
  const std::int64_t now_ns = now_unix_ns();
  const bool refresh = now_ns - record->recency_unix_ns > kRecencyNs;
  item.copy = record->copy;
  record->loads += 1;
  lock.unlock();
  const FsFiles::Read read = files_.read(item.key, item.bytes, item.length,
                                         [&](const FileStat&) { return refresh ? now_ns : 0; });
  lock.lock();
  record = index_.find(item.key);
  if (record != nullptr && record->copy == item.copy) {
    record->loads -= 1;
    if (read == FsFiles::Read::kWhole) {
      index_.used(*record);
      if (refresh) record->recency_unix_ns = now_ns;
    } else if (read == FsFiles::Read::kAbsent && !marks_.contains(item.key)) {
      index_.remove(item.key);  // somebody removed the file behind our back
    }
  }  // else it was deleted or replaced meanwhile
  return FsFiles::outcome_of(read);
}

void FsConnector::remove(std::span<DeleteItem> items) noexcept {
  Lock lock(mutex_);
  if (*wait_until_scanned(lock) != '\0') return;
  std::vector<DeleteItem*> left;
  for (DeleteItem& item : items)
    left.push_back(&item);
  while (!left.empty()) {
    std::vector<Digest> keys;
    std::vector<DeleteItem*> published;
    for (DeleteItem* const item : left) {
      const auto mark = marks_.find(item->key);
      const bool publishing = mark != marks_.end() && mark->second == Mark::kPublishing;
      if (parts_.cancel(item->key)) item->removed = !publishing;
      if (publishing) {
        published.push_back(item);
      } else if (index_.find(item->key) != nullptr && !std::ranges::count(keys, item->key)) {
        keys.push_back(item->key);
        item->removed = true;
      }
    }
    for (const FsFiles::Removal& removal : remove_records(lock, keys, Leaving::kDeleted)) {
      if (removal.after == FsFiles::After::kGoneForGood) continue;
      for (DeleteItem* const item : left) {
        if (item->key == removal.key) item->removed = false;
      }
    }
    left = std::move(published);
    if (left.empty()) break;
    changed_.wait(lock, [&] {
      return std::ranges::none_of(left,
                                  [&](DeleteItem* item) { return marks_.contains(item->key); });
    });
  }
}

void FsConnector::remove_corrupt(const LoadItem& item) noexcept {
  Lock lock(mutex_);
  const FsRecord* const record = index_.find(item.key);
  if (record == nullptr || record->copy != item.copy || marks_.contains(item.key)) return;
  if (std::strcmp(item.reason, "checksum") == 0)
    notes_.add(true, paths_.record(item.key) + " is corrupt and is removed");
  remove_records(lock, {item.key}, Leaving::kCorrupt);
}

std::uint64_t FsConnector::clear() noexcept {
  Lock lock(mutex_);
  if (*wait_until_scanned(lock) != '\0') return 0;
  std::vector<Digest> keys;
  for (const Digest& key : index_.ages()) {
    if (!marks_.contains(key)) keys.push_back(key);
  }
  const std::vector<FsFiles::Removal> removals = remove_records(lock, keys, Leaving::kDeleted);
  lock.unlock();
  files_.sync_unlinked();  // so that none of those that left before comes back either
  return static_cast<std::uint64_t>(
      std::ranges::count(removals, FsFiles::After::kGoneForGood, &FsFiles::Removal::after));
}

ConnectorUsage FsConnector::usage() noexcept {
  Lock lock(mutex_);
  (void)wait_until_scanned(lock);
  return {.used_bytes = index_.charge() + leaving_charge_ + parts_charge_,
          .capacity_bytes = options_.capacity_bytes,
          .records = index_.size()};
}

void FsConnector::take_evicted(std::vector<Digest>* keys) noexcept {
  const Lock lock(mutex_);
  keys->insert(keys->end(), evicted_.begin(), evicted_.end());
  evicted_.clear();
}

void FsConnector::take_notes(std::vector<ConnectorNote>* notes) noexcept {
  notes_.take(notes);
}

void FsConnector::close() noexcept {
  {
    const Lock lock(mutex_);
    closing_ = true;
  }
  if (scanner_.joinable()) scanner_.join();
  lock_.reset();
}

}  // namespace kvstrata
