// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Recomputes from the entries everything that the pool keeps beside them, and compares.
#include <algorithm>
#include <vector>

#include "kvstrata/pool.h"

namespace kvstrata {

namespace {

Status broken(const char* what, std::uint64_t a = 0, std::uint64_t b = 0) {
  return Status(StatusCode::kInternal, what, static_cast<std::int64_t>(a),
                static_cast<std::int64_t>(b));
}

}  // namespace

Status Pool::validate() noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  KVSTRATA_RETURN_IF_ERROR(slabs_.validate());
  const auto touched = static_cast<std::uint32_t>(entries_touched_);
  if (load_word(index_.header().entries_touched) != touched)
    return broken("entries_touched differs from its word");
  if (load_word(index_.header().epoch) != epoch_) return broken("the epoch differs from its word");

  std::vector<std::uint32_t> leases(touched, 0);
  std::vector<std::uint32_t> reserved_by(touched, 0);
  std::vector<RowBits> rows(touched);
  std::size_t items = 0;
  for (const auto& [ticket, lease] : leases_) {
    if (!lease.rows.any()) return broken("a lease is held by no row", ticket);
    for (const std::uint32_t entry : lease.entries) {
      if (entry >= touched) return broken("a lease names no entry", ticket);
      leases[entry] += 1;
      rows[entry] |= lease.rows.bits();
    }
    items += lease.entries.size();
  }
  if (items != lease_items_)
    return broken("the count of leased items is wrong", lease_items_, items);
  for (const auto& [ticket, reservation] : reservations_) {
    std::uint32_t left = 0;
    for (const std::uint32_t entry : reservation.items) {
      if (entry == kNoEntry) continue;
      left += 1;
      if (entry >= touched || index_.state(entry) != EntryState::kReserved) {
        return broken("a reservation names an entry that is not reserved", entry);
      }
      if (load_word(index_.cold(entry).owner) != reservation.row) {
        return broken("a reserved entry has another owner than its reservation", entry);
      }
      if (++reserved_by[entry] > 1) return broken("an entry is reserved twice", entry);
    }
    if (left == 0 || left != reservation.left)
      return broken("a reservation's count is wrong", ticket, left);
    if (!is_row(reservation.row))
      return broken("a reservation outlived its row", ticket, reservation.row);
  }

  std::vector<bool> is_free(touched, false);
  for (const std::uint32_t entry : free_entries_) {
    if (entry >= touched || is_free[entry]) return broken("the free list is wrong", entry);
    is_free[entry] = true;
  }
  std::uint64_t state_entries[kEntryStateCount] = {};
  std::uint64_t state_bytes[kEntryStateCount] = {};
  std::uint64_t used = 0, blocked_bytes = 0, leased_bytes = 0, pinned_bytes = 0, pins = 0,
                linked = 0;
  std::uint64_t row_bytes[kRowCount] = {};
  std::uint32_t run_blocked[kMaxSlabs] = {};
  std::int64_t class_listed[kMaxClasses] = {};
  std::unordered_map<std::uint32_t, std::uint64_t> tenant_bytes;
  std::uint64_t children_total = 0, with_parent = 0;
  for (std::uint32_t entry = 0; entry < touched; ++entry) {
    const EntryLocal& local = local_[entry];
    const ColdEntry& cold = index_.cold(entry);
    if ((load_word(index_.hot(entry).word[0]) & 1) != 0)
      return broken("an entry is half changed", entry);
    if (index_.state_byte(entry) >= kEntryStateCount) return broken("an entry has no state", entry);
    const EntryState state = index_.state(entry);
    if ((state == EntryState::kFree) != is_free[entry])
      return broken("the free list misses an entry", entry);
    if (state == EntryState::kFree) {
      if (rows_of(entry).any()) return broken("a free entry has rows", entry);
      if (leases[entry] != 0) return broken("a lease names a free entry", entry);
      continue;
    }
    const std::uint64_t bytes = extent_bytes(entry);
    state_entries[static_cast<std::size_t>(state)] += 1;
    state_bytes[static_cast<std::size_t>(state)] += bytes;
    used += bytes;
    const SlabMap::Run& run = slabs_.run(local.run);
    if (run.slabs == 0 || local.slot >= run.capacity || run.slots[local.slot] != entry + 1) {
      return broken("an entry does not own its extent", entry, local.run);
    }
    if (run.cls != local.cls || slabs_.size_class(local.cls).extent_bytes != bytes) {
      return broken("an entry is in a run of another size", entry, bytes);
    }
    if (slabs_.offset_of(local.run, local.slot) != index_.offset(entry)) {
      return broken("an entry's offset is not its extent's", entry, index_.offset(entry));
    }
    if (local.leases != leases[entry])
      return broken("an entry's lease count is wrong", entry, local.leases);
    pins += local.pins;
    if (local.pins != 0) pinned_bytes += bytes;
    if (local.leases != 0) leased_bytes += bytes;
    if (local.is_blocked()) {
      run_blocked[local.run] += 1;
      blocked_bytes += bytes;
    }
    const auto old = old_rows_.find(entry);
    const bool is_old = old != old_rows_.end();
    const std::uint32_t held_back =
        (state == EntryState::kReserved || state == EntryState::kQuarantined ? 1 : 0) +
        (is_old ? 1 : 0);
    if (local.held_back != held_back)
      return broken("an entry's reasons to stay are wrong", entry, local.held_back);
    RowBits needed = rows[entry];
    if (is_old) {
      if (!old->second.any()) return broken("an entry waits for no old row", entry);
      needed |= old->second.bits();
    }
    const RowBits present = rows_of(entry);
    RowBits both = present;
    both |= needed;
    if (both != present) {
      return broken("a row that may touch an entry is not recorded in it", entry);
    }
    if (local.leases == 0 && present != needed) {
      return broken("an entry records a row that cannot touch it", entry);
    }
    if (state == EntryState::kReserved && reserved_by[entry] != 1) {
      return broken("a reserved entry is in no reservation", entry);
    }
    const std::uint64_t owner = load_word(cold.owner);
    if (state == EntryState::kReserved || state == EntryState::kQuarantined) {
      if (owner < kRowCount) row_bytes[owner] += bytes;
    } else if (owner < kRowCount) {
      return broken("a committed entry has an owner", entry, owner);
    }
    if ((state == EntryState::kQuarantined) != quarantine_.contains(entry)) {
      return broken("the set of quarantined entries is wrong", entry);
    }
    const std::uint32_t parent = index_.parent(entry);
    if (state == EntryState::kQuarantined) {
      if (local.list != 0) return broken("a quarantined entry is in the policy", entry);
      if (parent != kNoEntry || local.children != 0)
        return broken("a quarantined entry has family", entry);
      if (local.pins == 0 && local.leases == 0 && !is_old) {
        return broken("an entry stays quarantined though nobody can touch it", entry);
      }
      continue;
    }
    linked += 1;
    if (index_.find(index_.key(entry)) != entry)
      return broken("an entry is not found by its key", entry);
    if (local.list == 0) return broken("an entry is not in the policy", entry);
    class_listed[local.cls] += 1;
    if (load_word(cold.stamp) > run.newest) return broken("a run is older than its entries", entry);
    tenant_bytes[static_cast<std::uint32_t>(load_word(cold.tenant))] += bytes;
    if (parent != kNoEntry) {
      if (parent >= touched || parent == entry)
        return broken("an entry's parent is no entry", entry, parent);
      const EntryState up = index_.state(parent);
      if (up == EntryState::kFree || up == EntryState::kQuarantined) {
        return broken("an entry's parent is not in the index", entry, parent);
      }
      with_parent += 1;
    }
    std::uint32_t children = 0;
    std::uint32_t previous = kNoEntry;
    for (std::uint32_t child = local.first_child; child != kNoEntry;
         child = local_[child].next_sibling) {
      if (child >= touched || index_.parent(child) != entry ||
          local_[child].previous_sibling != previous) {
        return broken("an entry's list of children is wrong", entry, child);
      }
      if (++children > local.children) break;
      previous = child;
    }
    if (children != local.children)
      return broken("an entry's child count is wrong", entry, local.children);
    children_total += children;
  }
  if (children_total != with_parent)
    return broken("children and parents do not agree", children_total, with_parent);
  if (pins < holds_) return broken("there are fewer pins than holds", pins, holds_);

  // A forest: from the roots down every linked entry is reached once.
  std::vector<std::uint32_t> open;
  std::uint64_t reached = 0;
  for (std::uint32_t entry = 0; entry < touched; ++entry) {
    const EntryState state = index_.state(entry);
    if (state == EntryState::kFree || state == EntryState::kQuarantined) continue;
    if (index_.parent(entry) == kNoEntry) open.push_back(entry);
  }
  while (!open.empty() && reached <= linked) {
    const std::uint32_t entry = open.back();
    open.pop_back();
    reached += 1;
    for (std::uint32_t child = local_[entry].first_child; child != kNoEntry;
         child = local_[child].next_sibling) {
      open.push_back(child);
    }
  }
  if (reached != linked) return broken("parents form a circle", reached, linked);

  std::uint64_t filled = 0;
  std::vector<std::uint32_t> longest(index_.bucket_lines(), 0);
  for (std::uint64_t line = 0; line < index_.bucket_lines(); ++line) {
    for (const std::uint64_t& slot : index_.line(line).slot) {
      const std::uint64_t word = load_word(slot);
      const std::uint64_t number = word & 0x7FFFFFFF;
      if (number == 0) continue;
      const auto entry = static_cast<std::uint32_t>(number - 1);
      if (entry >= touched) return broken("a bucket line names no entry", line, entry);
      const EntryState state = index_.state(entry);
      if (state == EntryState::kFree || state == EntryState::kQuarantined) {
        return broken("a bucket line holds an entry that is not in the index", line, entry);
      }
      const std::uint64_t hash = index_.key(entry).word[0];
      if (word >> 32 != hash >> 32) return broken("a bucket slot has a wrong tag", line, entry);
      const std::uint64_t home = index_.home_of(hash);
      const auto distance =
          static_cast<std::uint32_t>((line + index_.bucket_lines() - home) % index_.bucket_lines());
      if (distance >= kMaxProbeLines) return broken("an entry is in a wrong line", line, entry);
      longest[home] = std::max(longest[home], distance);
      filled += 1;
    }
  }
  for (std::uint64_t line = 0; line < index_.bucket_lines(); ++line) {
    if (index_.probe_length(line) != longest[line]) {
      return broken("a bucket line's probe length is wrong", line, longest[line]);
    }
  }
  if (filled != linked) return broken("the buckets hold another number of entries", filled, linked);

  for (int state = 1; state < kEntryStateCount; ++state) {
    if (counters_.entries[state] != state_entries[state])
      return broken("a state's entry count is wrong", state);
    if (counters_.bytes[state] != state_bytes[state])
      return broken("a state's byte count is wrong", state);
  }
  if (used != used_bytes_) return broken("the count of used bytes is wrong", used_bytes_, used);
  if (used > extents_bytes()) return broken("more bytes are used than there are", used);
  if (blocked_bytes != blocked_bytes_)
    return broken("the count of blocked bytes is wrong", blocked_bytes_, blocked_bytes);
  if (leased_bytes != leased_bytes_)
    return broken("the count of leased bytes is wrong", leased_bytes_, leased_bytes);
  if (pinned_bytes != pinned_bytes_)
    return broken("the count of pinned bytes is wrong", pinned_bytes_, pinned_bytes);
  std::uint32_t claimed = 0;
  for (std::uint32_t row = 1; row < kRowCount; ++row)
    claimed += is_row(row) ? 1 : 0;
  if (claimed != rows_claimed_) return broken("the count of rows is wrong", rows_claimed_, claimed);
  for (std::uint32_t row = 0; row < kRowCount; ++row) {
    if (row_bytes_[row] != row_bytes[row])
      return broken("a row's bytes are wrong", row, row_bytes_[row]);
  }
  for (std::uint32_t run = 0; run < kMaxSlabs; ++run) {
    if (slabs_.run(run).slabs != 0 && slabs_.run(run).blocked != run_blocked[run]) {
      return broken("a run's count of blocked extents is wrong", run, slabs_.run(run).blocked);
    }
  }
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (policy_->count(cls) != class_listed[cls]) {
      return broken("the policy's lists of a class are wrong", cls,
                    static_cast<std::uint64_t>(policy_->count(cls)));
    }
  }
  for (const auto& [id, bytes] : tenant_bytes) {
    const auto found = tenants_.find(id);
    if (found == tenants_.end() || found->second.bytes != bytes)
      return broken("a tenant's bytes are wrong", id);
  }
  for (const auto& [id, tenant] : tenants_) {
    if (tenant.bytes != 0 && !tenant_bytes.contains(id))
      return broken("a tenant without entries has bytes", id);
    std::uint64_t listed = 0;
    for (std::uint32_t entry = tenant.hot; entry != kNoEntry; entry = local_[entry].tenant_next) {
      listed += extent_bytes(entry);
      if (listed > used) break;
    }
    if (listed != (tenant.quota_bytes >= 0 ? tenant.bytes : 0))
      return broken("a tenant's list is wrong", id);
  }
  for (const std::uint32_t entry : quarantine_) {
    if (index_.state(entry) != EntryState::kQuarantined)
      return broken("the quarantine holds another entry", entry);
  }
  return Status();
}

}  // namespace kvstrata
