// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/connector.h"

#include <algorithm>

#include "base/clock.h"
#include "base/threads.h"
#include "record/record.h"

namespace kvstrata {

namespace {

// A load sets the file's access time when the time recorded there is older than this.
constexpr std::int64_t kRecencyNs = std::int64_t{3600} * 1'000'000'000;

}  // namespace

FsConnector::FsConnector(FsOptions options, FileLayer& layer)
    : options_(std::move(options)),
      paths_(options_.base_path, options_.relative_tmp_dir),
      layer_(layer),
      files_(layer, paths_, options_.use_odirect, notes_, options_.own_threads),
      others_(layer, options_, paths_, notes_) {}

FsConnector::~FsConnector() {
  close();
}

ConnectorCapabilities FsConnector::capabilities() const noexcept {
  return {.persistent = true,
          .shared = options_.shared,
          .can_clear = true,
          .lists = true,
          .exists_is_quick = !options_.shared};
}

std::string FsConnector::open(const ConnectorContext& context) {
  const std::string wrong =
      claim_fs_directory(layer_, options_, context.instance_id, &paths_, &min_free_bytes_, &lock_);
  if (!wrong.empty()) return wrong;
  if (options_.own_threads)
    scanner_ = start_thread([this] { scan(); });
  else
    scan();
  return "";
}

// Runs in a thread of its own, or in open() if options_.own_threads is false: fills the index, then
// evicts until the records fit the cap.
void FsConnector::scan() {
  FsScan found;
  const Status status = scan_fs_directory(
      layer_, paths_,
      [this] {
        const Lock lock(mutex_);
        return !closing_;
      },
      &found);
  if (status.ok()) files_.sync_folders(found.folders);
  Lock lock(mutex_);
  if (status.ok()) {
    index_.reserve(found.records.size());
    for (const FsScan::Record& record : found.records)
      index_.add(record.key, record.length, record.recency_unix_ns);
    notes_.add(false, paths_.base() + " holds " + std::to_string(found.records.size()) +
                          " records, " + std::to_string(found.charge) + " bytes; removed " +
                          std::to_string(found.removed) + " unfinished files, ignored " +
                          std::to_string(found.foreign) + " foreign ones");
    const std::uint64_t cap = options_.capacity_bytes;
    if (cap != 0 && index_.charge() > cap) {
      evict(lock, index_.charge() - cap);
      if (index_.charge() > cap)
        notes_.add(true, "cannot get below the cap of " + std::to_string(cap) + " bytes");
    }
  } else {
    scan_failed_ = Reason::kIo;
    if (status.code() != StatusCode::kCancelled)
      notes_.add(true, "the names in " + paths_.base() + " could not be read: " + found.failed);
  }
  scanned_ = true;
  changed_.notify_all();
}

bool FsConnector::ready() noexcept {
  const Lock lock(mutex_);
  return scanned_;
}

// Waits for the end of the scan. Returns why the scan failed, or kNone.
Reason FsConnector::wait_until_scanned(Lock& lock) {
  changed_.wait(lock, [this] { return scanned_; });
  return scan_failed_;
}

void FsConnector::exists(std::span<ExistsItem> items) noexcept {
  find(items);
  if (options_.shared) others_.find(items);
}

void FsConnector::find(std::span<ExistsItem> items) {
  Lock lock(mutex_);
  const Reason failed = wait_until_scanned(lock);
  for (ExistsItem& item : items) {
    if (failed != Reason::kNone) {
      item.presence = Presence::kUnknown;
      item.reason = word_of(failed);
    } else {
      item.presence = index_.find(item.key) != nullptr ? Presence::kPresent : Presence::kAbsent;
    }
  }
}

std::uint64_t FsConnector::list(std::uint64_t cursor, std::size_t most,
                                std::vector<Digest>* keys) noexcept {
  keys->reserve(keys->size() + most);
  const Lock lock(mutex_);
  return index_.list(cursor, most, keys);
}

void FsConnector::put(std::span<PutItem> piece) noexcept {
  fs_each(piece, [this](PutItem& item) { return put_one(item); });
}

// Puts one item. If this sets item.copy, put_end() decides the outcome; until then kStored means
// that this call made the part, and kExists that another item made it.
PutOutcome FsConnector::put_one(PutItem& item) {
  Lock lock(mutex_);
  if (const Reason failed = wait_until_scanned(lock); failed != Reason::kNone)
    return put_refusal(failed);
  if (item.length < kMinRecordBytes) return put_refusal(Reason::kBadItem);
  changed_.wait(lock, [&] {
    const auto mark = marks_.find(item.key);
    return mark == marks_.end() || mark->second != Mark::kPublishing;
  });
  // A record of another length cannot be whole; this put replaces it.
  if (const FsRecord* const record = index_.find(item.key);
      record != nullptr && record->length == item.length)
    return {PutStatus::kExists, Reason::kNone};
  if (parts_.join(item)) return {PutStatus::kExists, Reason::kNone};
  // What it continues must not leave for it.
  const Digest parent = parent_of_record(item.bytes, item.length);
  if (FsRecord* const record = index_.find(parent)) index_.used(*record);
  const std::uint64_t charge = fs_charge(item.length);
  if (!take_room(lock, charge)) return put_refusal(Reason::kCapacity);
  const std::uint64_t number = ++next_part_;
  FsPart& part = parts_.make(number, item);
  part.parent = parent;
  const FsFiles::NewPart file{
      .path = paths_.part(item.key, number), .bytes = item.bytes, .length = item.length};
  const Status status = write_part(lock, file, charge);
  if (status.ok())
    part.state = FsPartState::kWritten;
  else
    settle(part, put_refusal(file_reason(status)));
  changed_.notify_all();
  return {PutStatus::kStored, Reason::kNone};
}

// Writes a part; the lock is dropped meanwhile. If the file system is full, frees space and tries
// once more.
Status FsConnector::write_part(Lock& lock, const FsFiles::NewPart& file, std::uint64_t charge) {
  for (bool again = false;; again = true) {
    std::uint64_t missing_bytes = 0;
    lock.unlock();
    const Status status = files_.write_part(file, file.length, min_free_bytes_, &missing_bytes);
    lock.lock();
    if (is_no_space(status) && !again && evict(lock, std::max(missing_bytes, charge))) continue;
    return status;
  }
}

void FsConnector::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(mutex_);
  parts_.end(lock, batch, [this](Lock& held, std::vector<std::uint64_t> claimed) {
    publish(held, std::move(claimed));
  });
}

void FsConnector::load(std::span<LoadItem> piece) noexcept {
  fs_each(piece, [this](LoadItem& item) { return load_one(item); });
}

LoadOutcome FsConnector::load_one(LoadItem& item) {
  Lock lock(mutex_);
  if (const Reason failed = wait_until_scanned(lock); failed != Reason::kNone)
    return {LoadStatus::kFailed, failed};
  FsRecord* record = index_.find(item.key);
  if (record == nullptr) {
    lock.unlock();
    if (options_.shared) return others_.load(item);
    return {LoadStatus::kAbsent, Reason::kNone};
  }
  const std::int64_t now_ns = now_unix_ns();
  const bool refresh = now_ns - record->recency_unix_ns > kRecencyNs;
  item.copy = record->copy;
  record->loads += 1;
  lock.unlock();
  const FsFiles::Read read =
      files_.read(item, [&](const FileStat&) { return refresh ? now_ns : 0; });
  lock.lock();
  record = index_.find(item.key);
  if (record != nullptr && record->copy == item.copy) {
    record->loads -= 1;
    if (read == FsFiles::Read::kWhole) {
      record->parent = parent_of_record(item.bytes, item.length);
      index_.used(*record);
      if (refresh) record->recency_unix_ns = now_ns;
    } else if (read == FsFiles::Read::kAbsent && !marks_.contains(item.key)) {
      index_.remove(item.key);  // another process removed the file
    }
  }  // otherwise the record was deleted or replaced meanwhile
  return FsFiles::outcome_of(read);
}

void FsConnector::remove(std::span<DeleteItem> items) noexcept {
  Lock lock(mutex_);
  if (wait_until_scanned(lock) != Reason::kNone) return;
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
  if (FsOthers::loaded(item)) return others_.remove_corrupt(item);
  Lock lock(mutex_);
  const FsRecord* const record = index_.find(item.key);
  if (record == nullptr || record->copy != item.copy || marks_.contains(item.key)) return;
  if (reason_of(item.reason) == Reason::kChecksum)
    notes_.add(true, paths_.record(item.key) + " is corrupt and is removed");
  remove_records(lock, {item.key}, Leaving::kCorrupt);
}

std::uint64_t FsConnector::clear() noexcept {
  Lock lock(mutex_);
  if (wait_until_scanned(lock) != Reason::kNone) return 0;
  std::vector<Digest> keys;
  for (const Digest& key : index_.ages()) {
    if (!marks_.contains(key)) keys.push_back(key);
  }
  const std::vector<FsFiles::Removal> removals = remove_records(lock, keys, Leaving::kDeleted);
  lock.unlock();
  files_.sync_unlinked();  // so that no record that was evicted before comes back either
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
