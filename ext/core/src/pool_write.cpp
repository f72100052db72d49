// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Pool: a store on its way: reserve, commit or abort.
#include "kvstrata/pool.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kvstrata/record.h"

namespace kvstrata {

namespace {

constexpr std::uint64_t kRelinkBudget = 1'000'000;

}  // namespace

Status Pool::reserve(const ReserveRequest& request, ReserveResult* result) noexcept {
  if (request.n_keys > kMaxBatchKeys) {
    return Status(StatusCode::kBadArgument, "keys: too many in one call",
                  static_cast<std::int64_t>(request.n_keys),
                  static_cast<std::int64_t>(kMaxBatchKeys));
  }
  if (request.record_bytes == 0)
    return Status(StatusCode::kBadArgument, "record_bytes: must be positive");
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (!is_row(request.row)) return Status(StatusCode::kNotFound, "row: not claimed", request.row);
  result->outcomes.assign(request.n_keys, 0);
  result->extents.assign(request.n_keys, ExtentRecord{});
  find(request.keys, request.n_keys);

  // The request's own chain is pinned for its duration: what is present of it, and its parent,
  // through which all ancestors have a descendant that must stay.
  std::vector<std::uint32_t> own;
  std::uint32_t previous = kNoEntry;
  auto refusal = ReserveOutcome::kReserved;
  bool may_evict = policy_->evicts();
  if (request.parent != nullptr) {
    const Key parent = Key::load(request.parent);
    previous = index_.find(parent);
    if (previous != kNoEntry) {
      own.push_back(previous);
    } else if (request.row != 0 && refused_.contains(parent.word[0])) {
      refusal = ReserveOutcome::kParentAbsent;
    } else {
      may_evict &= (load_word(index_.header().flags) & kIndexFlagHasL2) != 0;
    }
  }
  for (const std::uint32_t entry : found_) {
    if (entry != kNoEntry) own.push_back(entry);
  }
  for (const std::uint32_t entry : own)
    pin(entry);

  const std::uint64_t bytes = SlabMap::round_up(request.record_bytes);
  const std::uint64_t row_limit = extents_bytes() / options_.max_session_share;
  std::uint32_t cls = kNoClass;
  if (request.record_bytes > extents_bytes() ||
      request.record_bytes > std::numeric_limits<std::uint32_t>::max()) {
    refusal = ReserveOutcome::kTooLarge;
  }
  Reservation reservation;
  reservation.row = request.row;
  reservation.identity = Key::load(request.identity);
  std::uint64_t relink_budget = kRelinkBudget;
  for (std::size_t i = 0; i < request.n_keys; ++i) {
    const Key key = Key::load(request.keys + i * kKeyBytes);
    std::uint32_t entry = found_[i];
    // An eviction cannot have taken it (pinned), but an earlier item of this request can be the
    // same key.
    if (entry == kNoEntry && reservation.left > 0) entry = index_.find(key);
    if (entry != kNoEntry) {
      const bool in_flight = index_.state(entry) == EntryState::kReserved;
      result->outcomes[i] = static_cast<std::uint8_t>(in_flight ? ReserveOutcome::kInFlight
                                                                : ReserveOutcome::kPresent);
      if (previous != kNoEntry && previous != entry && index_.parent(entry) == kNoEntry &&
          relink_budget > 0 && !is_ancestor(entry, previous, &relink_budget)) {
        add_child(previous, entry);
      }
      previous = entry;
      continue;
    }
    if (refusal == ReserveOutcome::kReserved) {
      refusal = reserve_one(request, key, bytes, row_limit, previous, may_evict, &cls, &entry);
      if (refusal == ReserveOutcome::kChainExceedsPool) {
        refusal = why_no_room(request, own, reservation);
      }
      const bool for_room =
          refusal != ReserveOutcome::kReserved && refusal != ReserveOutcome::kSessionLimit;
      if (for_room && !may_evict && policy_->evicts()) refusal = ReserveOutcome::kParentAbsent;
    }
    if (refusal != ReserveOutcome::kReserved) {
      result->outcomes[i] = static_cast<std::uint8_t>(refusal);
      counters_.refused[static_cast<std::size_t>(refusal)] += 1;
      if (request.row != 0) refused_.add(key.word[0]);  // L2 has what the server itself loads
      previous = kNoEntry;
      continue;
    }
    if (refused_.size() != 0) refused_.erase(key.word[0]);
    reservation.items.resize(request.n_keys, kNoEntry);
    reservation.items[i] = entry;
    reservation.left += 1;
    result->extents[i] = extent_record(entry);
    previous = entry;
  }
  refused_.trim(kRefusedKeys);
  for (const std::uint32_t entry : own)
    unpin(entry, false);
  for (std::size_t i = reservation.items.size(); i-- > 0;) {
    const std::uint32_t entry = reservation.items[i];
    if (entry != kNoEntry) policy_->insert(entry, index_.key(entry).word[0], local_[entry].cls);
  }
  if (reservation.left > 0) {
    result->ticket = next_ticket_++;
    reservations_.emplace(result->ticket, std::move(reservation));
  }
  return Status();
}

// Reserves one key that is not in the pool. kReserved, or why not; kChainExceedsPool stands for "no
// room, whoever takes it".
ReserveOutcome Pool::reserve_one(const ReserveRequest& request, const Key& key, std::uint64_t bytes,
                                 std::uint64_t row_limit, std::uint32_t parent, bool may_evict,
                                 std::uint32_t* cls, std::uint32_t* out) {
  if (reservations_.size() >= kMaxReservations) return ReserveOutcome::kSessionLimit;
  // The server's own loads are bounded where they are begun, adapter by adapter: a hung one must
  // not use up what another one needs.
  const bool is_session = request.row != 0;
  if (is_session && row_bytes_[request.row] != 0 && row_bytes_[request.row] + bytes > row_limit) {
    return ReserveOutcome::kSessionLimit;
  }
  if (!fit_quota(request.tenant, bytes, may_evict)) return ReserveOutcome::kQuota;
  if (*cls == kNoClass) {
    bool recycled = false;
    *cls = slabs_.class_for(bytes, &recycled);
    if (recycled) policy_->forget_class(*cls);
    if (*cls == kNoClass) return ReserveOutcome::kPoolPinned;
  }
  policy_->admit(key.word[0], *cls);
  std::uint32_t entry = take_entry();
  if (entry == kNoEntry) {
    if (may_evict && evict_one_entry()) entry = take_entry();
    if (entry == kNoEntry) return ReserveOutcome::kEntriesFull;
  }
  SlabPlace place;
  if (!make_room(*cls, entry, may_evict, &place)) {
    give_entry(entry);
    return ReserveOutcome::kChainExceedsPool;
  }
  init_local(entry, place);
  ColdEntry& cold = index_.cold(entry);
  set_rows(entry, RowBits{});
  store_word<std::uint64_t>(cold.owner, request.row);
  store_word<std::uint64_t>(cold.tenant, request.tenant);
  std::memcpy(cold.identity, request.identity, sizeof cold.identity);
  stamp_ += 1;
  store_word(cold.stamp, stamp_);
  slabs_.run(place.run).newest = stamp_;
  index_.write_entry(entry, key, place.offset, static_cast<std::uint32_t>(request.record_bytes));
  set_state(entry, EntryState::kReserved);
  used_bytes_ += bytes;
  row_bytes_[request.row] += bytes;
  tenant_charge(entry, 1);
  if (!index_.link(entry, key)) {
    // All lines in reach are full, which takes keys made for it. drop() expects a linked entry.
    tenant_charge(entry, -1);
    release_owner(entry);
    used_bytes_ -= bytes;
    set_state(entry, EntryState::kFree);
    slabs_.free(place.run, place.slot);
    give_entry(entry);
    return ReserveOutcome::kEntriesFull;
  }
  if (parent != kNoEntry) add_child(parent, entry);
  *out = entry;
  return ReserveOutcome::kReserved;
}

// There was no room: who takes most of what cannot be evicted, the request's own chain or others?
ReserveOutcome Pool::why_no_room(const ReserveRequest& request,
                                 const std::vector<std::uint32_t>& own,
                                 const Reservation& reservation) {
  if (!policy_->evicts()) return ReserveOutcome::kPoolPinned;
  std::unordered_set<std::uint32_t> chain(own.begin(), own.end());
  for (const std::uint32_t entry : reservation.items) {
    if (entry != kNoEntry) chain.insert(entry);
  }
  if (request.parent != nullptr && !own.empty()) {
    std::uint32_t steps = 0;
    for (std::uint32_t up = index_.parent(own.front()); up != kNoEntry && steps < kMaxAncestors;
         up = index_.parent(up), ++steps) {
      chain.insert(up);
    }
  }
  if (chain.empty()) return ReserveOutcome::kPoolPinned;
  std::uint64_t own_bytes = 0;
  std::uint64_t own_blocked_bytes = 0;
  for (const std::uint32_t entry : chain) {
    own_bytes += extent_bytes(entry);
    if (local_[entry].is_blocked()) own_blocked_bytes += extent_bytes(entry);
  }
  return own_bytes >= blocked_bytes_ - own_blocked_bytes ? ReserveOutcome::kChainExceedsPool
                                                         : ReserveOutcome::kPoolPinned;
}

Status Pool::commit(std::uint64_t ticket, std::span<const std::uint32_t> indices, bool check,
                    std::uint8_t* outcomes) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::fill_n(outcomes, indices.size(), static_cast<std::uint8_t>(CommitOutcome::kNotReserved));
  auto reservation = reservations_.find(ticket);
  if (reservation == reservations_.end()) return Status();
  std::vector<std::uint32_t> pinned(indices.size(), kNoEntry);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] >= reservation->second.items.size()) continue;
    pinned[i] = reservation->second.items[indices[i]];
    if (pinned[i] != kNoEntry) pin(pinned[i]);
  }
  const Key identity = reservation->second.identity;
  // The headers are read without the lock; the pins keep the extents meanwhile.
  std::vector<std::uint8_t> sound(indices.size(), 1);
  if (check) {
    lock.unlock();
    for (std::size_t i = 0; i < indices.size(); ++i) {
      if (pinned[i] != kNoEntry) sound[i] = record_matches(pinned[i], identity) ? 1 : 0;
    }
    lock.lock();
  }
  reservation = reservations_.find(ticket);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::uint32_t entry = pinned[i];
    if (entry == kNoEntry) continue;
    unpin(entry, false);
    if (is_closed()) continue;
    // Another thread may have ended the item meanwhile, or an earlier index named it too.
    if (reservation == reservations_.end() || reservation->second.items[indices[i]] != entry) {
      free_if_untouched(entry);
      continue;
    }
    reservation->second.items[indices[i]] = kNoEntry;
    reservation->second.left -= 1;
    if (sound[i] != 0) {
      commit_one(entry);
      outcomes[i] = static_cast<std::uint8_t>(CommitOutcome::kCommitted);
    } else {
      // A commit says that the writer has ended, so the extent can go.
      drop(entry, Cause::kAborted);
      counters_.bad_records += 1;
      outcomes[i] = static_cast<std::uint8_t>(CommitOutcome::kBadRecord);
    }
  }
  if (reservation != reservations_.end() && reservation->second.left == 0)
    reservations_.erase(reservation);
  return Status();
}

// Whether the record in the extent is complete as far as its header tells, and is the one that was
// promised.
bool Pool::record_matches(std::uint32_t entry, const Key& identity) const noexcept {
  const std::uint64_t length = index_.length(entry);
  RecordHeader header;
  if (!read_record_header(extents_base_ + index_.offset(entry), length, &header).ok()) return false;
  return Key::load(header.spec.key.data()) == index_.key(entry) &&
         Key::load(header.spec.identity.data()) == identity && header.record_bytes() == length &&
         header.plain() && !header.crc_pending();
}

void Pool::commit_one(std::uint32_t entry) {
  stamp_ += 1;
  store_word(index_.cold(entry).stamp, stamp_);
  slabs_.run(local_[entry].run).newest = stamp_;
  set_state(entry, EntryState::kReady);
  release_owner(entry);
  counters_.inserted_entries += 1;
  counters_.inserted_bytes += extent_bytes(entry);
  emit(EventKind::kInserted, index_.key(entry), extent_bytes(entry));
}

std::uint64_t Pool::abort(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                          bool all) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  const auto found = reservations_.find(ticket);
  if (found == reservations_.end()) return 0;
  Reservation& reservation = found->second;
  std::uint64_t given_back = 0;
  const auto abort_item = [&](std::size_t index) {
    if (index >= reservation.items.size() || reservation.items[index] == kNoEntry) return;
    drop(reservation.items[index], Cause::kAborted);
    reservation.items[index] = kNoEntry;
    reservation.left -= 1;
    given_back += 1;
  };
  if (all) {
    for (std::size_t i = 0; i < reservation.items.size(); ++i)
      abort_item(i);
  } else {
    for (const std::uint32_t index : indices)
      abort_item(index);
  }
  if (reservation.left == 0) reservations_.erase(found);
  return given_back;
}

}  // namespace kvstrata
