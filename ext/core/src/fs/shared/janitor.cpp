// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/janitor.h"

#include <algorithm>
#include <cerrno>
#include <string>

namespace kvstrata {

namespace {

constexpr std::int64_t kScanEveryNs = std::int64_t{3600} * 1'000'000'000;
// All servers together may hold 1/kIdleShare of the cap as unused grants.
constexpr std::uint64_t kIdleShare = 8;
// If no server waits, a scan is worthwhile after 1/kScanWorth of the cap was written.
constexpr std::uint64_t kScanWorth = 32;

std::uint64_t minus_or_zero(std::uint64_t from, std::uint64_t what) noexcept {
  return from - std::min(from, what);
}

// The bytes that a server has taken plus the bytes that it waits for.
std::uint64_t claim_of(const FsSharerState& state, std::uint64_t cap) noexcept {
  return state.taken_bytes + std::min(state.wanted_bytes, cap);
}

}  // namespace

void FsJanitor::hear(const FsSharedFolder::Listing& listing, const FsSharerState& own,
                     std::int64_t clock_ns) {
  // Once this janitor has succeeded the previous janitor, no other janitor can have granted a new
  // server anything. A new server waits until the janitor's file names it, so its arrival is a
  // change.
  if (roll_.hear(listing, own, succeeded_, clock_ns)) changed_ = true;
  if (!succeeded_) succeed(listing);
  for (auto& [id, sharer] : roll_.sharers()) {
    std::uint64_t& granted_bytes = granted(id).granted_bytes;
    granted_bytes = std::max(granted_bytes, sharer.state.granted_bytes);
    if (sharer.gone && sharer.state.left != 0)
      granted_bytes = sharer.state.taken_bytes;  // it has given back the rest
    sharer.known = sharer.known || sharer.state.generation == generation_;
    if (sharer.state.space_asks != sharer.space_ask) {
      sharer.space_ask = sharer.state.space_asks;
      sharer.space_freed = 0;
      sharer.space_scans = bound_.scans();
    }
  }
}

void FsJanitor::succeed(const FsSharedFolder::Listing& listing) {
  succeeded_ = true;
  const bool is_first = listing.janitors.empty() || listing.janitors.front() >= generation_;
  FsRoll::Sharers& sharers = roll_.sharers();
  for (auto& [id, sharer] : sharers)
    sharer.known = is_first;  // no server was granted anything before the first janitor
  for (auto generation = listing.janitors.rbegin(); generation != listing.janitors.rend();
       ++generation) {
    FsJanitorState before;
    std::string text;
    if (*generation >= generation_) continue;
    const Status status = place_.shared.read_janitor(*generation, &before, &text);
    // That janitor may have granted more than the janitors before it, and its grants are unknown.
    if (!status.ok() && status.code() != StatusCode::kCorrupt && !is_os_error(status, ENOENT))
      return;
    if (!status.ok()) continue;
    const bool somebody_stayed = std::ranges::any_of(sharers, [&](const auto& numbered) {
      return !numbered.second.gone && before.grants.contains(numbered.first);
    });
    if (!somebody_stayed) return;
    for (auto& [id, grant] : before.grants) {
      Sharer& sharer = sharers[id];
      sharer.base_bytes = grant.granted_bytes;
      sharer.base_tally = grant.seen;
      state_.grants[id] = grant;
    }
    for (auto& [id, sharer] : sharers)
      sharer.known = true;  // a server that the previous janitor did not know was granted nothing
    bound_.succeed(before);
    return;
  }
}

std::uint64_t FsJanitor::bound_bytes() const noexcept {
  std::uint64_t bytes = bound_.scanned_bytes();
  for (const auto& [id, sharer] : roll_.sharers()) {
    const auto grant = state_.grants.find(id);
    if (grant != state_.grants.end())
      bytes += minus_or_zero(grant->second.granted_bytes, sharer.base_bytes);
  }
  return bytes;
}

void FsJanitor::evict_and_grant(const std::function<bool()>& in_office) {
  answer_space_asks(in_office);
  if (place_.capacity_bytes != 0 && bound_.known() && roll_.all_known()) grant_to_living(in_office);
  update_state();
}

void FsJanitor::grant_to_living(const std::function<bool()>& in_office) {
  const std::uint64_t cap = place_.capacity_bytes;
  const auto living = roll_.living();
  const std::uint64_t idle = cap / kIdleShare / std::max<std::size_t>(living.size(), 1);
  const auto goal = [&](std::uint64_t id, const Sharer& sharer) {
    const std::uint64_t there = granted(id).granted_bytes;
    const std::uint64_t least = std::max(there, claim_of(sharer.state, cap));
    const bool enough = minus_or_zero(there, sharer.state.taken_bytes) >= idle / 2;
    return enough ? least : std::max(least, sharer.state.taken_bytes + idle);
  };
  std::uint64_t need = 0;
  std::uint64_t need_now = 0;
  for (const auto& [id, sharer] : living) {
    need += minus_or_zero(goal(id, *sharer), granted(id).granted_bytes);
    need_now += minus_or_zero(claim_of(sharer->state, cap), granted(id).granted_bytes);
  }
  if (bound_bytes() + need > cap) (void)bound_.evict(bound_bytes() + need - cap, in_office);
  nearly_short_ = bound_bytes() + need > cap;
  short_ = bound_bytes() + need_now > cap;
  std::uint64_t room = minus_or_zero(cap, bound_bytes());
  for (const auto& [id, sharer] : living)
    grant(id, claim_of(sharer->state, cap), &room);
  for (const auto& [id, sharer] : living)
    grant(id, goal(id, *sharer), &room);
}

void FsJanitor::grant(std::uint64_t id, std::uint64_t goal_bytes, std::uint64_t* room) {
  std::uint64_t& granted_bytes = granted(id).granted_bytes;
  const std::uint64_t more = std::min(minus_or_zero(goal_bytes, granted_bytes), *room);
  if (more == 0) return;
  granted_bytes += more;
  *room -= more;
  changed_ = true;
}

// Answers a server's request for space when the requested bytes were freed since the janitor read
// the request, or when a scan has ended since then and no more bytes can be freed.
void FsJanitor::answer_space_asks(const std::function<bool()>& in_office) {
  for (auto& [id, sharer] : roll_.sharers()) {
    FsGrant& grant = granted(id);
    if (sharer.gone || grant.space_done == sharer.space_ask) continue;
    const std::uint64_t bytes = sharer.state.space_bytes;
    if (sharer.space_freed < bytes)
      sharer.space_freed += bound_.evict(bytes - sharer.space_freed, in_office);
    if (sharer.space_freed < bytes && bound_.scans() == sharer.space_scans) {
      short_ = short_ || !bound_.has_candidates();
      continue;
    }
    grant.space_done = sharer.space_ask;
    changed_ = true;
  }
}

bool FsJanitor::wants_scan(std::int64_t clock_ns) const noexcept {
  if (!bound_.may_scan(clock_ns)) return false;
  std::uint64_t settled_since = 0;  // bytes that a scan would find and the last scan did not
  for (const auto& [id, sharer] : roll_.sharers())
    settled_since += minus_or_zero(sharer.state.settled_bytes, sharer.base_bytes);
  const bool worth_it = nearly_short_ && settled_since >= place_.capacity_bytes / kScanWorth;
  return bound_.scans() == 0 || (!bound_.has_candidates() && (short_ || worth_it)) ||
         clock_ns - bound_.scan_began_ns() >= kScanEveryNs || roll_.wants_scan();
}

void FsJanitor::scan(const std::function<bool()>& go_on,
                     const std::function<std::int64_t()>& clock) {
  roll_.scan_began();
  const std::optional<FsScan> found = bound_.scan(go_on, clock);
  if (!found) return;
  for (const std::uint64_t id : roll_.scan_ended())
    state_.grants.erase(id);
  bound_.take(*found, [this](std::uint64_t id) { return roll_.sharers().contains(id); });
  changed_ = true;
}

// Writes the janitor's numbers into the state that it publishes.
void FsJanitor::update_state() {
  std::int64_t used = bound_.used_bytes();
  std::int64_t records = bound_.records();
  for (auto& [id, sharer] : roll_.sharers()) {
    const FsTally& now = sharer.state.tally;
    const FsTally& base = sharer.base_tally;
    used += static_cast<std::int64_t>(now.stored_bytes - base.stored_bytes -
                                      (now.removed_bytes - base.removed_bytes));
    records += static_cast<std::int64_t>(now.stored_records - base.stored_records -
                                         (now.removed_records - base.removed_records));
    granted(id).seen = now;
  }
  state_.bound_known = bound_.known() ? 1 : 0;
  state_.bound_bytes = bound_bytes();
  state_.used_bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(used, 0));
  state_.records = static_cast<std::uint64_t>(std::max<std::int64_t>(records, 0));
  state_.scans = bound_.scans();
  state_.oldest_unix_ns =
      static_cast<std::uint64_t>(std::max<std::int64_t>(bound_.oldest_unix_ns(), 0));
}

}  // namespace kvstrata
