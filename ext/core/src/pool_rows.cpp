// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Pool: the session table, and what the end of a process sets free.
#include "kvstrata/pool.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvstrata {

bool Pool::is_row(std::uint32_t row) const noexcept {
  return row < kRowCount && load_word(index_.row(row).claimed) == 1;
}

Status Pool::claim_row(const std::uint8_t* session, const std::uint8_t* group, std::uint64_t pid,
                       bool registers_memory, std::uint32_t* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::uint32_t chosen = 0;
  bool known = false;
  for (std::uint32_t row = kRowCount; row-- > 1;) {
    const RowRecord& record = index_.row(row);
    if (load_word(record.claimed) == 0) {
      if (!known) chosen = row;
    } else if (std::memcmp(record.session, session, sizeof record.session) == 0) {
      chosen = row;
      known = true;
    }
  }
  if (chosen == 0) return Status(StatusCode::kNoSpace, "sessions_full", kRowCount - 1);
  RowRecord& record = index_.row(chosen);
  std::memcpy(record.session, session, sizeof record.session);
  std::memcpy(record.group, group, sizeof record.group);
  store_word(record.pid, pid);
  // What an earlier epoch's attach said of the same process holds on.
  const std::uint64_t flags = registers_memory ? kRowFlagRegistersMemory : 0;
  store_word(record.flags, known ? load_word(record.flags) | flags : flags);
  if (!known) {
    store_word(record.epoch, epoch_);
    store_word<std::uint64_t>(record.claimed, 1);
    rows_claimed_ += 1;
  }
  *out = chosen;
  return Status();
}

std::vector<RowInfo> Pool::rows() noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<RowInfo> result;
  for (std::uint32_t row = 1; row < kRowCount; ++row) {
    const RowRecord& record = index_.row(row);
    if (load_word(record.claimed) == 0) continue;
    RowInfo info{};
    info.row = row;
    std::copy(std::begin(record.session), std::end(record.session), info.session.begin());
    std::copy(std::begin(record.group), std::end(record.group), info.group.begin());
    info.pid = load_word(record.pid);
    info.old = load_word(record.epoch) != epoch_;
    info.registers_memory = (load_word(record.flags) & kRowFlagRegistersMemory) != 0;
    result.push_back(info);
  }
  return result;
}

// Entries of earlier epochs need not wait for this row any more; with `keep_quarantine` only those
// that others read. Returns the bytes of those that go on waiting for it.
std::uint64_t Pool::forget_old_row(std::uint32_t row, bool keep_quarantine) {
  std::vector<std::uint32_t> settled;
  std::uint64_t kept_bytes = 0;
  for (auto& [entry, mask] : old_rows_) {
    if (!mask.test(row)) continue;
    if (keep_quarantine && index_.state(entry) == EntryState::kQuarantined) {
      kept_bytes += extent_bytes(entry);
      continue;
    }
    mask.clear(row);
    if (!mask.any()) settled.push_back(entry);
    if (local_[entry].leases == 0) set_rows(entry, mask.bits());
  }
  for (const std::uint32_t entry : settled) {
    old_rows_.erase(entry);
    change_blockers(entry, true, [](EntryLocal& local) { local.held_back -= 1; });
    free_if_untouched(entry);
  }
  return kept_bytes;
}

void Pool::end_row(std::uint32_t row) {
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto next = std::next(lease);
    if (lease->second.rows.test(row)) {
      lease->second.rows.clear(row);
      if (!lease->second.rows.any()) end_lease(lease);
    }
    lease = next;
  }
  for (auto reservation = reservations_.begin(); reservation != reservations_.end();) {
    if (reservation->second.row != row) {
      ++reservation;
      continue;
    }
    for (const std::uint32_t entry : reservation->second.items) {
      if (entry != kNoEntry) drop(entry, Cause::kAborted);
    }
    reservation = reservations_.erase(reservation);
  }
  forget_old_row(row, false);
  // What is still held here is no longer this process's debt.
  for (const std::uint32_t entry : quarantine_) {
    if (load_word(index_.cold(entry).owner) == row) release_owner(entry);
  }
  store_word<std::uint64_t>(index_.row(row).claimed, 0);
  rows_claimed_ -= 1;
}

Status Pool::row_gone(std::uint32_t row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (row == 0 || !is_row(row)) return Status(StatusCode::kNotFound, "row: not claimed", row);
  end_row(row);
  return Status();
}

Status Pool::row_stranded(std::uint32_t row, std::uint64_t* kept_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (row == 0 || !is_row(row)) return Status(StatusCode::kNotFound, "row: not claimed", row);
  *kept_bytes = forget_old_row(row, true);
  if (*kept_bytes == 0) end_row(row);
  return Status();
}

Status Pool::row_quiesced(std::uint32_t row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (row == 0 || !is_row(row)) return Status(StatusCode::kNotFound, "row: not claimed", row);
  forget_old_row(row, false);
  store_word(index_.row(row).epoch, epoch_);
  return Status();
}

}  // namespace kvstrata
