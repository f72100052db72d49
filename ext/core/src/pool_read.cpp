// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Pool: a lookup on its way: find, peek, lease, verify, release.
#include "kvstrata/pool.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kvstrata/record.h"

namespace kvstrata {

void Pool::find_into(const std::uint8_t* keys, std::size_t n_keys,
                     std::vector<std::uint32_t>* out) const {
  out->resize(n_keys);
  index_.find_batch(keys, n_keys, out->data(), local_, sizeof(EntryLocal));
}

std::size_t Pool::peek(const std::uint8_t* keys, std::size_t n_keys,
                       std::size_t n_slices) const noexcept {
  if (is_closed() || n_slices == 0) return 0;
  return index_.peek(keys, n_keys, n_slices);
}

ExtentRecord Pool::extent_record(std::uint32_t entry) const noexcept {
  return {index_.offset(entry), index_.length(entry), entry, index_.generation(entry), 0};
}

Status Pool::lease(const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices,
                   std::span<const std::uint32_t> rows, LeaseResult* result) noexcept {
  if (n_slices == 0 || n_keys % n_slices != 0) {
    return Status(StatusCode::kBadArgument, "keys: their count must be a multiple of n_slices",
                  static_cast<std::int64_t>(n_keys), static_cast<std::int64_t>(n_slices));
  }
  if (n_keys > kMaxBatchKeys) {
    return Status(StatusCode::kBadArgument, "keys: too many in one call",
                  static_cast<std::int64_t>(n_keys), static_cast<std::int64_t>(kMaxBatchKeys));
  }
  if (rows.empty())
    return Status(StatusCode::kBadArgument, "rows: at least one must hold the lease");
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  RowMask mask;
  for (const std::uint32_t row : rows) {
    if (!is_row(row)) return Status(StatusCode::kNotFound, "rows: not claimed", row);
    mask.set(row);
  }
  find(keys, n_keys);
  const std::uint64_t limit = extents_bytes() / 2;
  std::uint64_t bytes = leased_bytes_;
  std::uint64_t prefix_bytes = 0;
  std::size_t n_chunks = 0;
  bool readable = true;
  bool trimmed = false;
  const bool room = leases_.size() < kMaxLeaseTickets;
  for (std::size_t first = 0; first < n_keys; first += n_slices) {
    std::uint64_t chunk_bytes = 0;
    std::uint64_t more = 0;
    std::uint64_t unverified = 0;
    bool present = true;
    for (std::size_t i = first; i < first + n_slices && present; ++i) {
      const std::uint32_t entry = found_[i];
      const EntryState state = entry == kNoEntry ? EntryState::kFree : index_.state(entry);
      present = state == EntryState::kReady || state == EntryState::kUnverified;
      unverified += state == EntryState::kUnverified;
      if (!present) break;
      chunk_bytes += extent_bytes(entry);
      if (local_[entry].leases == 0) more += extent_bytes(entry);
    }
    if (!present || (trimmed && unverified != 0)) break;
    readable &= unverified == 0;
    result->unverified += unverified;
    if (!readable) continue;
    if (!room) break;
    // Beyond the bound only the bytes are counted, up to where the prefix ends.
    trimmed |= bytes + more > limit;
    bytes += more;
    prefix_bytes += chunk_bytes;
    n_chunks += trimmed ? 0 : 1;
  }
  if (trimmed) {
    counters_.leases_trimmed += 1;
    // A prefix longer than the bound wants what others have, and no more.
    result->short_bytes = bytes - std::min(bytes, std::max(limit, prefix_bytes));
  }
  const std::size_t n_items = n_chunks * n_slices;
  if (n_items == 0 ||
      lease_items_ + n_items > 4 * std::max<std::size_t>(index_.capacity(), kMaxBatchKeys)) {
    return Status();
  }
  const RowBits bits = mask.bits();
  result->extents.resize(n_items);
  for (std::size_t i = n_items; i-- > 0;) {
    // From the last chunk to the first, so that the start of a prompt is what goes last.
    const std::uint32_t entry = found_[i];
    EntryLocal& local = local_[entry];
    if (local.leases == 0) leased_bytes_ += extent_bytes(entry);
    change_blockers(entry, false, [](EntryLocal& changed) { changed.leases += 1; });
    RowBits present = rows_of(entry);
    present |= bits;
    set_rows(entry, present);
    touch(entry);
    result->extents[i] = extent_record(entry);
  }
  for (std::size_t i = 0; i < n_slices; ++i) {
    std::uint32_t steps = 0;
    for (std::uint32_t up = index_.parent(found_[i]); up != kNoEntry && steps < kMaxAncestors;
         up = index_.parent(up), ++steps) {
      touch(up);
    }
  }
  result->n_chunks = n_chunks;
  result->ticket = next_ticket_++;
  Lease& lease = leases_[result->ticket];
  lease.rows = mask;
  lease.entries.assign(found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(n_items));
  lease_items_ += n_items;
  return Status();
}

std::size_t Pool::leases_to_end(std::span<const std::uint64_t> tickets,
                                std::uint64_t need_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  // Ends them in the counts alone, and puts those back below: nobody else looks meanwhile.
  std::uint64_t freed_bytes = 0;
  std::size_t looked_at = 0;
  std::size_t count = 0;
  std::size_t useful = 0;
  while (count < tickets.size() && freed_bytes < need_bytes && looked_at < kMaxEntriesToEnd) {
    const auto lease = leases_.find(tickets[count++]);
    if (lease == leases_.end()) continue;
    for (const std::uint32_t entry : lease->second.entries) {
      EntryLocal& local = local_[entry];
      local.leases -= 1;
      if (local.leases != 0) continue;
      freed_bytes += extent_bytes(entry);
      useful = count;
    }
    looked_at += lease->second.entries.size();
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto lease = leases_.find(tickets[i]);
    if (lease == leases_.end()) continue;
    for (const std::uint32_t entry : lease->second.entries)
      local_[entry].leases += 1;
  }
  // Where the bound ends the search, those asked for now are not looked at again.
  return looked_at < kMaxEntriesToEnd ? useful : count;
}

void Pool::end_lease(std::unordered_map<std::uint64_t, Lease>::iterator lease) {
  const std::vector<std::uint32_t>& entries = lease->second.entries;
  for (std::size_t i = entries.size(); i-- > 0;) {
    const std::uint32_t entry = entries[i];
    EntryLocal& local = local_[entry];
    if (i >= 8) __builtin_prefetch(&local_[entries[i - 8]], 1);
    if (i >= 8) __builtin_prefetch(&index_.cold(entries[i - 8]), 1);
    if (local.leases == 1) {
      leased_bytes_ -= extent_bytes(entry);
      set_rows(entry, old_rows_of(entry));
    }
    change_blockers(entry, true, [](EntryLocal& changed) { changed.leases -= 1; });
    if (local.leases == 0) free_if_untouched(entry);
  }
  lease_items_ -= entries.size();
  leases_.erase(lease);
}

bool Pool::release(std::uint64_t ticket, std::int64_t row) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return false;
  const auto lease = leases_.find(ticket);
  if (lease == leases_.end()) return false;
  if (row >= 0) {
    if (row >= kRowCount || !lease->second.rows.test(static_cast<std::uint32_t>(row))) return false;
    lease->second.rows.clear(static_cast<std::uint32_t>(row));
    if (lease->second.rows.any()) return true;
  }
  end_lease(lease);
  return true;
}

void Pool::verify_pinned(std::unique_lock<std::mutex>& lock,
                         const std::vector<std::uint32_t>& pinned, std::uint64_t* good,
                         std::uint64_t* bad) {
  for (const std::uint32_t entry : pinned) {
    Digest key;
    index_.key(entry).store(key.data());
    const std::uint8_t* address = extents_base_ + index_.offset(entry);
    const std::uint64_t length = index_.length(entry);
    lock.unlock();
    const bool sound = verify_record(address, length, &key).ok();
    lock.lock();
    *(sound ? good : bad) += 1;
    unpin(entry, false);
    if (is_closed()) continue;
    const EntryState state = index_.state(entry);
    if (sound && state == EntryState::kUnverified) {
      set_state(entry, EntryState::kReady);
      emit(EventKind::kVerified, index_.key(entry), length);
    } else if (!sound && (state == EntryState::kUnverified || state == EntryState::kReady)) {
      drop(entry, Cause::kCorrupt);
    } else {
      free_if_untouched(entry);
    }
  }
}

Status Pool::verify(const std::uint8_t* keys, std::size_t n_keys, std::uint64_t* good,
                    std::uint64_t* bad) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::vector<std::uint32_t> pinned;
  find(keys, n_keys);
  for (const std::uint32_t entry : found_) {
    if (entry == kNoEntry || index_.state(entry) != EntryState::kUnverified) continue;
    pin(entry);
    pinned.push_back(entry);
  }
  verify_pinned(lock, pinned, good, bad);
  return Status();
}

Status Pool::verify_next(std::uint64_t max_bytes, std::uint64_t* remaining) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::vector<std::uint32_t> pinned;
  std::uint64_t bytes = 0;
  while (!verify_queue_.empty() && (bytes < max_bytes || pinned.empty())) {
    const std::uint32_t entry = verify_queue_.back();
    verify_queue_.pop_back();
    if (index_.state(entry) != EntryState::kUnverified) continue;
    bytes += index_.length(entry);
    pin(entry);
    pinned.push_back(entry);
  }
  std::uint64_t good = 0;
  std::uint64_t bad = 0;
  verify_pinned(lock, pinned, &good, &bad);
  *remaining = counters_.entries[static_cast<std::size_t>(EntryState::kUnverified)];
  return Status();
}

Status Pool::mark_bad(const Key& key, bool* dropped) noexcept {
  *dropped = false;
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = index_.find(key);
  if (entry == kNoEntry || index_.state(entry) == EntryState::kReserved) return Status();
  pin(entry);
  std::uint64_t good = 0;
  std::uint64_t bad = 0;
  verify_pinned(lock, {entry}, &good, &bad);
  *dropped = bad != 0;
  return Status();
}

}  // namespace kvstrata
