// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/departures.h"

#include <cassert>

namespace kvstrata {

void Departures::leave(std::uint32_t entry, Cause cause) {
  IndexView& index = entries.index;
  const Key key = index.key(entry);
  const bool evicted = cause == Cause::kPolicy || cause == Cause::kWindow;
  const bool aborted = cause == Cause::kAborted;
  entries.policy.remove(entry, key.word[0], evicted);
  index.unlink(entry, key);
  family.leave_parent(entry);
  family.orphan_children(entry);
  tenants.remove(entry);
  switch (cause) {
    case Cause::kPolicy:
    case Cause::kWindow:
      counts.evicted_by[static_cast<std::size_t>(cause)] += 1;
      counts.evicted_entries += 1;
      counts.evicted_bytes += entries.extent_bytes(entry);
      changes.note(0, Change::kGone, key.word[0]);
      break;
    case Cause::kCleared:
      counts.cleared_entries += 1;
      changes.note(0, Change::kCleared, key.word[0]);
      break;
    case Cause::kRemoved:
      counts.cleared_entries += 1;
      changes.note(0, Change::kRemoved, key.word[0]);
      break;
    case Cause::kCorrupt:
      counts.corrupt_entries += 1;
      changes.note(0, Change::kCorrupt, key.word[0]);
      break;
    case Cause::kAborted:
      break;
  }
  const bool in_use = is_touchable(entry);
  assert(!(evicted && in_use));  // a victim is not blocked
  if (in_use) {
    entries.change(entry, EntryState::kQuarantined);
    quarantine.insert(entry);
    counts.quarantined_entries += 1;
    return;
  }
  if (aborted) rows.release_owner(entry);
  entries.release(entry);
}

void Departures::settle(std::uint32_t entry) {
  if (entries.index.state(entry) != EntryState::kQuarantined || is_touchable(entry)) return;
  rows.release_owner(entry);
  quarantine.erase(entry);
  entries.release(entry);
}

std::uint64_t Departures::remove(const std::uint8_t* keys, std::size_t n_keys, Cause cause) {
  std::uint64_t removed = 0;
  for (std::size_t i = 0; i < n_keys; ++i) {
    const std::uint32_t entry = entries.index.find(Key::load(keys + i * kKeyBytes));
    if (entry == kNoEntry || entries.local[entry].is_blocked()) continue;
    leave(entry, cause);
    removed += 1;
  }
  return removed;
}

void Departures::clear(std::uint64_t begin, std::uint64_t end, std::int64_t tenant,
                       ClearResult* result) {
  constexpr std::uint32_t kServerRow = 0;
  IndexView& index = entries.index;
  for (auto entry = static_cast<std::uint32_t>(begin); entry < end; ++entry) {
    const EntryState state = index.state(entry);
    if (state != EntryState::kReady && state != EntryState::kUnverified) continue;
    if (tenant >= 0 && entries.tenant(entry) != tenant) continue;
    if (entries.local[entry].leases != 0 && rows.rows_of(entry).test(kServerRow)) {
      result->kept += 1;
      continue;
    }
    leave(entry, Cause::kCleared);
    if (index.state(entry) == EntryState::kQuarantined) entries.local[entry].marks |= kMarkCleared;
    result->dropped += 1;
  }
}

ClearedInUse Departures::cleared_in_use(std::int64_t tenant) const {
  ClearedInUse in_use;
  for (const std::uint32_t entry : quarantine) {
    const EntryLocal& local = entries.local[entry];
    if ((local.marks & kMarkCleared) == 0) continue;
    if (tenant >= 0 && entries.tenant(entry) != tenant) continue;
    const bool leased = local.leases != 0 || rows.is_old(entry);
    (leased ? in_use.leased : in_use.held) += 1;
  }
  return in_use;
}

void Departures::forgive(std::uint32_t row) noexcept {
  for (const std::uint32_t entry : quarantine) {
    if (load_word(entries.index.cold(entry).owner) == row) rows.release_owner(entry);
  }
}

}  // namespace kvstrata
