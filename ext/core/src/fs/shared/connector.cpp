// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/connector.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "base/clock.h"
#include "base/threads.h"

namespace kvstrata {

namespace {

using namespace std::chrono_literals;

constexpr auto kTickEvery = 100ms;
constexpr auto kTickEveryWaiting = 20ms;
// How long usage() waits for a janitor's numbers: a lease, and the time to read a directory.
constexpr auto kUsageWait = 10s;
// Without own threads: how many turns a wait takes before it gives up.
constexpr int kTurns = 4;
// When 1/kRemovedWorth of the cap was deleted, this server asks for a scan, by which the janitor
// learns of the freed bytes.
constexpr std::uint64_t kRemovedWorth = 16;

// Identifies a copy of a record by its file.
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
      files_(layer, paths_, options_.use_odirect, notes_, options_.own_threads),
      sharer_(layer, paths_, files_, notes_, options_.capacity_bytes, options_.relative_tmp_dir,
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
  wrong = sharer_.join(fs_holder_note(context.instance_id));
  if (!wrong.empty()) {
    lock_.reset();
    return wrong;
  }
  if (options_.own_threads)
    ticker_ = start_thread([this] { keep_ticking(); });
  else
    tick();
  return "";
}

void FsSharedConnector::tick() {
  sharer_.tick([this] {
    const Lock lock(mutex_);
    return !closing_;
  });
}

void FsSharedConnector::keep_ticking() {
  Lock lock(mutex_);
  while (!closing_) {
    lock.unlock();
    tick();
    const bool soon = sharer_.is_waiting();
    lock.lock();
    changed_.notify_all();
    poked_.wait_for(lock, soon ? kTickEveryWaiting : kTickEvery,
                    [this] { return poke_ || closing_; });
    poke_ = false;
  }
}

// Waits until there(), which is called with the mutex held, returns true. Returns false if the time
// runs out or the connector is closed before that.
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
      item.reason = word_of(Reason::kIo);
      notes_.add(true, "cannot look for " + describe_file_error(paths_.record(item.key), status));
    }
  }
}

void FsSharedConnector::heads(std::span<HeadItem> items) noexcept {
  for (HeadItem& item : items)
    files_.read_head(item);
}

void FsSharedConnector::put(std::span<PutItem> piece) noexcept {
  fs_each(piece, [this](PutItem& item) { return put_one(item); });
}

// Puts one item. If item.copy is set, put_end() decides the outcome; until then kStored says that
// this call made the part, kExists that another item made it.
PutOutcome FsSharedConnector::put_one(PutItem& item) {
  if (item.length < kMinRecordBytes) return put_refusal(Reason::kBadItem);
  Lock lock(mutex_);
  if (parts_.join(item)) return {PutStatus::kExists, Reason::kNone};
  constexpr std::uint64_t kNumbers = std::uint64_t{1} << kFsPartBits;
  const std::uint64_t number = sharer_.id() << kFsPartBits | next_part_++ % kNumbers;
  FsPart& part = parts_.make(number, item);
  lock.unlock();
  FileStat found;
  const bool is_there = layer_.stat(paths_.record(item.key), &found).ok() && is_record(found) &&
                        found.length == item.length;
  lock.lock();
  part.found = is_there;
  const PutOutcome outcome =
      is_there ? PutOutcome{PutStatus::kStored, Reason::kNone} : write(lock, number, item);
  if (outcome.first == PutStatus::kStored)
    parts_.happened(part, FsPartEvent::kWrote);
  else
    parts_.settle(part, FsPartEvent::kWriteFailed, outcome);
  changed_.notify_all();
  return {PutStatus::kStored, Reason::kNone};
}

// Writes the part. kStored: it is written.
PutOutcome FsSharedConnector::write(Lock& lock, std::uint64_t number, const PutItem& item) {
  const std::uint64_t charge = fs_charge(item.length);
  const std::uint64_t cap = options_.capacity_bytes;
  if (cap != 0 && charge > cap) return put_refusal(Reason::kCapacity);
  const auto throttled = [&](Reason reason) {
    const bool alone = !sharer_.has_janitor();
    (alone ? throttled_no_janitor_ : throttled_) += 1;
    return put_refusal(alone ? Reason::kNoJanitor : reason);
  };
  if (!take(lock, charge)) return throttled(Reason::kCapacity);
  const FsFiles::NewPart file{.path = paths_.part(item.key, number),
                              .bytes = item.bytes,
                              .length = item.length,
                              .accessed_unix_ns = now_unix_ns()};
  const Status status =
      write_fs_part(lock, files_, file, charge, min_free_bytes_,
                    [&](std::uint64_t missing_bytes) { return make_space(lock, missing_bytes); });
  if (status.ok()) return {PutStatus::kStored, Reason::kNone};
  lock.unlock();
  give_up_part(file.path, charge);
  lock.lock();
  const Reason reason = file_reason(status);
  return reason == Reason::kDiskFull ? throttled(reason) : put_refusal(reason);
}

// Gives back the bytes that were taken for a part, unless its file still exists. The bytes of a
// part that could not be removed stay taken until a scan after this server has ended.
void FsSharedConnector::give_up_part(const std::string& path, std::uint64_t charge) {
  FileStat found;
  if (is_not_there(layer_.stat(path, &found))) sharer_.give_back(charge);
}

bool FsSharedConnector::take(Lock& lock, std::uint64_t charge) {
  if (sharer_.take(charge)) return true;
  if (options_.own_threads && times_.clock() < refused_until_ns_) return false;
  sharer_.want(static_cast<std::int64_t>(charge));
  bool taken = false;
  const auto taken_or_to_publish = [&] {
    taken = taken || sharer_.take(charge);
    return taken || parts_.any_written();
  };
  // Every wait has the full put_wait, so the time that a publication takes does not count.
  while (!taken && wait_until(lock, times_.put_wait, taken_or_to_publish))
    publish(lock, parts_.claim_written());
  sharer_.want(-static_cast<std::int64_t>(charge));
  refused_until_ns_ = taken ? INT64_MIN : times_.clock() + times_.put_wait.count();
  return taken;
}

// Asks the janitor for space on the file system. True: the janitor has freed the bytes, or as many
// as it can. False: it did not answer in time.
bool FsSharedConnector::make_space(Lock& lock, std::uint64_t bytes) {
  if (options_.own_threads && times_.clock() < refused_until_ns_) return false;
  const std::uint64_t ask = sharer_.ask_for_space(bytes);
  const bool done = wait_until(lock, times_.put_wait, [&] { return sharer_.space_done() >= ask; });
  refused_until_ns_ = done ? INT64_MIN : times_.clock() + times_.put_wait.count();
  return done;
}

// Publishes and settles parts. REQUIRES: this thread has claimed them.
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
    const PutOutcome outcome = outcome_of(part, items[i]);
    lock.lock();
    parts_.settle(part,
                  !items[i].status.ok() ? FsPartEvent::kPublishFailed
                  : part.found          ? FsPartEvent::kNeedless
                                        : FsPartEvent::kPublished,
                  outcome);
  }
  changed_.notify_all();
}

// The outcome of a publication. Settles or gives back the bytes that were taken for the part.
PutOutcome FsSharedConnector::outcome_of(const FsPart& part, const FsFiles::Publication& item) {
  const std::uint64_t charge = fs_charge(part.length);
  if (item.renamed)
    sharer_.settle(charge);  // also if publish() has discarded the record: no scan will find it
  else if (!part.found)
    give_up_part(item.part, charge);
  if (!item.status.ok()) return put_refusal(file_reason(item.status));
  if (part.found) return {PutStatus::kExists, Reason::kNone};
  sharer_.stored(charge);
  return {PutStatus::kStored, Reason::kNone};
}

void FsSharedConnector::put_end(std::span<PutItem> batch) noexcept {
  Lock lock(mutex_);
  parts_.end(lock, batch, [this](Lock& held, const std::vector<std::uint64_t>& claimed) {
    publish(held, claimed);
  });
}

void FsSharedConnector::load(std::span<LoadItem> piece) noexcept {
  fs_each(piece, [this](LoadItem& item) { return load_one(item); });
}

LoadOutcome FsSharedConnector::load_one(LoadItem& item) {
  const FsFiles::Read read =
      files_.read(item.key, item.bytes, item.length, [&](const FileStat& found) {
        const std::int64_t now_ns = now_unix_ns();
        item.copy = copy_of(found);
        return fs_recency(found) < sharer_.refresh_before(now_ns) ? now_ns : 0;
      });
  return FsFiles::outcome_of(read);
}

// Removes records, given by key and length, durably. Returns how many were removed.
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
    sharer_.removed(charge);
  }
  const Lock lock(mutex_);
  removed_since_scan_ += bytes;
  if (options_.capacity_bytes != 0 &&
      removed_since_scan_ * kRemovedWorth >= options_.capacity_bytes) {
    removed_since_scan_ = 0;
    sharer_.ask_for_scan();
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
  if (reason_of(item.reason) == Reason::kChecksum)
    notes_.add(true, path + " is corrupt and is removed");
  FsFiles::Removal removal{.key = item.key};
  files_.unlink(std::span(&removal, 1), false);
  if (removal.after == FsFiles::After::kGone) sharer_.removed(fs_charge(found.length));
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
  files_.sync_folders(found.folders);  // so that records that other servers evicted stay gone
  sharer_.ask_for_scan();
  return removed;
}

ConnectorUsage FsSharedConnector::usage() noexcept {
  Lock lock(mutex_);
  std::optional<ConnectorUsage> found;
  (void)wait_until(lock, kUsageWait, [&] {
    found = sharer_.usage();
    return found.has_value();
  });
  return found.value_or(ConnectorUsage{.capacity_bytes = options_.capacity_bytes});
}

void FsSharedConnector::counts(std::vector<ConnectorCount>* out) noexcept {
  sharer_.counts(out);
  const Lock lock(mutex_);
  out->push_back({"throttled", throttled_});
  out->push_back({"throttled_no_janitor", throttled_no_janitor_});
}

void FsSharedConnector::take_evicted(std::vector<Digest>* keys) noexcept {
  sharer_.take_evicted(keys);
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
  sharer_.leave();
  lock_.reset();
}

}  // namespace kvstrata
