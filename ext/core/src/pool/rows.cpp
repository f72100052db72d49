// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/rows.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace kvstrata {

Status Rows::check(std::uint32_t row) const noexcept {
  if (row == 0 || !is_claimed(row)) return Status(StatusCode::kNotFound, "row: not claimed", row);
  return Status();
}

Status Rows::claim(const std::uint8_t* session, const std::uint8_t* group, std::uint64_t pid,
                   bool registers_memory, std::uint32_t* out) noexcept {
  IndexView& index = entries.index;
  std::uint32_t chosen = 0;
  bool known = false;
  for (std::uint32_t row = kRowCount; row-- > 1;) {
    const RowRecord& record = index.row(row);
    if (load_word(record.claimed) == 0) {
      if (!known) chosen = row;
    } else if (std::memcmp(record.session, session, sizeof record.session) == 0) {
      chosen = row;
      known = true;
    }
  }
  static_assert(kRowCount - 1 == 1023);
  if (chosen == 0) {
    return Status(StatusCode::kNoSpace, Reason::kSessionsFull,
                  "sessions_full: all 1023 rows are claimed");
  }
  RowRecord& record = index.row(chosen);
  std::memcpy(record.session, session, sizeof record.session);
  std::memcpy(record.group, group, sizeof record.group);
  store_word(record.pid, pid);
  // A process that registered memory in an earlier epoch still has it registered.
  const std::uint64_t flags = registers_memory ? kRowFlagRegistersMemory : 0;
  store_word(record.flags, known ? load_word(record.flags) | flags : flags);
  if (!known) change(chosen, RowState::kCurrent);
  *out = chosen;
  return Status();
}

std::vector<RowInfo> Rows::list() const {
  std::vector<RowInfo> result;
  for (std::uint32_t row = 1; row < kRowCount; ++row) {
    const RowRecord& record = entries.index.row(row);
    if (load_word(record.claimed) == 0) continue;
    RowInfo info{};
    info.row = row;
    std::copy(std::begin(record.session), std::end(record.session), info.session.begin());
    std::copy(std::begin(record.group), std::end(record.group), info.group.begin());
    info.pid = load_word(record.pid);
    info.old = state(row) != RowState::kCurrent;
    info.registers_memory = (load_word(record.flags) & kRowFlagRegistersMemory) != 0;
    result.push_back(info);
  }
  return result;
}

RowState Rows::state(std::uint32_t row) const noexcept {
  const RowRecord& record = entries.index.row(row);
  if (load_word(record.claimed) == 0) return RowState::kUnclaimed;
  if (load_word(record.epoch) == epoch) return RowState::kCurrent;
  return stranded.test(row) ? RowState::kStranded : RowState::kOld;
}

void Rows::change(std::uint32_t row, RowState to) noexcept {
  const RowState from = state(row);
  assert(to != RowState::kOld && (from != RowState::kUnclaimed || to == RowState::kCurrent));
  assert(to != RowState::kStranded || from != RowState::kCurrent);
  if (to == from) return;
  RowRecord& record = entries.index.row(row);
  stranded.clear(row);
  switch (to) {
    case RowState::kUnclaimed:
      store_word<std::uint64_t>(record.claimed, 0);
      break;
    case RowState::kCurrent:
      store_word(record.epoch, epoch);
      store_word<std::uint64_t>(record.claimed, 1);
      break;
    case RowState::kStranded:
      stranded.set(row);
      break;
    case RowState::kOld:
      break;
  }
}

void Rows::adopt(std::uint32_t row, bool sound) noexcept {
  RowRecord& record = entries.index.row(row);
  if (!sound) store_word<std::uint64_t>(record.claimed, 0);
  // A damaged row may name the epoch that begins now, and would count as a current row.
  if (load_word(record.epoch) == epoch) store_word<std::uint64_t>(record.epoch, 0);
}

std::uint32_t Rows::count() const noexcept {
  std::uint32_t claimed = 0;
  for (std::uint32_t row = 1; row < kRowCount; ++row)
    claimed += is_claimed(row) ? 1 : 0;
  return claimed;
}

std::uint64_t Rows::forget(std::uint32_t row, bool keep_quarantine,
                           std::vector<std::uint32_t>* settled) {
  std::uint64_t kept_bytes = 0;
  for (auto& [entry, mask] : old_rows) {
    if (!mask.test(row)) continue;
    if (keep_quarantine && entries.index.state(entry) == EntryState::kQuarantined) {
      kept_bytes += entries.extent_bytes(entry);
      continue;
    }
    mask.clear(row);
    if (!mask.any()) settled->push_back(entry);
    if (entries.local[entry].leases == 0) set_rows(entry, mask.bits());
  }
  for (const std::uint32_t entry : *settled) {
    old_rows.erase(entry);
    entries.change_blockers(entry, true, [](EntryLocal& local) { local.held_back -= 1; });
  }
  return kept_bytes;
}

void Rows::release_owner(std::uint32_t entry) noexcept {
  ColdEntry& cold = entries.index.cold(entry);
  const std::uint64_t owner = load_word(cold.owner);
  if (owner < kRowCount) bytes[owner] -= entries.extent_bytes(entry);
  store_word(cold.owner, kNoOwner);
}

}  // namespace kvstrata
