// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// FsConnector: keeping the cap, and removing records.
#include <algorithm>

#include "fs/connector.h"

namespace kvstrata {

namespace {

// When parts take more than 1/kPartsInCap of the cap, the written parts are published before their
// batch has ended. As records they can be evicted, so a batch larger than the cap evicts its own
// oldest records.
constexpr std::uint64_t kPartsInCap = 4;

}  // namespace

// Charges a part against the cap, evicting records for it. False: there is no room, and the part is
// not charged.
bool FsConnector::take_room(Lock& lock, std::uint64_t charge) {
  const std::uint64_t cap = options_.capacity_bytes;
  if (cap != 0 && charge > cap) return false;
  const auto publish_written = [&] {
    std::vector<std::uint64_t> written = parts_.claim_written();
    const bool any = !written.empty();
    publish(lock, std::move(written));
    return any;
  };
  while (cap != 0) {
    if (parts_charge_ + charge > cap / kPartsInCap && publish_written()) continue;
    const std::uint64_t total = index_.charge() + leaving_charge_ + parts_charge_ + charge;
    if (total <= cap) break;
    if (evict(lock, total - cap) || publish_written()) continue;
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

}  // namespace kvstrata
