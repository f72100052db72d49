// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/fs_shared.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <tuple>

namespace kvstrata {

namespace {

using namespace std::chrono_literals;

// That help to sync the directories of a batch.
constexpr std::size_t kSyncThreads = 3;
constexpr auto kTickEvery = 100ms;
constexpr auto kTickEveryWaiting = 20ms;
// How long usage() waits for a janitor to say it: a lease, and time to read a directory.
constexpr auto kUsageWait = 10s;
// Without threads, turns that are taken before something counts as not there.
constexpr int kTurns = 4;
// Deletes of this part of the cap ask for a scan that sees them.
constexpr std::uint64_t kRemovedWorth = 16;

// Which copy of a record a file is.
std::uint64_t copy_of(const FileStat& found) noexcept {
  return found.inode * 0x9E3779B97F4A7C15ULL ^ static_cast<std::uint64_t>(found.modified_unix_ns);
}

bool is_record(const FileStat& found) noexcept {
  return found.is_file && found.length >= kMinRecordBytes && found.length <= UINT32_MAX;
}

}  // namespace

FsSharedConnector::FsSharedConnector(FsOptions options, FileLayer& layer, FsSharedTimes times)
    : options_(std::move(options)),
      paths_(options_.base_path, options_.relative_tmp_dir),
      layer_(layer),
      times_(std::move(times)),
      files_(layer, paths_, options_.use_odirect, notes_, options_.own_threads ? kSyncThreads : 0),
      member_(layer, paths_, files_, notes_, options_.capacity_bytes, options_.relative_tmp_dir,
              times_) {}

FsSharedConnector::~FsSharedConnector() {
  close();
}

ConnectorCapabilities FsSharedConnector::capabilities() const noexcept {
  return {.persistent = true, .shared = true, .can_clear = true, .has_heads = true};
}

std::string FsSharedConnector::open(const ConnectorContext& context) {
  std::string wrong = prepare_fs_directory(layer_, paths_, options_, &min_free_bytes_);
  if (!wrong.empty()) return wrong;
  wrong = lock_fs_directory(layer_, paths_, true, context.instance_id, &lock_);
  if (!wrong.empty()) return wrong;
  wrong = member_.join(fs_holder_note(context.instance_id));
  if (!wrong.empty()) {
    lock_.reset();
    return wrong;
  }
  if (options_.own_threads)
    ticker_ = std::thread([this] { keep_ticking(); });
  else
    tick();
  return "";
}

void FsSharedConnector::tick() {
  member_.tick([this] {
    const Lock lock(mutex_);
    return !closing_;
  });
}

void FsSharedConnector::keep_ticking() {
  Lock lock(mutex_);
  while (!closing_) {
    lock.unlock();
    tick();
    const bool soon = member_.is_waiting();
    lock.lock();
    changed_.notify_all();
    poked_.wait_for(lock, soon ? kTickEveryWaiting : kTickEvery,
                    [this] { return poke_ || closing_; });
    poke_ = false;
  }
}

// Whether it is there in time. `there` is asked with the mutex held.
bool FsSharedConnector::wait_until(Lock& lock, std::chrono::nanoseconds at_most,
                                   const std::function<bool()>& there) {
  if (!options_.own_threads) {
    for (int turn = 0; turn < kTurns && !there(); ++turn) {
      lock.unlock();
      tick();
      lock.lock();
    }
    return there();
  }
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  poke_ = true;
  poked_.notify_one();
  while (!there()) {
    if (closing_ || changed_.wait_until(lock, deadline) == std::cv_status::timeout) return there();
  }
  return true;
}

void FsSharedConnector::exists(std::span<ExistsItem> items) noexcept {
  for (ExistsItem& item : items) {
    FileStat found;
    const Status status = layer_.stat(paths_.record(item.key), &found);
    if (status.ok() && is_record(found)) {
      item.presence = Presence::kPresent;
      item.record_bytes = static_cast<std::uint32_t>(found.length);
    } else if (status.ok() || is_not_there(status)) {
      item.presence = Presence::kAbsent;
    } else {
      item.presence = Presence::kUnknown;
      item.reason = "io";
      notes_.add(true, "cannot look for " + describe_file_error(paths_.record(item.key), status));
    }
  }
}

void FsSharedConnector::heads(std::span<HeadItem> items) noexcept {
  for (HeadItem& item : items)
    files_.read_head(item);
}

void FsSharedConnector::put(std::span<PutItem> piece) noexcept {
  for (PutItem& item : piece) {
    std::tie(item.status, item.reason) = put_one(item);
    item.hold.reset();  // the medium has the bytes, or never will
  }
}

// With item.copy set, put_end() has the outcome: that of the part which this call made (kStored),
// or of the same one that another item makes (kExists).
FsPutOutcome FsSharedConnector::put_one(PutItem& item) {
  if (item.length < kMinRecordBytes) return {PutStatus::kFailed, "bad_item"};
  Lock lock(mutex_);
  if (parts_.join(item)) return {PutStatus::kExists, ""};
  constexpr std::uint64_t kNumbers = std::uint64_t{1} << kFsPartBits;
  const std::uint64_t number = member_.id() << kFsPartBits | next_part_++ % kNumbers;
  FsPart& part = parts_.make(number, item);
  lock.unlock();
  FileStat found;
  const bool is_there = layer_.stat(paths_.record(item.key), &found).ok() && is_record(found) &&
                        found.length == item.length;
  lock.lock();
  part.found = is_there;
  part.outcome = is_there ? FsPutOutcome{PutStatus::kStored, ""} : write(lock, number, item);
  part.state =
      part.outcome.first == PutStatus::kStored ? FsPart::State::kWritten : FsPart::State::kSettled;
  changed_.notify_all();
  return {PutStatus::kStored, ""};
}

// kStored: the part is written.
FsPutOutcome FsSharedConnector::write(Lock& lock, std::uint64_t number, const PutItem& item) {
  const std::uint64_t charge = fs_charge(item.length);
  const std::uint64_t cap = options_.capacity_bytes;
  if (cap != 0 && charge > cap) return {PutStatus::kThrottled, "capacity"};
  const auto throttled = [&](const char* reason) {
    const bool alone = !member_.has_janitor();
    (alone ? throttled_no_janitor_ : throttled_) += 1;
    return FsPutOutcome{PutStatus::kThrottled, alone ? "no_janitor" : reason};
  };
  if (!take(lock, charge)) return throttled("capacity");
  const std::string path = paths_.part(item.key, number);
  for (bool again = false;; again = true) {
    lock.unlock();
    FileSpace space;
    std::uint64_t missing = charge;
    Status status = layer_.space(paths_.base(), &space);
    if (status.ok() && space.free_bytes < charge + min_free_bytes_) {
      missing = charge + min_free_bytes_ - space.free_bytes;
      status = Status(StatusCode::kOsError, "min_free_gb", ENOSPC);
    }
    if (status.ok()) status = files_.write_part(path, item.bytes, item.length, now_unix_ns());
    lock.lock();
    if (status.ok()) return {PutStatus::kStored, ""};
    if (is_no_space(status) && !again && make_space(lock, missing)) continue;
    lock.unlock();
    give_up_part(path, charge);
    lock.lock();
    return is_no_space(status) ? throttled("disk_full") : fs_put_failure(status);
  }
}

// What was taken for a part that is not there may be taken again; one that could not be removed
// keeps it until a scan after this server's end.
void FsSharedConnector::give_up_part(const std::string& path, std::uint64_t charge) {
  FileStat found;
  if (is_not_there(layer_.stat(path, &found))) member_.give_back(charge);
}

bool FsSharedConnector::take(Lock& lock, std::uint64_t charge) {
  if (member_.take(charge)) return true;
  if (options_.own_threads && times_.clock() < refused_until_ns_) return false;
  member_.want(static_cast<std::int64_t>(charge));
  bool taken = false;
  const auto taken_or_to_publish = [&] {
    taken = taken || member_.take(charge);
    return taken || parts_.any_written();
  };
  // The time of a publication is not that of the janitor.
  while (!taken && wait_until(lock, times_.put_wait, taken_or_to_publish))
    publish(lock, parts_.claim_written());
  member_.want(-static_cast<std::int64_t>(charge));
  refused_until_ns_ = taken ? INT64_MIN : times_.clock() + times_.put_wait.count();
  return taken;
}

// Whether the janitor has done for it what he can.
bool FsSharedConnector::make_space(Lock& lock, std::uint64_t bytes) {
  if (options_.own_threads && times_.clock() < refused_until_ns_) return false;
  const std::uint64_t ask = member_.ask_for_space(bytes);
  const bool done = wait_until(lock, times_.put_wait, [&] { return member_.space_done() >= ask; });
  refused_until_ns_ = done ? INT64_MIN : times_.clock() + times_.put_wait.count();
  return done;
}

// REQUIRES: the parts are claimed by this thread.
void FsSharedConnector::publish(Lock& lock, const std::vector<std::uint64_t>& claimed) {
  if (claimed.empty()) return;
  std::vector<FsFiles::Publication> items(claimed.size());
  for (std::size_t i = 0; i < claimed.size(); ++i) {
    const FsPart& part = parts_.at(claimed[i]);
    items[i].key = part.key;
    if (!part.found) items[i].part = paths_.part(part.key, claimed[i]);
  }
  lock.unlock();
  files_.publish(items);
  lock.lock();
  for (std::size_t i = 0; i < claimed.size(); ++i) {
    FsPart& part = parts_.at(claimed[i]);
    lock.unlock();
    const FsPutOutcome outcome = outcome_of(part, items[i]);
    lock.lock();
    part.outcome = outcome;
    part.state = FsPart::State::kSettled;
  }
  changed_.notify_all();
}

// What came of a publication; settles what was taken for it.
FsPutOutcome FsSharedConnector::outcome_of(const FsPart& part, const FsFiles::Publication& item) {
  const std::uint64_t charge = fs_charge(part.length);
  if (item.renamed)
    member_.settle(charge);  // also where it was removed again: a scan will not find it
  else if (!part.found)
    give_up_part(item.part, charge);
  if (!item.status.ok()) return fs_put_failure(item.status);
  if (part.found) return {PutStatus::kExists, ""};
  member_.stored(charge);
  return {PutStatus::kStored, ""};
}

void FsSharedConnector::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(mutex_);
  parts_.end(lock, batch, [this](Lock& held, const std::vector<std::uint64_t>& claimed) {
    publish(held, claimed);
  });
}

void FsSharedConnector::load(std::span<LoadItem> piece) noexcept {
  for (LoadItem& item : piece) {
    std::tie(item.status, item.reason) = load_one(item);
    item.hold.reset();
  }
}

FsLoadOutcome FsSharedConnector::load_one(LoadItem& item) {
  const FsFiles::Read read =
      files_.read(item.key, item.bytes, item.length, [&](const FileStat& found) {
        const std::int64_t now_ns = now_unix_ns();
        item.copy = copy_of(found);
        return fs_recency(found) < member_.refresh_before(now_ns) ? now_ns : 0;
      });
  return FsFiles::outcome_of(read);
}

// Durably; keys and lengths. Returns how many.
std::size_t FsSharedConnector::remove_records(
    std::span<const std::pair<Digest, std::uint64_t>> records) {
  std::vector<FsFiles::Removal> removals(records.size());
  for (std::size_t i = 0; i < records.size(); ++i)
    removals[i].key = records[i].first;
  files_.unlink(removals, true);
  std::size_t removed = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (removals[i].after != FsFiles::After::kGoneForGood) continue;
    const std::uint64_t charge = fs_charge(records[i].second);
    removed += 1;
    bytes += charge;
    member_.removed(charge);
  }
  const Lock lock(mutex_);
  removed_since_scan_ += bytes;
  if (options_.capacity_bytes != 0 &&
      removed_since_scan_ * kRemovedWorth >= options_.capacity_bytes) {
    removed_since_scan_ = 0;
    member_.ask_for_scan();
  }
  return removed;
}

void FsSharedConnector::remove(std::span<DeleteItem> items) noexcept {
  std::set<Digest> asked;
  for (DeleteItem& item : items) {
    FileStat found;
    if (!asked.insert(item.key).second) continue;
    if (!layer_.stat(paths_.record(item.key), &found).ok() || !found.is_file) continue;
    const std::pair<Digest, std::uint64_t> record{item.key, found.length};
    item.removed = remove_records(std::span(&record, 1)) == 1;
  }
}

void FsSharedConnector::remove_corrupt(const LoadItem& item) noexcept {
  const std::string path = paths_.record(item.key);
  FileStat found;
  if (!layer_.stat(path, &found).ok() || copy_of(found) != item.copy) return;
  if (std::strcmp(item.reason, "checksum") == 0)
    notes_.add(true, path + " is corrupt and is removed");
  FsFiles::Removal removal{.key = item.key};
  files_.unlink(std::span(&removal, 1), false);
  if (removal.after == FsFiles::After::kGone) member_.removed(fs_charge(found.length));
}

std::uint64_t FsSharedConnector::clear() noexcept {
  FsScan found;
  const Status status = scan_fs_directory(layer_, paths_, INT64_MIN, [] { return true; }, &found);
  if (!status.ok())
    notes_.add(true, "the names in " + paths_.base() + " could not be read: " + found.failed);
  std::vector<std::pair<Digest, std::uint64_t>> records;
  for (const FsScan::Record& record : found.records)
    records.emplace_back(record.key, record.length);
  const std::size_t removed = remove_records(records);
  files_.sync_folders(found.folders);  // so that nothing that others evicted comes back either
  member_.ask_for_scan();
  return removed;
}

ConnectorUsage FsSharedConnector::usage() noexcept {
  Lock lock(mutex_);
  std::optional<ConnectorUsage> found;
  (void)wait_until(lock, kUsageWait, [&] {
    found = member_.usage();
    return found.has_value();
  });
  return found.value_or(ConnectorUsage{.capacity_bytes = options_.capacity_bytes});
}

void FsSharedConnector::counts(std::vector<ConnectorCount>* out) noexcept {
  member_.counts(out);
  const Lock lock(mutex_);
  out->push_back({"throttled", throttled_});
  out->push_back({"throttled_no_janitor", throttled_no_janitor_});
}

void FsSharedConnector::take_evicted(std::vector<Digest>* keys) noexcept {
  member_.take_evicted(keys);
}

void FsSharedConnector::take_notes(std::vector<ConnectorNote>* notes) noexcept {
  notes_.take(notes);
}

void FsSharedConnector::close() noexcept {
  {
    const Lock lock(mutex_);
    closing_ = true;
  }
  poked_.notify_one();
  if (ticker_.joinable()) ticker_.join();
  member_.leave();
  lock_.reset();
}

}  // namespace kvstrata
