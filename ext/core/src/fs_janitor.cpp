// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/fs_janitor.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvstrata {

namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
// Parts that nobody has written to for so long are removed, on the file system's own clock.
constexpr std::int64_t kPartAgeNs = 600 * kSecondNs;
constexpr std::int64_t kProbeNs = kSecondNs;
// A scan follows the one before after this many times what that took, at least.
constexpr std::int64_t kScanRest = 4;
constexpr std::int64_t kScanEveryNs = 3600 * kSecondNs;
// What all members together may hold of the cap without using it.
constexpr std::uint64_t kIdleShare = 8;
// Without anybody waiting, a scan is worth it where this part of the cap was written since.
constexpr std::uint64_t kScanWorth = 32;
constexpr std::size_t kEvictBatch = 32;
constexpr std::size_t kLooksPerTurn = 1024;

std::uint64_t less(std::uint64_t from, std::uint64_t what) noexcept {
  return from - std::min(from, what);
}

}  // namespace

void FsJanitor::hear(const FsSharedFiles::Listing& listing, const FsMemberState& own,
                     std::int64_t clock_ns) {
  for (const auto* const group : {&listing.locks, &listing.members}) {
    for (const std::uint64_t id : *group) {
      const auto [member, is_new] = members_.try_emplace(id);
      if (!is_new) continue;
      member->second.known = succeeded_;  // nobody else can have granted it anything
      changed_ = true;                    // it waits for being named
    }
  }
  Member& self = members_[place_.own_id];
  self.state = own;
  self.there = self.known = true;
  for (auto& [id, member] : members_) {
    if (id != place_.own_id && !member.gone)
      hear_member(id, member, std::ranges::binary_search(listing.locks, id), clock_ns);
  }
  if (!succeeded_) succeed(listing);
  for (auto& [id, member] : members_) {
    std::uint64_t& granted_bytes = granted(id).granted_bytes;
    granted_bytes = std::max(granted_bytes, member.state.granted_bytes);
    if (member.gone && member.state.left != 0)
      granted_bytes = member.state.taken_bytes;  // it has given back the rest
    member.known = member.known || member.state.generation == generation_;
    if (member.state.space_asks != member.space_ask) {
      member.space_ask = member.state.space_asks;
      member.space_freed = 0;
      member.space_scans = scans_;
    }
  }
}

void FsJanitor::hear_member(std::uint64_t id, Member& member, bool has_lock,
                            std::int64_t clock_ns) {
  std::string holder;
  if (!has_lock) {
    member.gone = true;
  } else if (!member.probed_ns || clock_ns - *member.probed_ns >= kProbeNs) {
    member.probed_ns = clock_ns;
    member.gone = place_.shared.lock(id, &member.lock, &holder).ok();
  }
  // Whoever was gone before this has said his last.
  const Status status = place_.shared.read_member(id, &member.state);
  if (status.ok()) {
    member.there = true;
  } else if (!is_not_there(status)) {
    garbage_ += 1;
    member.there = true;  // it says something, and it is not known what
  }
}

void FsJanitor::succeed(const FsSharedFiles::Listing& listing) {
  succeeded_ = true;
  const bool is_first = listing.janitors.empty() || listing.janitors.front() >= generation_;
  for (auto& [id, member] : members_)
    member.known = is_first;  // nobody was granted anything yet
  for (auto generation = listing.janitors.rbegin(); generation != listing.janitors.rend();
       ++generation) {
    FsJanitorState before;
    std::string text;
    if (*generation >= generation_) continue;
    const Status status = place_.shared.read_janitor(*generation, &before, &text);
    // It may have granted more than the one before it said, and that is not known.
    if (!status.ok() && status.code() != StatusCode::kCorrupt && !is_os_error(status, ENOENT))
      return;
    if (!status.ok()) continue;
    const bool somebody_stayed = std::ranges::any_of(members_, [&](const auto& numbered) {
      return !numbered.second.gone && before.grants.contains(numbered.first);
    });
    if (!somebody_stayed) return;
    for (auto& [id, grant] : before.grants) {
      Member& member = members_[id];
      member.known = true;
      member.base_bytes = grant.granted_bytes;
      member.base_tally = grant.seen;
      state_.grants[id] = grant;
    }
    for (auto& [id, member] : members_)
      member.known = true;  // whom the one before did not know was granted nothing
    bound_known_ = before.bound_known != 0;
    scanned_bytes_ = before.bound_bytes;
    used_bytes_ = static_cast<std::int64_t>(before.used_bytes);
    records_ = static_cast<std::int64_t>(before.records);
    oldest_unix_ns_ = static_cast<std::int64_t>(before.oldest_unix_ns);
    return;
  }
}

std::uint64_t FsJanitor::bound() const noexcept {
  std::uint64_t bytes = scanned_bytes_;
  for (const auto& [id, member] : members_) {
    const auto grant = state_.grants.find(id);
    if (grant != state_.grants.end()) bytes += less(grant->second.granted_bytes, member.base_bytes);
  }
  return bytes;
}

void FsJanitor::rule(const std::function<bool()>& in_office) {
  answer_space_asks(in_office);
  const std::uint64_t cap = place_.capacity_bytes;
  const bool all_known =
      std::ranges::all_of(members_, [](const auto& numbered) { return numbered.second.known; });
  if (cap != 0 && bound_known_ && all_known) {
    std::vector<std::pair<std::uint64_t, Member*>> living;
    for (auto& [id, member] : members_) {
      if (!member.gone && member.there && member.state.left == 0) living.emplace_back(id, &member);
    }
    const std::uint64_t idle = cap / kIdleShare / std::max<std::size_t>(living.size(), 1);
    const auto waits_for = [&](const Member& member) {
      return member.state.taken_bytes + std::min(member.state.wanted_bytes, cap);
    };
    const auto goal = [&](std::uint64_t id, const Member& member) {
      const std::uint64_t there = granted(id).granted_bytes;
      const std::uint64_t least = std::max(there, waits_for(member));
      const bool enough = less(there, member.state.taken_bytes) >= idle / 2;
      return enough ? least : std::max(least, member.state.taken_bytes + idle);
    };
    std::uint64_t need = 0;
    std::uint64_t need_now = 0;
    for (const auto& [id, member] : living) {
      need += less(goal(id, *member), granted(id).granted_bytes);
      need_now += less(waits_for(*member), granted(id).granted_bytes);
    }
    if (bound() + need > cap) (void)evict(bound() + need - cap, in_office);
    nearly_short_ = bound() + need > cap;
    short_ = bound() + need_now > cap;
    std::uint64_t room = less(cap, bound());
    for (const auto& [id, member] : living)
      grant(id, waits_for(*member), &room);
    for (const auto& [id, member] : living)
      grant(id, goal(id, *member), &room);
  }
  tell();
}

void FsJanitor::grant(std::uint64_t id, std::uint64_t goal_bytes, std::uint64_t* room) {
  std::uint64_t& granted_bytes = granted(id).granted_bytes;
  const std::uint64_t more = std::min(less(goal_bytes, granted_bytes), *room);
  if (more == 0) return;
  granted_bytes += more;
  *room -= more;
  changed_ = true;
}

// An ask is answered when that much has left, or nothing more can, since it was heard.
void FsJanitor::answer_space_asks(const std::function<bool()>& in_office) {
  for (auto& [id, member] : members_) {
    FsGrant& grant = granted(id);
    if (member.gone || grant.space_done == member.space_ask) continue;
    const std::uint64_t bytes = member.state.space_bytes;
    if (member.space_freed < bytes)
      member.space_freed += evict(bytes - member.space_freed, in_office);
    if (member.space_freed < bytes && scans_ == member.space_scans) {
      short_ = short_ || candidates_.empty();
      continue;
    }
    grant.space_done = member.space_ask;
    changed_ = true;
  }
}

// Unlinks the least recently used records of at least so many bytes as far as it can; returns how
// many. What was used or replaced since the scan is left to the next one.
std::uint64_t FsJanitor::evict(std::uint64_t need_bytes, const std::function<bool()>& in_office) {
  std::uint64_t done = 0;
  std::size_t looks = 0;
  while (done < need_bytes && !candidates_.empty() && looks < kLooksPerTurn && in_office()) {
    std::vector<FsFiles::Removal> removals;
    std::vector<FsScan::Record> records;
    std::uint64_t batch_bytes = 0;
    while (done + batch_bytes < need_bytes && !candidates_.empty() &&
           removals.size() < kEvictBatch && looks < kLooksPerTurn) {
      const FsScan::Record record = candidates_.back();
      candidates_.pop_back();
      oldest_unix_ns_ = record.recency_unix_ns;
      looks += 1;
      FileStat found;
      const Status status = place_.layer.stat(place_.paths.record(record.key), &found);
      if (is_not_there(status)) {  // it was scanned, and somebody has deleted it
        scanned_bytes_ = less(scanned_bytes_, fs_charge(record.length));
        done += fs_charge(record.length);
        if (scanning_) evicted_in_scan_[record.key] = record.recency_unix_ns;
      } else if (status.ok() && found.length == record.length &&
                 fs_recency(found) == record.recency_unix_ns) {
        removals.push_back({.key = record.key});
        records.push_back(record);
        batch_bytes += fs_charge(record.length);
      }
    }
    place_.files.unlink(removals, false);
    for (std::size_t i = 0; i < removals.size(); ++i) {
      const std::uint64_t charge = fs_charge(records[i].length);
      if (removals[i].after != FsFiles::After::kThere) evicted_.push_back(removals[i].key);
      if (removals[i].after != FsFiles::After::kGone) continue;
      scanned_bytes_ = less(scanned_bytes_, charge);
      used_bytes_ -= static_cast<std::int64_t>(charge);
      records_ -= 1;
      done += charge;
      evicted_count_ += 1;
      if (scanning_) evicted_in_scan_[removals[i].key] = records[i].recency_unix_ns;
    }
  }
  if (candidates_.empty()) oldest_unix_ns_ = std::max(oldest_unix_ns_, scan_unix_ns_);
  return done;
}

bool FsJanitor::wants_scan(std::int64_t clock_ns) const noexcept {
  if (clock_ns < next_scan_ns_) return false;
  std::uint64_t settled_since = 0;  // what a scan would find that the last one did not
  for (const auto& [id, member] : members_)
    settled_since += less(member.state.settled_bytes, member.base_bytes);
  const bool worth_it = nearly_short_ && settled_since >= place_.capacity_bytes / kScanWorth;
  return scans_ == 0 || (candidates_.empty() && (short_ || worth_it)) ||
         clock_ns - scan_began_ns_ >= kScanEveryNs ||
         std::ranges::any_of(members_, [](const auto& numbered) {
           const Member& member = numbered.second;
           return member.state.scan_asks != member.scan_asks || (member.gone && !member.known);
         });
}

void FsJanitor::scan(const std::function<bool()>& go_on,
                     const std::function<std::int64_t()>& clock) {
  scan_began_ns_ = clock();
  for (auto& [id, member] : members_) {
    member.next_base_bytes = member.state.settled_bytes;
    member.next_base_tally = member.state.tally;
    member.gone_before_scan = member.gone;
    member.scan_asks = member.state.scan_asks;
  }
  std::vector<std::uint64_t> before;
  for (const auto& [id, member] : members_)
    before.push_back(id);
  FsScan found;
  std::int64_t now_there_ns = 0;
  Status status = place_.shared.now(place_.own_id, &now_there_ns);
  const std::int64_t now_here_ns = now_unix_ns();
  if (!status.ok()) found.failed = describe_file_error(place_.shared.folder(), status);
  scanning_ = true;
  if (status.ok())
    status =
        scan_fs_directory(place_.layer, place_.paths, now_there_ns - kPartAgeNs, go_on, &found);
  scanning_ = false;
  const auto evicted = std::exchange(evicted_in_scan_, {});
  const std::int64_t ended_ns = clock();
  next_scan_ns_ = ended_ns + kScanRest * (ended_ns - scan_began_ns_);
  if (!status.ok()) {
    next_scan_ns_ = std::max(next_scan_ns_, ended_ns + kSecondNs);
    if (status.code() != StatusCode::kCancelled)
      place_.notes.add(
          true, "the names in " + place_.paths.base() + " could not be read: " + found.failed);
    return;
  }
  for (const std::uint64_t id : before) {
    Member& member = members_[id];
    member.base_bytes = member.next_base_bytes;
    member.base_tally = member.next_base_tally;
    if (!member.gone_before_scan) continue;
    place_.shared.forget_member(id);
    state_.grants.erase(id);
    members_.erase(id);
  }
  scanned_bytes_ = 0;
  used_bytes_ = 0;
  records_ = 0;
  for (const FsScan::Part& part : found.parts) {
    if (!members_.contains(part.number >> kFsPartBits)) scanned_bytes_ += fs_charge(part.length);
  }
  candidates_.clear();
  for (auto record = found.records.rbegin(); record != found.records.rend(); ++record) {
    const auto gone = evicted.find(record->key);
    if (gone != evicted.end() && gone->second == record->recency_unix_ns) continue;
    candidates_.push_back(*record);
    const std::uint64_t charge = fs_charge(record->length);
    scanned_bytes_ += charge;
    used_bytes_ += static_cast<std::int64_t>(charge);
    records_ += 1;
  }
  scan_unix_ns_ = now_here_ns;
  oldest_unix_ns_ = candidates_.empty() ? now_here_ns : candidates_.back().recency_unix_ns;
  bound_known_ = true;
  scans_ += 1;
  changed_ = true;
}

// Puts what is known into the state.
void FsJanitor::tell() {
  std::int64_t used = used_bytes_;
  std::int64_t records = records_;
  for (auto& [id, member] : members_) {
    const FsTally& now = member.state.tally;
    const FsTally& base = member.base_tally;
    used += static_cast<std::int64_t>(now.stored_bytes - base.stored_bytes -
                                      (now.removed_bytes - base.removed_bytes));
    records += static_cast<std::int64_t>(now.stored_records - base.stored_records -
                                         (now.removed_records - base.removed_records));
    granted(id).seen = now;
  }
  state_.bound_known = bound_known_ ? 1 : 0;
  state_.bound_bytes = bound();
  state_.used_bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(used, 0));
  state_.records = static_cast<std::uint64_t>(std::max<std::int64_t>(records, 0));
  state_.scans = scans_;
  state_.oldest_unix_ns = static_cast<std::uint64_t>(std::max<std::int64_t>(oldest_unix_ns_, 0));
}

void FsJanitor::take_evicted(std::vector<Digest>* keys) {
  keys->insert(keys->end(), evicted_.begin(), evicted_.end());
  evicted_.clear();
}

}  // namespace kvstrata
