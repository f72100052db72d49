// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/sharer.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

namespace kvstrata {

namespace {

constexpr std::int64_t kHourNs = std::int64_t{3600} * 1'000'000'000;
// A load is recorded as a use only if the recorded use of its record is longer ago than
// 1/kRefreshPart of the time since the last use of the record that is evicted next. If that part is
// less than kRefreshExactNs, every load is recorded.
constexpr std::int64_t kRefreshPart = 8;
constexpr std::int64_t kRefreshExactNs = std::int64_t{60} * 1'000'000'000;
// A server writes its file again after this time even without news, in case it was damaged.
constexpr std::int64_t kPublishAgainNs = std::int64_t{2} * 1'000'000'000;
constexpr unsigned kIdBits = 64 - kFsPartBits;

std::uint64_t random_id() {
  std::random_device device;
  const std::uint64_t bits = std::uint64_t{device()} << 32 | device();
  return std::max<std::uint64_t>(bits >> (64 - kIdBits), 1);
}

}  // namespace

FsSharer::FsSharer(FileLayer& layer, const FsPaths& paths, FsFiles& files, NoteBook& notes,
                   std::uint64_t capacity_bytes, std::string relative_tmp_dir,
                   const FsSharedTimes& times)
    : layer_(layer),
      paths_(paths),
      files_(files),
      notes_(notes),
      times_(times),
      shared_(layer, paths) {
  self_.capacity_bytes = capacity_bytes;
  self_.relative_tmp_dir = as_fs_word(relative_tmp_dir);
}

std::string FsSharer::join(const std::string& who) {
  who_ = who;
  const auto unusable = [&](const Status& status) {
    return "base_path: '" + paths_.base() +
           "' cannot be shared: " + describe_file_error(shared_.folder(), status) +
           "; give a directory that this user may write and lock";
  };
  Status status = shared_.make_folder();
  if (!status.ok()) return unusable(status);
  do {
    id_ = random_id();
    status = lock_own();
  } while (status.code() == StatusCode::kBusy);
  if (status.ok()) status = shared_.write_sharer(id_, self_);
  FsSharedFolder::Listing listing;
  if (status.ok()) status = shared_.list(&listing);
  if (!status.ok()) return unusable(status);
  if (listing.foreign > 0)
    notes_.add(true, shared_.folder() + " holds " + std::to_string(listing.foreign) +
                         " files that are not ours; they are ignored");
  std::string wrong = compare_settings(listing);
  if (wrong.empty()) {
    happened(FsSharerEvent::kJoined);
  } else {
    shared_.forget_sharer(id_);
    lock_.reset();
  }
  return wrong;
}

void FsSharer::happened(FsSharerEvent event) {
  const std::lock_guard lock(mutex_);
  role_ = kFsSharerMachine.after(role_, event);
}

Status FsSharer::lock_own() {
  std::string holder;
  KVSTRATA_RETURN_IF_ERROR(shared_.lock(id_, &lock_, &holder));
  lock_->note(who_);
  return Status();
}

// Returns an empty string, or which setting differs from that of a running server and what to
// change. Each server publishes its settings before it compares them, so of two servers that start
// at the same time at least one sees the settings of the other.
std::string FsSharer::compare_settings(const FsSharedFolder::Listing& listing) {
  for (const std::uint64_t id : listing.locks) {
    FsSharerState other;
    std::unique_ptr<FileLock> lock;
    std::string holder;
    if (id == id_ || !shared_.read_sharer(id, &other).ok()) continue;
    if (shared_.lock(id, &lock, &holder).code() != StatusCode::kBusy) continue;
    while (!holder.empty() && holder.back() == '\n')
      holder.pop_back();
    const std::string who = " (" + (holder.empty() ? "unknown" : holder) + ")";
    if (other.capacity_bytes != self_.capacity_bytes)
      return "!capacity_gb: " + std::to_string(self_.capacity_bytes) + " bytes here, but " +
             std::to_string(other.capacity_bytes) + " bytes in a server that shares '" +
             paths_.base() + "'" + who +
             "; the cap belongs to the directory: give all its servers the same cap";
    if (other.relative_tmp_dir != self_.relative_tmp_dir)
      return "!relative_tmp_dir: '" + self_.relative_tmp_dir + "' here, but '" +
             other.relative_tmp_dir + "' in a server that shares '" + paths_.base() + "'" + who +
             "; give all its servers the same name";
  }
  return "";
}

void FsSharer::tick(const std::function<bool()>& go_on) {
  step();
  if (role_ == FsSharerRole::kOffice && janitor_->wants_scan(times_.clock())) {
    std::int64_t last_ns = times_.clock();
    janitor_->scan(
        [&] {
          const std::int64_t now_ns = times_.clock();
          if (now_ns - last_ns >= times_.beat.count() / 5) {
            last_ns = now_ns;
            step();
          }
          return role_ == FsSharerRole::kOffice && go_on();
        },
        times_.clock);
    if (role_ == FsSharerRole::kOffice) step();
  }
  happened(FsSharerEvent::kTurnEnded);
  if (role_ == FsSharerRole::kHears) janitor_.reset();
}

void FsSharer::step() {
  const std::int64_t now_ns = times_.clock();
  FsSharedFolder::Listing listing;
  Status status = shared_.list(&listing);
  if (is_not_there(status)) {
    status = shared_.make_folder();
    if (status.ok()) status = shared_.list(&listing);
  }
  if (status.ok() && !std::ranges::binary_search(listing.locks, id_)) {
    status = lock_own();  // its lock file was removed
    published_ns_ = now_ns - kPublishAgainNs;
  }
  if (!status.ok()) {
    std::string failed = describe_file_error(shared_.folder(), status);
    if (failed != failed_)
      notes_.add(true, "cannot hear the servers that share " + paths_.base() + ": " + failed);
    failed_ = std::move(failed);
    return;
  }
  failed_.clear();
  if (role_ == FsSharerRole::kOffice)
    be_janitor(listing, now_ns);
  else if (role_ == FsSharerRole::kHears)
    hear_janitor(listing, now_ns);
  publish_own(now_ns);
}

// Publishes this server's state if it has changed, or kPublishAgainNs after the last time.
void FsSharer::publish_own(std::int64_t now_ns) {
  FsSharerState state;
  {
    const std::lock_guard lock(mutex_);
    if (!news_ && now_ns - published_ns_ < kPublishAgainNs) return;
    news_ = false;
    state = self_;
  }
  if (shared_.write_sharer(id_, state).ok()) {
    published_ns_ = now_ns;
  } else {
    const std::lock_guard lock(mutex_);
    news_ = true;
  }
}

void FsSharer::hear_janitor(const FsSharedFolder::Listing& listing, std::int64_t now_ns) {
  const std::uint64_t highest = listing.highest();
  last_generation_ = std::max(last_generation_, highest);
  FsJanitorState state;
  std::string text;
  const Status status = highest == 0 ? Status() : shared_.read_janitor(highest, &state, &text);
  const bool readable = highest != 0 && status.ok();
  if (highest != heard_generation_ || (status.ok() && text != heard_text_)) {
    heard_generation_ = highest;
    heard_text_ = text;
    heard_ns_ = now_ns;
  }
  if (status.code() == StatusCode::kCorrupt) {
    const std::lock_guard lock(mutex_);
    garbage_ += 1;
  }
  if (highest == 0 || (readable && state.left != 0) || now_ns - heard_ns_ > times_.lease.count()) {
    take_over(std::max(highest, last_generation_) + 1, now_ns);
    return;
  }
  FsSharedFolder::Listing again;
  if (!readable || !shared_.list(&again).ok() || again.highest() != highest) return;
  accept(state, highest, heard_ns_);
}

// Adopts the state that a janitor has published. REQUIRES: after the state was read, no higher
// janitor was in office.
void FsSharer::accept(const FsJanitorState& state, std::uint64_t generation, std::int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  janitor_said_ = state;
  janitor_ns_ = now_ns;
  const auto grant = state.grants.find(id_);
  if (grant == state.grants.end()) return;
  news_ =
      news_ || self_.generation != generation || grant->second.granted_bytes > self_.granted_bytes;
  self_.generation = generation;
  self_.granted_bytes = std::max(self_.granted_bytes, grant->second.granted_bytes);
}

void FsSharer::take_over(std::uint64_t generation, std::int64_t now_ns) {
  if (!shared_.take_office(generation).ok()) return;  // another server was quicker
  FsJanitor::Place place{.layer = layer_,
                         .paths = paths_,
                         .files = files_,
                         .shared = shared_,
                         .notes = notes_,
                         .own_id = id_,
                         .capacity_bytes = self_.capacity_bytes};
  janitor_ = std::make_unique<FsJanitor>(place, generation);
  beat_ns_ = now_ns - times_.beat.count();
  {
    const std::lock_guard lock(mutex_);
    takeovers_ += generation > 1 ? 1 : 0;
  }
  happened(FsSharerEvent::kTookOffice);
  FsSharedFolder::Listing listing;
  if (shared_.list(&listing).ok()) be_janitor(listing, now_ns);
}

bool FsSharer::in_office() {
  FsSharedFolder::Listing listing;
  if (!shared_.list(&listing).ok()) return false;
  if (listing.highest() == janitor_->generation()) return true;
  // A higher janitor is in office, or the file of this janitor was removed.
  happened(FsSharerEvent::kDeposed);
  last_generation_ = std::max(last_generation_, janitor_->generation());
  return false;
}

void FsSharer::be_janitor(const FsSharedFolder::Listing& listing, std::int64_t now_ns) {
  if (!in_office()) return;
  FsSharerState own;
  {
    const std::lock_guard lock(mutex_);
    own = self_;
  }
  const std::uint64_t garbage = janitor_->garbage();
  const std::uint64_t evicted = janitor_->evicted();
  janitor_->hear(listing, own, now_ns);
  janitor_->evict_and_grant([this] { return in_office(); });
  {
    const std::lock_guard lock(mutex_);
    janitor_->take_evicted(&evicted_);
    garbage_ += janitor_->garbage() - garbage;
    evicted_count_ += janitor_->evicted() - evicted;
    sharers_ = janitor_->sharers();
  }
  if (role_ != FsSharerRole::kOffice ||
      (!janitor_->changed() && now_ns - beat_ns_ < times_.beat.count()))
    return;
  janitor_->published();
  if (!shared_.write_janitor(janitor_->generation(), id_, janitor_->state()).ok()) return;
  beat_ns_ = now_ns;
  for (const std::uint64_t generation : listing.janitors) {
    if (generation < janitor_->generation()) shared_.forget_janitor(generation);
  }
  if (in_office()) accept(janitor_->state(), janitor_->generation(), now_ns);
}

void FsSharer::leave() {
  if (role_ == FsSharerRole::kOutside) return;
  if (janitor_ != nullptr && in_office()) {
    janitor_->leave();
    (void)shared_.write_janitor(janitor_->generation(), id_, janitor_->state());
  }
  janitor_.reset();
  FsSharerState state;
  {
    const std::lock_guard lock(mutex_);
    self_.left = 1;
    self_.granted_bytes = self_.taken_bytes;
    state = self_;
  }
  happened(FsSharerEvent::kLeft);
  (void)shared_.write_sharer(id_, state);
  lock_.reset();
}

bool FsSharer::take(std::uint64_t charge) {
  const std::lock_guard lock(mutex_);
  if (self_.capacity_bytes != 0 && self_.granted_bytes - self_.taken_bytes < charge) return false;
  self_.taken_bytes += charge;
  news_ = true;
  return true;
}

void FsSharer::want(std::int64_t charge) {
  const std::lock_guard lock(mutex_);
  self_.wanted_bytes += static_cast<std::uint64_t>(charge);
  news_ = true;
}

void FsSharer::settle(std::uint64_t charge) {
  const std::lock_guard lock(mutex_);
  self_.settled_bytes += charge;
  news_ = true;
}

void FsSharer::give_back(std::uint64_t charge) {
  const std::lock_guard lock(mutex_);
  self_.taken_bytes -= charge;
  news_ = true;
}

void FsSharer::stored(std::uint64_t charge) {
  const std::lock_guard lock(mutex_);
  self_.tally.stored_bytes += charge;
  self_.tally.stored_records += 1;
  news_ = true;
}

void FsSharer::removed(std::uint64_t charge) {
  const std::lock_guard lock(mutex_);
  self_.tally.removed_bytes += charge;
  self_.tally.removed_records += 1;
  news_ = true;
}

std::uint64_t FsSharer::ask_for_space(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  self_.space_bytes = bytes;
  news_ = true;
  return ++self_.space_asks;
}

std::uint64_t FsSharer::space_done() {
  const std::lock_guard lock(mutex_);
  const auto grant = janitor_said_.grants.find(id_);
  return grant == janitor_said_.grants.end() ? 0 : grant->second.space_done;
}

void FsSharer::ask_for_scan() {
  const std::lock_guard lock(mutex_);
  self_.scan_asks += 1;
  news_ = true;
}

bool FsSharer::is_waiting() {
  const std::lock_guard lock(mutex_);
  const auto grant = janitor_said_.grants.find(id_);
  const std::uint64_t done = grant == janitor_said_.grants.end() ? 0 : grant->second.space_done;
  return self_.wanted_bytes > 0 || done < self_.space_asks;
}

bool FsSharer::has_janitor() {
  const std::int64_t now_ns = times_.clock();
  const std::lock_guard lock(mutex_);
  return role_ == FsSharerRole::kOffice ||
         (janitor_ns_ && now_ns - *janitor_ns_ <= times_.lease.count());
}

std::optional<ConnectorUsage> FsSharer::usage() {
  const std::lock_guard lock(mutex_);
  const auto grant = janitor_said_.grants.find(id_);
  if (!janitor_ns_ || janitor_said_.bound_known == 0 || grant == janitor_said_.grants.end())
    return std::nullopt;
  const FsTally& seen = grant->second.seen;
  const FsTally& now = self_.tally;
  const auto bytes =
      static_cast<std::int64_t>(janitor_said_.used_bytes + (now.stored_bytes - seen.stored_bytes) -
                                (now.removed_bytes - seen.removed_bytes));
  const auto records =
      static_cast<std::int64_t>(janitor_said_.records + (now.stored_records - seen.stored_records) -
                                (now.removed_records - seen.removed_records));
  ConnectorUsage usage{.used_bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0)),
                       .capacity_bytes = self_.capacity_bytes,
                       .records = static_cast<std::uint64_t>(std::max<std::int64_t>(records, 0))};
  if (usage.capacity_bytes != 0)
    usage.used_bytes = std::min(usage.used_bytes, usage.capacity_bytes);
  return usage;
}

std::int64_t FsSharer::refresh_before(std::int64_t now_unix_ns) {
  const std::lock_guard lock(mutex_);
  const auto oldest_ns = static_cast<std::int64_t>(janitor_said_.oldest_unix_ns);
  const std::int64_t age_ns = oldest_ns == 0 ? kHourNs : (now_unix_ns - oldest_ns) / kRefreshPart;
  return now_unix_ns - (age_ns < kRefreshExactNs ? 0 : std::min(age_ns, kHourNs));
}

void FsSharer::take_evicted(std::vector<Digest>* keys) {
  const std::lock_guard lock(mutex_);
  keys->insert(keys->end(), evicted_.begin(), evicted_.end());
  evicted_.clear();
}

void FsSharer::counts(std::vector<ConnectorCount>* out) {
  const std::lock_guard lock(mutex_);
  const bool is_janitor = role_ == FsSharerRole::kOffice;
  out->push_back({"janitor", is_janitor ? 1U : 0U});
  out->push_back({"members", is_janitor ? sharers_ : 0});
  out->push_back({"takeovers", takeovers_});
  out->push_back({"scans", janitor_said_.scans});
  out->push_back({"evicted_records", evicted_count_});
  out->push_back({"unreadable_files", garbage_});
}

}  // namespace kvstrata
