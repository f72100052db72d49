// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/reservations.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>
#include <utility>

namespace kvstrata {

namespace {

constexpr std::uint64_t kRelinkBudget = 1'000'000;

}  // namespace

void Reservations::reserve(const ReserveRequest& request, ReserveResult* result) {
  IndexView& index = entries.index;
  result->outcomes.assign(request.n_keys, 0);
  result->extents.assign(request.n_keys, ExtentRecord{});
  const std::vector<std::uint32_t>& found = entries.find(request.keys, request.n_keys);

  // The present entries of the request's own chain are pinned meanwhile, and so is its parent:
  // ancestors of a pinned entry stay as well, since they have a descendant.
  std::vector<std::uint32_t> own;
  std::uint32_t previous = kNoEntry;
  auto refusal = ReserveOutcome::kReserved;
  bool may_evict = entries.policy.evicts();
  const bool has_l2 = (load_word(index.header().flags) & kIndexFlagHasL2) != 0;
  if (request.parent != nullptr) {
    const Key parent = Key::load(request.parent);
    previous = index.find(parent);
    if (previous != kNoEntry && !entries.is_of(previous, request.identity)) previous = kNoEntry;
    if (previous != kNoEntry) {
      own.push_back(previous);
    } else if (request.row != 0 && refused.contains(parent)) {
      refusal = ReserveOutcome::kParentAbsent;
    } else {
      may_evict &= has_l2;
    }
  }
  for (const std::uint32_t entry : found) {
    if (entry != kNoEntry && entries.is_of(entry, request.identity)) own.push_back(entry);
  }
  for (const std::uint32_t entry : own)
    entries.pin(entry);

  const std::uint64_t bytes =
      SlabMap::round_up(std::max(request.record_bytes, request.extent_bytes));
  std::uint32_t cls = kNoClass;
  if (bytes > extents_bytes || request.record_bytes > std::numeric_limits<std::uint32_t>::max()) {
    refusal = ReserveOutcome::kTooLarge;
  }
  Reservation reservation;
  reservation.row = request.row;
  reservation.identity = Key::load(request.identity);
  std::uint64_t relink_budget = kRelinkBudget;
  // No chunk of the request is worth less than this; below zero: not known yet.
  float worth = has_l2 || request.row == 0 ? std::numeric_limits<float>::infinity() : -1;
  for (std::size_t i = 0; i < request.n_keys; ++i) {
    const Key key = Key::load(request.keys + i * kKeyBytes);
    std::uint32_t entry = found[i];
    // Present entries are pinned, so none was evicted; but an earlier item of this request may have
    // had the same key.
    if (entry == kNoEntry && reservation.left > 0) entry = index.find(key);
    bool is_foreign = entry != kNoEntry && !entries.is_of(entry, request.identity);
    if (is_foreign) {
      entry = index.find(key);  // it is not pinned, so it may have been evicted meanwhile
      is_foreign = entry != kNoEntry && !entries.is_of(entry, request.identity);
    }
    if (is_foreign) {
      if (refusal == ReserveOutcome::kReserved) refusal = ReserveOutcome::kEntriesFull;
    } else if (entry != kNoEntry) {
      const bool in_flight = index.state(entry) == EntryState::kReserved;
      result->outcomes[i] = static_cast<std::uint8_t>(in_flight ? ReserveOutcome::kInFlight
                                                                : ReserveOutcome::kPresent);
      if (previous != kNoEntry && previous != entry && index.parent(entry) == kNoEntry &&
          relink_budget > 0 && !family.is_ancestor(entry, previous, &relink_budget)) {
        family.add(previous, entry);
      }
      previous = entry;
      continue;
    }
    if (refusal == ReserveOutcome::kReserved) {
      if (worth < 0) worth = best_worth(request, i, depth_below(previous));
      refusal = reserve_one(request, key, bytes, previous, may_evict, worth, &cls, &entry);
      if (refusal == ReserveOutcome::kChainExceedsPool) {
        refusal = why_no_room(request, own, reservation);
      }
      const bool for_room = refusal != ReserveOutcome::kReserved &&
                            refusal != ReserveOutcome::kSessionLimit &&
                            refusal != ReserveOutcome::kWorthLess;
      if (for_room && !may_evict && entries.policy.evicts())
        refusal = ReserveOutcome::kParentAbsent;
    }
    if (refusal != ReserveOutcome::kReserved) {
      result->outcomes[i] = static_cast<std::uint8_t>(refusal);
      counts.refused[static_cast<std::size_t>(refusal)] += 1;
      if (refusal == ReserveOutcome::kWorthLess) entries.policy.refused(key.word[0]);
      if (request.row != 0) refused.add(key);  // chunks that the server loads are in L2
      previous = kNoEntry;
      continue;
    }
    refused.erase(key);
    reservation.items.resize(request.n_keys, kNoEntry);
    reservation.items[i] = entry;
    reservation.left += 1;
    result->extents[i] = entries.extent_record(entry);
    previous = entry;
  }
  for (const std::uint32_t entry : own)
    entries.unpin(entry);
  for (std::size_t i = reservation.items.size(); i-- > 0;) {
    const std::uint32_t entry = reservation.items[i];
    if (entry != kNoEntry) entries.policy.insert(entry);
  }
  if (reservation.left > 0) {
    result->ticket = next_ticket++;
    reservations.emplace(result->ticket, std::move(reservation));
  }
}

std::size_t Reservations::depth_below(std::uint32_t parent) const noexcept {
  return parent == kNoEntry ? 0 : entries.local[parent].traits.depth + std::size_t{1};
}

float Reservations::best_worth(const ReserveRequest& request, std::size_t first,
                               std::size_t depth) const noexcept {
  float best = 0;
  const std::uint8_t model = entries.policy.model_of(Key::load(request.identity).word[0]);
  for (std::size_t i = first; i < request.n_keys; ++i) {
    const Key key = Key::load(request.keys + i * kKeyBytes);
    const Traits traits = entries.policy.traits_of_new(key.word[0], depth + i - first, model);
    best = std::max(best, entries.policy.worth_of_new(traits));
  }
  return best;
}

ReserveOutcome Reservations::reserve_one(const ReserveRequest& request, const Key& key,
                                         std::uint64_t bytes, std::uint32_t parent, bool may_evict,
                                         float worth, std::uint32_t* cls, std::uint32_t* out) {
  if (reservations.size() >= kMaxReservations) return ReserveOutcome::kSessionLimit;
  // The server's own loads are bounded for each adapter, before they come here: a hung adapter must
  // not use up the share of another.
  const bool is_session = request.row != 0;
  if (is_session && rows.bytes[request.row] != 0 && rows.bytes[request.row] + bytes > row_limit) {
    return ReserveOutcome::kSessionLimit;
  }
  const Room::Claim claim = room.claim(request.tenant, bytes, may_evict, worth);
  const auto refusal = [](Room::Made made, ReserveOutcome none) {
    return made == Room::Made::kWorthLess   ? ReserveOutcome::kWorthLess
           : made == Room::Made::kProtected ? ReserveOutcome::kQuota
                                            : none;
  };
  if (*cls == kNoClass) {
    bool recycled = false;
    *cls = room.slabs.class_for(bytes, &recycled);
    if (recycled) entries.policy.forget_class(*cls);
    if (*cls == kNoClass) return ReserveOutcome::kPoolPinned;
  }
  std::uint32_t entry = entries.take();
  if (entry == kNoEntry) {
    const Room::Made made = may_evict ? room.evict_one_entry(claim) : Room::Made::kNone;
    if (made == Room::Made::kPlace) entry = entries.take();
    if (entry == kNoEntry) return refusal(made, ReserveOutcome::kEntriesFull);
  }
  SlabPlace place;
  const Room::Made made = room.make(*cls, entry, claim, &place);
  if (made != Room::Made::kPlace) {
    entries.give(entry);
    return refusal(made, ReserveOutcome::kChainExceedsPool);
  }
  const std::uint8_t model = entries.policy.model_of(Key::load(request.identity).word[0]);
  Traits traits = entries.policy.traits_of_new(key.word[0], depth_below(parent), model);
  traits.is_tail = request.tail ? 1 : 0;
  traits.was_loaded = request.row == 0 ? 1 : 0;
  entries.init_local(entry, place, traits, entries.policy.now());
  entries.store_use(entry);
  ColdEntry& cold = entries.index.cold(entry);
  rows.set_rows(entry, RowBits{});
  store_word<std::uint64_t>(cold.owner, request.row);
  store_word<std::uint64_t>(cold.tenant, request.tenant);
  std::memcpy(cold.identity, request.identity, sizeof cold.identity);
  entries.renew(entry);
  entries.index.write_entry(entry, key, place.offset,
                            static_cast<std::uint32_t>(request.record_bytes));
  entries.change(entry, EntryState::kReserved);
  entries.used_bytes += bytes;
  rows.bytes[request.row] += bytes;
  if (!entries.index.link(entry, key)) {
    // All lines in reach are full, which happens only with keys that were chosen to collide. The
    // entry is not linked, so Departures::leave cannot be used.
    rows.release_owner(entry);
    entries.release(entry);
    return ReserveOutcome::kEntriesFull;
  }
  if (parent != kNoEntry) family.add(parent, entry);
  departures.tenants.add(entry);
  *out = entry;
  return ReserveOutcome::kReserved;
}

ReserveOutcome Reservations::why_no_room(const ReserveRequest& request,
                                         const std::vector<std::uint32_t>& own,
                                         const Reservation& reservation) {
  if (!entries.policy.evicts()) return ReserveOutcome::kPoolPinned;
  std::unordered_set<std::uint32_t> chain(own.begin(), own.end());
  for (const std::uint32_t entry : reservation.items) {
    if (entry != kNoEntry) chain.insert(entry);
  }
  if (request.parent != nullptr && !own.empty()) {
    family.each_ancestor(own.front(), [&](std::uint32_t up) { chain.insert(up); });
  }
  if (chain.empty()) return ReserveOutcome::kPoolPinned;
  std::uint64_t own_bytes = 0;
  std::uint64_t own_blocked_bytes = 0;
  for (const std::uint32_t entry : chain) {
    own_bytes += entries.extent_bytes(entry);
    if (entries.local[entry].is_blocked()) own_blocked_bytes += entries.extent_bytes(entry);
  }
  return own_bytes >= entries.blocked_bytes - own_blocked_bytes ? ReserveOutcome::kChainExceedsPool
                                                                : ReserveOutcome::kPoolPinned;
}

bool Reservations::begin_commit(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                                std::vector<std::uint32_t>* pinned, Key* identity) {
  const auto found = reservations.find(ticket);
  if (found == reservations.end()) return false;
  const Reservation& reservation = found->second;
  pinned->assign(indices.size(), kNoEntry);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] >= reservation.items.size()) continue;
    const std::uint32_t entry = (*pinned)[i] = reservation.items[indices[i]];
    if (entry != kNoEntry) entries.pin(entry);
  }
  *identity = reservation.identity;
  return true;
}

void Reservations::end_commit(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                              const std::vector<std::uint32_t>& pinned,
                              const std::vector<std::uint32_t>& lengths, std::uint8_t* outcomes) {
  const auto reservation = reservations.find(ticket);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::uint32_t entry = pinned[i];
    if (entry == kNoEntry) continue;
    entries.unpin(entry);
    // Another thread may have ended the item meanwhile, or an earlier index named it too.
    if (reservation == reservations.end() || reservation->second.items[indices[i]] != entry) {
      departures.settle(entry);
      continue;
    }
    reservation->second.items[indices[i]] = kNoEntry;
    reservation->second.left -= 1;
    if (lengths.empty() || may_have_length(entry, reservation->second.row, lengths[i])) {
      if (!lengths.empty()) entries.set_length(entry, lengths[i]);
      commit_one(entry);
      outcomes[i] = static_cast<std::uint8_t>(CommitOutcome::kCommitted);
    } else {
      // A commit says that the writer has ended, so the extent can go.
      departures.leave(entry, Cause::kAborted);
      counts.bad_records += 1;
      outcomes[i] = static_cast<std::uint8_t>(CommitOutcome::kBadRecord);
    }
  }
  if (reservation != reservations.end() && reservation->second.left == 0)
    reservations.erase(reservation);
}

bool Reservations::may_have_length(std::uint32_t entry, std::uint32_t row,
                                   std::uint32_t length) const {
  const std::uint32_t reserved = entries.index.length(entry);
  if (row != 0 || length == 0) return length == reserved;
  return entries.local[entry].is_tail() || SlabMap::round_up(length) == SlabMap::round_up(reserved);
}

void Reservations::commit_one(std::uint32_t entry) {
  const std::uint64_t bytes = entries.extent_bytes(entry);
  entries.renew(entry);
  entries.change(entry, EntryState::kReady);
  rows.release_owner(entry);
  counts.inserted_entries += 1;
  counts.inserted_bytes += bytes;
  departures.changes.note(0, Change::kCame, entries.index.key(entry).word[0]);
}

std::uint64_t Reservations::abort(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                                  bool all) {
  const auto found = reservations.find(ticket);
  if (found == reservations.end()) return 0;
  Reservation& reservation = found->second;
  std::uint64_t given_back = 0;
  const auto abort_item = [&](std::size_t index) {
    if (index >= reservation.items.size() || reservation.items[index] == kNoEntry) return;
    departures.leave(reservation.items[index], Cause::kAborted);
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
  if (reservation.left == 0) reservations.erase(found);
  return given_back;
}

std::uint32_t Reservations::item(std::uint64_t ticket, std::uint64_t index) const {
  const auto found = reservations.find(ticket);
  if (found == reservations.end() || index >= found->second.items.size()) return kNoEntry;
  return found->second.items[index];
}

void Reservations::end_row(std::uint32_t row) {
  for (auto reservation = reservations.begin(); reservation != reservations.end();) {
    if (reservation->second.row != row) {
      ++reservation;
      continue;
    }
    for (const std::uint32_t entry : reservation->second.items) {
      if (entry != kNoEntry) departures.leave(entry, Cause::kAborted);
    }
    reservation = reservations.erase(reservation);
  }
}

}  // namespace kvstrata
