// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Recomputes, from the entries, all other state that the pool keeps, and compares the two.
#include "support/pool_validation.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace kvstrata {

namespace {

Status broken(const char* what, std::uint64_t a = 0, std::uint64_t b = 0) {
  return Status(StatusCode::kInternal, what, static_cast<std::int64_t>(a),
                static_cast<std::int64_t>(b));
}

}  // namespace

// Each step returns the first broken invariant that it finds; later steps rely on earlier ones.
class Validation {
 public:
  static Status check(Pool& pool) {
    const std::lock_guard lock(pool.mutex_);
    KVSTRATA_RETURN_IF_ERROR(pool.check_open());
    return Validation(pool).run();
  }
  static Status check(const SlabMap& map);
  // Entries of one class that are listed or parked, -1 when a list is broken.
  static std::int64_t count(const Value& policy, std::uint32_t cls);

 private:
  explicit Validation(Pool& pool)
      : pool_(pool),
        entries_(pool.entries_),
        index_(entries_.index),
        local_(entries_.local),
        slabs_(pool.slabs_),
        rows_(pool.rows_),
        touched_(static_cast<std::uint32_t>(entries_.touched)),
        leases_(touched_, 0),
        reserved_by_(touched_, 0),
        row_bits_(touched_),
        is_free_(touched_, false) {}

  Status run() {
    KVSTRATA_RETURN_IF_ERROR(check(slabs_));
    KVSTRATA_RETURN_IF_ERROR(check_header());
    KVSTRATA_RETURN_IF_ERROR(check_tickets());
    KVSTRATA_RETURN_IF_ERROR(check_free_list());
    for (std::uint32_t entry = 0; entry < touched_; ++entry)
      KVSTRATA_RETURN_IF_ERROR(check_entry(entry));
    if (pins_ < pool_.holds_) return broken("there are fewer pins than holds", pins_, pool_.holds_);
    std::uint64_t counted_bytes = 0;
    for (const auto& [entry, counted] : pool_.counted_)
      counted_bytes += counted.bytes;
    if (counted_bytes != pool_.counted_bytes_) {
      return broken("the counted holds have other bytes", counted_bytes, pool_.counted_bytes_);
    }
    KVSTRATA_RETURN_IF_ERROR(check_forest());
    KVSTRATA_RETURN_IF_ERROR(check_buckets());
    KVSTRATA_RETURN_IF_ERROR(check_sums());
    KVSTRATA_RETURN_IF_ERROR(check_tenants());
    return check_quarantine();
  }

  Status check_header() const;
  Status check_tickets();
  Status check_free_list();
  Status check_entry(std::uint32_t entry);
  Status check_rows(std::uint32_t entry) const;
  Status check_linked(std::uint32_t entry);
  Status check_children(std::uint32_t entry);
  Status check_forest() const;
  Status check_buckets() const;
  Status check_sums() const;
  Status check_tenants() const;
  Status check_quarantine() const;

  Pool& pool_;
  const Entries& entries_;
  const IndexView& index_;
  const EntryLocal* const local_;
  const SlabMap& slabs_;
  const Rows& rows_;
  const std::uint32_t touched_;
  // By entry.
  std::vector<std::uint32_t> leases_;
  std::vector<std::uint32_t> reserved_by_;
  std::vector<RowBits> row_bits_;  // of the rows that lease it
  std::vector<bool> is_free_;
  // Sums over the entries.
  EntryCounts states_{};
  TailCounts tails_{};
  std::uint64_t used_ = 0, blocked_bytes_ = 0, leased_bytes_ = 0, pinned_bytes_ = 0, pins_ = 0;
  std::uint64_t linked_ = 0, children_ = 0, with_parent_ = 0;
  std::uint64_t row_bytes_[kRowCount] = {};
  std::uint32_t run_blocked_[kMaxSlabs] = {};
  std::int64_t class_listed_[kMaxClasses] = {};
  std::unordered_map<std::uint32_t, std::uint64_t> tenant_bytes_;
};

Status Validation::check_header() const {
  if (load_word(index_.header().entries_touched) != touched_)
    return broken("entries_touched differs from its word");
  if (load_word(index_.header().epoch) != rows_.epoch)
    return broken("the epoch differs from its word");
  return Status();
}

Status Validation::check_tickets() {
  std::size_t items = 0;
  for (const auto& [ticket, lease] : pool_.leases_.leases) {
    if (!lease.rows.any()) return broken("a lease is held by no row", ticket);
    for (const std::uint32_t entry : lease.entries) {
      if (entry >= touched_) return broken("a lease names no entry", ticket);
      leases_[entry] += 1;
      row_bits_[entry] |= lease.rows.bits();
    }
    items += lease.entries.size();
  }
  if (items != pool_.leases_.items)
    return broken("the count of leased items is wrong", pool_.leases_.items, items);
  for (const auto& [ticket, reservation] : pool_.reservations_.reservations) {
    std::uint32_t left = 0;
    for (const std::uint32_t entry : reservation.items) {
      if (entry == kNoEntry) continue;
      left += 1;
      if (entry >= touched_ || index_.state(entry) != EntryState::kReserved) {
        return broken("a reservation names an entry that is not reserved", entry);
      }
      if (load_word(index_.cold(entry).owner) != reservation.row) {
        return broken("a reserved entry has another owner than its reservation", entry);
      }
      if (++reserved_by_[entry] > 1) return broken("an entry is reserved twice", entry);
    }
    if (left == 0 || left != reservation.left)
      return broken("a reservation's count is wrong", ticket, left);
    if (!rows_.is_claimed(reservation.row))
      return broken("a reservation outlived its row", ticket, reservation.row);
  }
  return Status();
}

Status Validation::check_free_list() {
  for (const std::uint32_t entry : entries_.free) {
    if (entry >= touched_ || is_free_[entry]) return broken("the free list is wrong", entry);
    is_free_[entry] = true;
  }
  return Status();
}

Status Validation::check_entry(std::uint32_t entry) {
  const EntryLocal& local = local_[entry];
  const ColdEntry& cold = index_.cold(entry);
  if ((load_word(index_.hot(entry).word[0]) & 1) != 0)
    return broken("an entry is half changed", entry);
  if (index_.state_byte(entry) >= kEntryStateCount) return broken("an entry has no state", entry);
  const EntryState state = index_.state(entry);
  if ((state == EntryState::kFree) != is_free_[entry])
    return broken("the free list misses an entry", entry);
  if (state == EntryState::kFree) {
    if (rows_.rows_of(entry).any()) return broken("a free entry has rows", entry);
    if (leases_[entry] != 0) return broken("a lease names a free entry", entry);
    return Status();
  }
  const std::uint64_t bytes = entries_.extent_bytes(entry);
  states_.entries[static_cast<std::size_t>(state)] += 1;
  states_.bytes[static_cast<std::size_t>(state)] += bytes;
  used_ += bytes;
  const SlabMap::Run& run = slabs_.run(local.run);
  if (run.slabs == 0 || local.slot >= run.capacity || run.slots[local.slot] != entry + 1) {
    return broken("an entry does not own its extent", entry, local.run);
  }
  const std::uint64_t needed = SlabMap::round_up(index_.length(entry));
  if (run.cls != local.cls || (local.is_tail() ? needed > bytes : needed != bytes)) {
    return broken("an entry is in a run of another size", entry, bytes);
  }
  const auto traits = std::bit_cast<Traits>(static_cast<std::uint32_t>(load_word(cold.use)));
  if (local.traits.is_tail != traits.is_tail)
    return broken("an entry and its mark as a tail do not agree", entry);
  if (local.is_tail()) {
    tails_.tail_entries += 1;
    tails_.tail_record_bytes += index_.length(entry);
    tails_.tail_extent_bytes += bytes;
  }
  if (slabs_.offset_of(local.run, local.slot) != index_.offset(entry)) {
    return broken("an entry's offset is not its extent's", entry, index_.offset(entry));
  }
  if (local.leases != leases_[entry])
    return broken("an entry's lease count is wrong", entry, local.leases);
  pins_ += local.pins;
  if (local.pins != 0) pinned_bytes_ += bytes;
  if (local.leases != 0) leased_bytes_ += bytes;
  if (local.is_blocked()) {
    run_blocked_[local.run] += 1;
    blocked_bytes_ += bytes;
  }
  KVSTRATA_RETURN_IF_ERROR(check_rows(entry));
  if (state == EntryState::kReserved && reserved_by_[entry] != 1) {
    return broken("a reserved entry is in no reservation", entry);
  }
  const std::uint64_t owner = load_word(cold.owner);
  if (state == EntryState::kReserved || state == EntryState::kQuarantined) {
    if (owner < kRowCount) row_bytes_[owner] += bytes;
  } else if (owner < kRowCount) {
    return broken("a committed entry has an owner", entry, owner);
  }
  if ((state == EntryState::kQuarantined) != pool_.departures_.quarantine.contains(entry)) {
    return broken("the set of quarantined entries is wrong", entry);
  }
  if (state == EntryState::kQuarantined) {
    if (local.known) return broken("a quarantined entry is in the policy", entry);
    if (index_.parent(entry) != kNoEntry || local.children != 0)
      return broken("a quarantined entry has family", entry);
    if (local.pins == 0 && local.leases == 0 && !rows_.is_old(entry)) {
      return broken("an entry stays quarantined though nobody can touch it", entry);
    }
    return Status();
  }
  return check_linked(entry);
}

Status Validation::check_rows(std::uint32_t entry) const {
  const EntryLocal& local = local_[entry];
  const EntryState state = index_.state(entry);
  const auto old = rows_.old_rows.find(entry);
  const bool is_old = old != rows_.old_rows.end();
  const std::uint32_t held_back =
      (state == EntryState::kReserved || state == EntryState::kQuarantined ? 1 : 0) +
      (is_old ? 1 : 0);
  if (local.held_back != held_back)
    return broken("an entry's reasons to stay are wrong", entry, local.held_back);
  RowBits needed = row_bits_[entry];
  if (is_old) {
    if (!old->second.any()) return broken("an entry waits for no old row", entry);
    needed |= old->second.bits();
  }
  const RowBits present = rows_.rows_of(entry);
  RowBits both = present;
  both |= needed;
  if (both != present) {
    return broken("a row that may touch an entry is not recorded in it", entry);
  }
  if (local.leases == 0 && present != needed) {
    return broken("an entry records a row that cannot touch it", entry);
  }
  return Status();
}

Status Validation::check_linked(std::uint32_t entry) {
  const EntryLocal& local = local_[entry];
  const std::uint32_t parent = index_.parent(entry);
  linked_ += 1;
  if (index_.find(index_.key(entry)) != entry)
    return broken("an entry is not found by its key", entry);
  if (!local.known) return broken("an entry is not in the policy", entry);
  class_listed_[local.cls] += 1;
  if (load_word(index_.cold(entry).stamp) > slabs_.run(local.run).newest)
    return broken("a run is older than its entries", entry);
  tenant_bytes_[entries_.tenant(entry)] += entries_.extent_bytes(entry);
  if (parent != kNoEntry) {
    if (parent >= touched_ || parent == entry)
      return broken("an entry's parent is no entry", entry, parent);
    const EntryState up = index_.state(parent);
    if (up == EntryState::kFree || up == EntryState::kQuarantined) {
      return broken("an entry's parent is not in the index", entry, parent);
    }
    with_parent_ += 1;
  }
  return check_children(entry);
}

Status Validation::check_children(std::uint32_t entry) {
  const EntryLocal& local = local_[entry];
  std::uint32_t children = 0;
  std::uint32_t previous = kNoEntry;
  for (std::uint32_t child = local.first_child; child != kNoEntry;
       child = local_[child].next_sibling) {
    if (child >= touched_ || index_.parent(child) != entry ||
        local_[child].previous_sibling != previous) {
      return broken("an entry's list of children is wrong", entry, child);
    }
    if (++children > local.children) break;
    previous = child;
  }
  if (children != local.children)
    return broken("an entry's child count is wrong", entry, local.children);
  children_ += children;
  return Status();
}

Status Validation::check_forest() const {
  if (children_ != with_parent_)
    return broken("children and parents do not agree", children_, with_parent_);
  // A forest: from the roots down every linked entry is reached once.
  std::vector<std::uint32_t> open;
  std::uint64_t reached = 0;
  for (std::uint32_t entry = 0; entry < touched_; ++entry) {
    const EntryState state = index_.state(entry);
    if (state == EntryState::kFree || state == EntryState::kQuarantined) continue;
    if (index_.parent(entry) == kNoEntry) open.push_back(entry);
  }
  while (!open.empty() && reached <= linked_) {
    const std::uint32_t entry = open.back();
    open.pop_back();
    reached += 1;
    for (std::uint32_t child = local_[entry].first_child; child != kNoEntry;
         child = local_[child].next_sibling) {
      open.push_back(child);
    }
  }
  if (reached != linked_) return broken("parents form a circle", reached, linked_);
  return Status();
}

Status Validation::check_buckets() const {
  std::uint64_t filled = 0;
  std::vector<std::uint32_t> longest(index_.bucket_lines(), 0);
  for (std::uint64_t line = 0; line < index_.bucket_lines(); ++line) {
    for (const std::uint64_t& slot : index_.line(line).slot) {
      const std::uint64_t word = load_word(slot);
      const std::uint64_t number = word & 0x7FFFFFFF;
      if (number == 0) continue;
      const auto entry = static_cast<std::uint32_t>(number - 1);
      if (entry >= touched_) return broken("a bucket line names no entry", line, entry);
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
  if (filled != linked_)
    return broken("the buckets hold another number of entries", filled, linked_);
  return Status();
}

Status Validation::check_sums() const {
  for (int state = 1; state < kEntryStateCount; ++state) {
    if (entries_.counts.entries[state] != states_.entries[state])
      return broken("a state's entry count is wrong", state);
    if (entries_.counts.bytes[state] != states_.bytes[state])
      return broken("a state's byte count is wrong", state);
  }
  if (entries_.tails.tail_entries != tails_.tail_entries ||
      entries_.tails.tail_record_bytes != tails_.tail_record_bytes ||
      entries_.tails.tail_extent_bytes != tails_.tail_extent_bytes) {
    return broken("the count of tails is wrong", entries_.tails.tail_entries, tails_.tail_entries);
  }
  if (used_ != entries_.used_bytes)
    return broken("the count of used bytes is wrong", entries_.used_bytes, used_);
  if (used_ > pool_.extents_bytes()) return broken("more bytes are used than there are", used_);
  if (blocked_bytes_ != entries_.blocked_bytes)
    return broken("the count of blocked bytes is wrong", entries_.blocked_bytes, blocked_bytes_);
  if (leased_bytes_ != pool_.leases_.leased_bytes)
    return broken("the count of leased bytes is wrong", pool_.leases_.leased_bytes, leased_bytes_);
  if (pinned_bytes_ != entries_.pinned_bytes)
    return broken("the count of pinned bytes is wrong", entries_.pinned_bytes, pinned_bytes_);
  for (std::uint32_t row = 1; row < kRowCount; ++row) {
    if (rows_.stranded.test(row) && rows_.state(row) != RowState::kStranded)
      return broken("a row is marked as stranded and is not", row);
  }
  for (std::uint32_t row = 0; row < kRowCount; ++row) {
    if (rows_.bytes[row] != row_bytes_[row])
      return broken("a row's bytes are wrong", row, rows_.bytes[row]);
  }
  for (std::uint32_t run = 0; run < kMaxSlabs; ++run) {
    if (slabs_.run(run).slabs != 0 && slabs_.run(run).blocked != run_blocked_[run]) {
      return broken("a run's count of blocked extents is wrong", run, slabs_.run(run).blocked);
    }
  }
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (count(entries_.policy, cls) != class_listed_[cls]) {
      return broken("the policy's lists of a class are wrong", cls,
                    static_cast<std::uint64_t>(count(entries_.policy, cls)));
    }
  }
  return Status();
}

Status Validation::check_tenants() const {
  const auto& accounts = pool_.tenants_.accounts;
  for (const auto& [id, bytes] : tenant_bytes_) {
    const auto found = accounts.find(id);
    if (found == accounts.end() || found->second.bytes != bytes)
      return broken("a tenant's bytes are wrong", id);
  }
  for (const auto& [id, account] : accounts) {
    if (account.bytes != 0 && !tenant_bytes_.contains(id))
      return broken("a tenant without entries has bytes", id);
    const auto& of_order = pool_.tenants_.of_order;
    if (account.order == 0 ? account.quota_bytes >= 0 : of_order[account.order] != &account)
      return broken("a tenant's order is wrong", id);
  }
  return Status();
}

Status Validation::check_quarantine() const {
  for (const std::uint32_t entry : pool_.departures_.quarantine) {
    if (index_.state(entry) != EntryState::kQuarantined)
      return broken("the quarantine holds another entry", entry);
  }
  return Status();
}

Status Validation::check(const SlabMap& map) {
  if (load_word(*map.slab_bytes_word_) != map.slab_bytes_)
    return broken("slab size differs from its word", map.slab_bytes_);
  std::uint64_t used_of[kMaxClasses] = {};
  std::uint64_t capacity_of[kMaxClasses] = {};
  std::uint64_t used = 0;
  for (std::uint32_t slab = 0; slab < map.slab_count_; ++slab) {
    const std::uint32_t first = map.run_of_[slab];
    if (first == kNoRun) {
      if (map.runs_[slab].slabs != 0)
        return broken("a run begins in a slab that is in no run", slab);
      if (load_word(map.table_[slab]) != 0)
        return broken("a slab in no run has a table word", slab);
      continue;
    }
    const SlabMap::Run& run = map.runs_[first];
    if (first > slab || slab >= first + run.slabs)
      return broken("a slab is outside its run", slab, first);
    if (run.cls >= kMaxClasses) return broken("a run has no class", first);
    const std::uint64_t extent = map.classes_[run.cls].extent_bytes;
    if (load_word(map.table_[slab]) != pack_slab(extent, run.slabs, slab - first)) {
      return broken("a table word differs from its run", slab);
    }
    if (first != slab) {
      if (map.runs_[slab].slabs != 0) return broken("a run begins inside another", slab);
      continue;
    }
    if (run.capacity != map.bytes_between(first, run.slabs) / extent || run.capacity == 0) {
      return broken("a run's capacity is wrong", first, run.capacity);
    }
    std::uint32_t taken = 0;
    for (std::uint32_t slot = 0; slot < run.capacity; ++slot) {
      taken += run.slots[slot] != 0;
      if (run.slots[slot] != 0 && slot >= run.fresh)
        return broken("a fresh slot is in use", first, slot);
    }
    if (taken != run.used) return broken("a run's use count is wrong", run.used, taken);
    if (run.fresh - run.used != run.freed.size())
      return broken("a run's free list is wrong", first);
    for (const std::uint32_t slot : run.freed) {
      if (slot >= run.fresh || run.slots[slot] != 0)
        return broken("a free slot is in use", first, slot);
    }
    if (run.blocked > run.used) return broken("a run has more blocked than used extents", first);
    used_of[run.cls] += run.used;
    capacity_of[run.cls] += run.capacity;
    used += run.used;
  }
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (map.classes_[cls].used != used_of[cls]) return broken("a class's use count is wrong", cls);
    if (map.classes_[cls].capacity != capacity_of[cls])
      return broken("a class's capacity is wrong", cls);
  }
  if (used != map.used_extents_)
    return broken("the count of used extents is wrong", used, map.used_extents_);
  return Status();
}

std::int64_t Validation::count(const Value& policy, std::uint32_t cls) {
  std::int64_t listed = 0;
  for (std::size_t order = 0; order < policy.orders_.size(); ++order) {
    const Value::SizeClass& size = policy.orders_[order][cls];
    for (std::size_t kind = 0; kind < size.lists.size(); ++kind) {
      std::uint32_t previous = kNoEntry;
      for (std::uint32_t entry = size.lists[kind].hot; entry != kNoEntry;
           entry = policy.entries_[entry].list_next) {
        const EntryLocal& local = policy.entries_[entry];
        if (!local.known || local.parked || local.kind != kind || local.order != order ||
            local.list_previous != previous)
          return -1;
        if (++listed > kMaxEntryCapacity) return -1;
        previous = entry;
      }
      if (previous != size.lists[kind].cold) return -1;
    }
    listed += size.parked;
  }
  return listed;
}

Status validate(Pool& pool) {
  return Validation::check(pool);
}

Status validate(const SlabMap& map) {
  return Validation::check(map);
}

std::int64_t listed(const Value& policy, std::uint32_t cls) {
  return Validation::count(policy, cls);
}

}  // namespace kvstrata
