// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/connector.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/clock.h"
#include "base/threads.h"
#include "record/record.h"

namespace kvstrata {

namespace {

// A load sets the file's access time when the time recorded there is older than this.
constexpr std::int64_t kRecencyNs = std::int64_t{3600} * 1'000'000'000;

// A record may need a directory for itself, and one for that.
constexpr std::size_t kNamesOfRecord = 2;

// When parts take more than 1/kPartsInCap of the cap, the written parts are published before their
// batch has ended. As records they can be evicted, so a batch larger than the cap evicts its own
// oldest records.
constexpr std::uint64_t kPartsInCap = 4;

// Puts or loads each item of a piece by `one`: sets the item's outcome and drops its hold, since
// the medium has finished with the item's bytes.
template <typename Item, typename One>
void each(std::span<Item> piece, One&& one) {
  for (Item& item : piece) {
    set_outcome(item, one(item));
    item.hold.reset();
  }
}

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
  each(piece, [this](PutItem& item) { return put_one(item); });
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
  if (join(item)) return {PutStatus::kExists, Reason::kNone};
  // What it continues must not leave for it.
  const Digest parent = parent_of_record(item.bytes, item.length);
  if (FsRecord* const record = index_.find(parent)) index_.used(*record);
  const std::uint64_t charge = fs_charge(item.length);
  if (!take_room(lock, charge)) return put_refusal(Reason::kCapacity);
  const std::uint64_t number = ++next_part_;
  item.copy = number;
  FsPart& part = parts_[number];
  part = {.key = item.key, .parent = parent, .length = item.length, .askers = 1};
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

// Publishes those parts of the batch that no thread has claimed, waits for the others, and gives
// each item its outcome. An item that joined a part gets kExists if the part was stored.
void FsConnector::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(mutex_);
  // This includes parts of other batches that items of this batch have joined: a thread that needs
  // a part publishes it.
  changed_.wait(lock, [&] {
    return std::ranges::none_of(batch, [&](const PutItem& item) {
      return item.copy != 0 && parts_.at(item.copy).state == FsPartState::kWriting;
    });
  });
  std::vector<std::uint64_t> mine;
  for (const PutItem& item : batch) {
    if (item.copy == 0 || parts_.at(item.copy).state != FsPartState::kWritten) continue;
    parts_.at(item.copy).state = FsPartState::kClaimed;
    mine.push_back(item.copy);
  }
  publish(lock, std::move(mine));
  for (PutItem& item : batch) {
    if (item.copy == 0) continue;
    const auto part = parts_.find(item.copy);
    changed_.wait(lock, [&] { return part->second.state == FsPartState::kSettled; });
    const bool made_it = item.status == PutStatus::kStored;
    if (made_it || part->second.outcome.first != PutStatus::kStored)
      set_outcome(item, part->second.outcome);
    if (--part->second.askers == 0) parts_.erase(part);
    item.copy = 0;
  }
}

// -- parts

bool FsConnector::join(PutItem& item) {
  const auto same = std::ranges::find_if(parts_, [&](const auto& numbered) {
    const FsPart& part = numbered.second;
    return part.key == item.key && part.length == item.length && !part.cancelled &&
           part.state != FsPartState::kSettled;
  });
  if (same == parts_.end()) return false;
  item.copy = same->first;
  same->second.askers += 1;
  return true;
}

// Cancels the parts of this key that are not settled. Returns whether there was one.
bool FsConnector::cancel_parts(const Digest& key) {
  bool any = false;
  for (auto& [number, part] : parts_) {
    if (part.key != key || part.state == FsPartState::kSettled || part.cancelled) continue;
    part.cancelled = true;
    any = true;
  }
  return any;
}

// Publishes the parts that are written. Returns whether there were any.
bool FsConnector::publish_written(Lock& lock) {
  std::vector<std::uint64_t> claimed;
  for (auto& [number, part] : parts_) {
    if (part.state != FsPartState::kWritten) continue;
    part.state = FsPartState::kClaimed;
    claimed.push_back(number);
  }
  const bool any = !claimed.empty();
  publish(lock, std::move(claimed));
  return any;
}

// Publishes and settles parts, those for which the medium had no name free once more. REQUIRES:
// this thread has claimed them, and has no mark.
void FsConnector::publish(Lock& lock, std::vector<std::uint64_t> claimed) {
  std::vector<std::uint64_t> unnamed;
  bool again = false;
  for (;;) {
    if (claimed.empty()) {
      if (unnamed.empty()) return;
      (void)evict(lock, 0, unnamed.size() * kNamesOfRecord);
      claimed = std::exchange(unnamed, {});
      again = true;
    }
    std::vector<std::uint64_t> marked;
    std::vector<std::uint64_t> later;  // another thread has marked their keys
    for (const std::uint64_t number : claimed) {
      const bool free = marks_.try_emplace(parts_.at(number).key, Mark::kPublishing).second;
      (free ? marked : later).push_back(number);
    }
    if (marked.empty())
      changed_.wait(lock);
    else
      publish_marked(lock, marked, again ? nullptr : &unnamed);
    claimed = std::move(later);
  }
}

// Publishes and settles parts, and unmarks their keys. Parts for which the medium had no name free
// stay claimed and get into `unnamed`, if that is not null. REQUIRES: this thread has marked the
// keys, which are all different.
void FsConnector::publish_marked(Lock& lock, std::span<const std::uint64_t> marked,
                                 std::vector<std::uint64_t>* unnamed) {
  std::vector<std::uint64_t> chosen;
  std::vector<std::uint64_t> not_needed;
  std::vector<FsFiles::Publication> items;
  std::vector<std::string> needless;
  for (const std::uint64_t number : marked) {
    const FsPart& part = parts_.at(number);
    const FsRecord* const there = index_.find(part.key);
    if (part.cancelled || (there != nullptr && there->length == part.length)) {
      not_needed.push_back(number);
      needless.push_back(paths_.part(part.key, number));
    } else {
      chosen.push_back(number);
      FsFiles::Publication& item = items.emplace_back();
      item.key = part.key;
      item.part = paths_.part(part.key, number);
      item.keeps_part = unnamed != nullptr;
    }
  }
  lock.unlock();
  for (const std::string& path : needless)
    files_.discard(path);
  files_.publish(items);
  lock.lock();
  const std::int64_t now_ns = now_unix_ns();
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    FsPart& part = parts_.at(chosen[i]);
    if (items[i].renamed && index_.find(part.key) != nullptr) index_.remove(part.key);
    if (items[i].status.ok()) {
      index_.add(part.key, part.length, now_ns).parent = part.parent;
      settle(part, {PutStatus::kStored, Reason::kNone});
    } else if (unnamed != nullptr && !items[i].renamed && is_no_space(items[i].status)) {
      unnamed->push_back(chosen[i]);
    } else {
      settle(part, put_refusal(file_reason(items[i].status)));
    }
  }
  // A record that continues another one uses it.
  for (const std::uint64_t number : chosen) {
    FsRecord* const record = index_.find(parts_.at(number).key);
    if (record != nullptr) index_.used(*record);
  }
  for (const std::uint64_t number :
       not_needed) {  // the record exists, or its key was deleted since
    FsPart& part = parts_.at(number);
    settle(part, {part.cancelled ? PutStatus::kStored : PutStatus::kExists, Reason::kNone});
  }
  for (const std::uint64_t number : marked)
    marks_.erase(parts_.at(number).key);
  changed_.notify_all();
}

void FsConnector::settle(FsPart& part, PutOutcome outcome) {
  assert(part.state == FsPartState::kWriting || part.state == FsPartState::kClaimed);
  part.state = FsPartState::kSettled;
  part.outcome = outcome;
  parts_charge_ -= fs_charge(part.length);
}

// -- room

// Charges a part against the cap, evicting records for it. False: there is no room, and the part is
// not charged.
bool FsConnector::take_room(Lock& lock, std::uint64_t charge) {
  const std::uint64_t cap = options_.capacity_bytes;
  if (cap != 0 && charge > cap) return false;
  while (cap != 0) {
    if (parts_charge_ + charge > cap / kPartsInCap && publish_written(lock)) continue;
    const std::uint64_t total = index_.charge() + leaving_charge_ + parts_charge_ + charge;
    if (total <= cap) break;
    if (evict(lock, total - cap) || publish_written(lock)) continue;
    if (marks_.empty() && parts_charge_ == 0) return false;
    changed_.wait(lock);  // until other threads have written, published or unlinked
  }
  parts_charge_ += charge;
  return true;
}

// Evicts the least recently used records, at least `need_bytes` in all, and at least `count`
// records if there are so many. False: too few bytes can be evicted now, or no record could be
// unlinked.
bool FsConnector::evict(Lock& lock, std::uint64_t need_bytes, std::size_t count) {
  std::vector<Digest> victims;
  std::uint64_t victims_bytes = 0;
  for (const Digest& key : index_.ages()) {
    if (victims_bytes >= need_bytes && victims.size() >= count) break;
    const FsRecord* const record = index_.find(key);
    if (record->loads > 0 || marks_.contains(key)) continue;
    victims.push_back(key);
    victims_bytes += fs_charge(record->length);
  }
  if (victims_bytes < need_bytes) return false;
  return std::ranges::any_of(
      remove_records(lock, victims, Leaving::kEvicted),
      [](const FsFiles::Removal& removal) { return removal.after == FsFiles::After::kGone; });
}

// Takes records out of the index and unlinks their files. Puts back the records whose files still
// exist, or may exist. Returns what happened to each file, in the order of `keys`. REQUIRES: this
// thread has no mark; the keys are in the index and not marked.
std::vector<FsFiles::Removal> FsConnector::remove_records(Lock& lock,
                                                          const std::vector<Digest>& keys,
                                                          Leaving how) {
  using After = FsFiles::After;
  std::vector<FsFiles::Removal> removals;
  if (keys.empty()) return removals;
  std::vector<FsRecord> records;
  for (const Digest& key : keys) {
    removals.push_back({.key = key});
    records.push_back(index_.remove(key));
    leaving_charge_ += fs_charge(records.back().length);
    marks_.emplace(key, Mark::kRemoving);
  }
  lock.unlock();
  files_.unlink(removals, how == Leaving::kDeleted);
  lock.lock();
  for (std::size_t i = keys.size(); i-- > 0;) {
    const After after = removals[i].after;
    marks_.erase(keys[i]);
    leaving_charge_ -= fs_charge(records[i].length);
    if (after == After::kThere || after == After::kPerhapsThere)
      index_.put_back(keys[i], records[i]);
  }
  if (how == Leaving::kEvicted) {
    for (const FsFiles::Removal& removal : removals) {
      if (removal.after != After::kThere) evicted_.push_back(removal.key);
    }
  }
  changed_.notify_all();
  return removals;
}

// -- loads and removals

void FsConnector::load(std::span<LoadItem> piece) noexcept {
  each(piece, [this](LoadItem& item) { return load_one(item); });
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
      if (cancel_parts(item->key)) item->removed = !publishing;
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
