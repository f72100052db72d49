// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/entries.h"

#include <algorithm>
#include <vector>

namespace kvstrata {

Status PoolSegment::back_index(int index_fd, std::uint64_t file_bytes, std::uint64_t head_bytes,
                               std::uint64_t cold_offset, std::uint64_t cold_bytes) {
  if (index_backing.bytes() == 0)
    KVSTRATA_RETURN_IF_ERROR(index_backing.attach(index_fd, file_bytes));
  if (index_backing.ensure(0, head_bytes) && index_backing.ensure(cold_offset, cold_bytes))
    return Status();
  return Status(StatusCode::kOsError, "the file system has no memory for the index",
                index_backing.error());
}

Status PoolSegment::map_index(int index_fd, std::uint64_t file_bytes) {
  return Mapping::map(index_fd, file_bytes, true, true, &index_mapping);
}

Status PoolSegment::open_extents(int extents_fd) {
  const std::uint64_t extents_bytes = index.header().extents_bytes;
  KVSTRATA_RETURN_IF_ERROR(Mapping::map(extents_fd, extents_bytes, true, true, &extents_mapping));
  KVSTRATA_RETURN_IF_ERROR(extents_backing.attach(extents_fd, extents_bytes));
  return Mapping::anonymous(index.capacity() * sizeof(EntryLocal), &local_mapping);
}

namespace {

// The number that a state adds to EntryLocal::held_back.
int held_back(EntryState state) noexcept {
  return state == EntryState::kReserved || state == EntryState::kQuarantined ? 1 : 0;
}

// See Entries::change.
bool may_follow(EntryState from, EntryState to) noexcept {
  using enum EntryState;
  switch (from) {
    case kFree:
      return to == kReserved;
    case kReserved:
    case kUnverified:
      return to == kReady || to == kFree || to == kQuarantined;
    case kReady:
      return to == kFree || to == kQuarantined;
    case kQuarantined:
      return to == kFree;
  }
  return false;
}

}  // namespace

Entries::Entries(PoolSegment& segment, SlabMap& slabs, Value& policy) noexcept
    : segment(segment),
      slabs(slabs),
      policy(policy),
      index(segment.index),
      local(segment.local()) {}

const std::vector<std::uint32_t>& Entries::find(const std::uint8_t* keys, std::size_t n_keys) {
  found.resize(n_keys);
  index.find_batch(keys, n_keys, found.data(), local, sizeof(EntryLocal));
  return found;
}

std::uint32_t Entries::take() noexcept {
  if (!free.empty()) {
    const std::uint32_t entry = free.back();
    free.pop_back();
    return entry;
  }
  if (touched >= index.capacity()) return kNoEntry;
  const auto entry = static_cast<std::uint32_t>(touched);
  const auto offset_of = [&](const void* address) {
    return static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(address) -
                                      static_cast<std::uint8_t*>(segment.index_mapping.address()));
  };
  if (!segment.index_backing.ensure(offset_of(&index.hot(entry)), sizeof(HotEntry)) ||
      !segment.index_backing.ensure(offset_of(&index.cold(entry)), sizeof(ColdEntry))) {
    return kNoEntry;
  }
  touched += 1;
  store_word(index.header().entries_touched, touched);
  return entry;
}

void Entries::init_local(std::uint32_t entry, const SlabPlace& place, Traits traits,
                         std::uint32_t used_at) noexcept {
  EntryLocal& made = local[entry];
  made = EntryLocal{};
  made.traits = traits;
  made.used_at = used_at;
  made.cls = static_cast<std::uint8_t>(slabs.run(place.run).cls);
  made.run = static_cast<std::uint8_t>(place.run);
  made.slot = place.slot;
  made.first_child = made.next_sibling = made.previous_sibling = kNoEntry;
}

void Entries::count_state(std::uint32_t entry, EntryState state, int sign) noexcept {
  const auto at = static_cast<std::size_t>(state);
  counts.entries[at] += static_cast<std::uint64_t>(sign);
  counts.bytes[at] += static_cast<std::uint64_t>(sign) * extent_bytes(entry);
  if (!local[entry].is_tail()) return;
  tails.tail_entries += static_cast<std::uint64_t>(sign);
  tails.tail_record_bytes += static_cast<std::uint64_t>(sign) * index.length(entry);
  tails.tail_extent_bytes += static_cast<std::uint64_t>(sign) * extent_bytes(entry);
}

void Entries::set_length(std::uint32_t entry, std::uint32_t length) noexcept {
  if (local[entry].is_tail())
    tails.tail_record_bytes += std::uint64_t{length} - index.length(entry);
  index.set_length(entry, length);
}

void Entries::change(std::uint32_t entry, EntryState to) noexcept {
  const EntryState from = index.state(entry);
  assert(may_follow(from, to));
  if (from != EntryState::kFree) count_state(entry, from, -1);
  if (to != EntryState::kFree) count_state(entry, to, 1);
  index.set_state(entry, to);
  // A commit is a use: an entry that reached the cold end while it was being written is the newest
  // of all when it is committed.
  const bool commits = from == EntryState::kReserved && to == EntryState::kReady;
  change_blockers(entry, commits, [&](EntryLocal& changed) {
    changed.held_back =
        static_cast<std::uint8_t>(changed.held_back + held_back(to) - held_back(from));
  });
}

void Entries::adopt(std::uint32_t entry, EntryState to) noexcept {
  index.set_state(entry, to);
  if (to == EntryState::kFree) return;
  count_state(entry, to, 1);
  used_bytes += extent_bytes(entry);
  change_blockers(entry, false, [&](EntryLocal& changed) {
    changed.held_back = static_cast<std::uint8_t>(changed.held_back + held_back(to));
  });
}

void Entries::release(std::uint32_t entry) noexcept {
  used_bytes -= extent_bytes(entry);
  change(entry, EntryState::kFree);
  slabs.free(local[entry].run, local[entry].slot);
  give(entry);
}

std::uint64_t Entries::ready_tags(std::uint64_t from, std::uint64_t max_entries,
                                  std::vector<std::uint64_t>* tags) const {
  if (from >= touched) return 0;
  const std::uint64_t end = from + std::min(max_entries, touched - from);
  for (auto entry = static_cast<std::uint32_t>(from); entry < end; ++entry) {
    if (index.state(entry) == EntryState::kReady) tags->push_back(index.key(entry).word[0]);
  }
  return end < touched ? end : 0;
}

void Family::add(std::uint32_t parent, std::uint32_t child) noexcept {
  EntryLocal* const local = entries.local;
  EntryLocal& up = local[parent];
  EntryLocal& down = local[child];
  entries.index.set_parent(child, parent);
  down.previous_sibling = kNoEntry;
  down.next_sibling = up.first_child;
  if (up.first_child != kNoEntry) local[up.first_child].previous_sibling = child;
  up.first_child = child;
  up.children += 1;
  if (up.children == 2) entries.policy.branch(parent);
}

void Family::leave_parent(std::uint32_t entry) noexcept {
  EntryLocal* const local = entries.local;
  const std::uint32_t parent = entries.index.parent(entry);
  if (parent == kNoEntry) return;
  EntryLocal& up = local[parent];
  EntryLocal& down = local[entry];
  if (down.previous_sibling != kNoEntry) {
    local[down.previous_sibling].next_sibling = down.next_sibling;
  } else {
    up.first_child = down.next_sibling;
  }
  if (down.next_sibling != kNoEntry)
    local[down.next_sibling].previous_sibling = down.previous_sibling;
  down.next_sibling = down.previous_sibling = kNoEntry;
  entries.index.set_parent(entry, kNoEntry);
  up.children -= 1;
  if (up.is_victim()) entries.policy.unblocked(parent, false);
}

void Family::orphan_children(std::uint32_t entry) noexcept {
  EntryLocal* const local = entries.local;
  EntryLocal& left = local[entry];
  for (std::uint32_t child = left.first_child; child != kNoEntry;) {
    const std::uint32_t next = local[child].next_sibling;
    entries.index.set_parent(child, kNoEntry);
    local[child].next_sibling = local[child].previous_sibling = kNoEntry;
    child = next;
  }
  left.first_child = kNoEntry;
  left.children = 0;
}

bool Family::is_ancestor(std::uint32_t candidate, std::uint32_t entry,
                         std::uint64_t* budget) const noexcept {
  for (std::uint32_t at = entry; at != kNoEntry; at = entries.index.parent(at)) {
    if (at == candidate || *budget == 0) return true;
    *budget -= 1;
  }
  return false;
}

void Tenants::add(std::uint32_t entry) {
  Account& account = accounts[entries.tenant(entry)];
  entries.local[entry].order = account.order;
  account.bytes += entries.extent_bytes(entry);
  account.n_entries += 1;
}

void Tenants::remove(std::uint32_t entry) {
  const std::uint32_t id = entries.tenant(entry);
  Account& account = accounts[id];
  account.bytes -= entries.extent_bytes(entry);
  account.n_entries -= 1;
  drop_if_idle(id);
}

void Tenants::drop_if_idle(std::uint32_t id) {
  const Account& account = accounts[id];
  if (account.bytes != 0 || account.quota_bytes >= 0) return;
  if (account.order != 0) of_order[account.order] = nullptr;
  accounts.erase(id);
}

bool Tenants::set_quota(std::uint32_t id, std::int64_t bytes) {
  const auto unused = std::find(of_order.begin() + 1, of_order.end(), nullptr);
  Account& account = accounts[id];
  if (bytes >= 0 && account.order == 0) {
    if (unused == of_order.end() && of_order.size() > kMaxQuotas) {
      drop_if_idle(id);
      return false;
    }
    account.order = static_cast<std::uint16_t>(unused - of_order.begin());
    if (unused == of_order.end()) {
      of_order.push_back(&account);
      entries.policy.add_order();
    } else {
      *unused = &account;
    }
    const IndexView& index = entries.index;
    std::vector<std::uint32_t> members;
    for (std::uint32_t entry = 0; entry < entries.touched && members.size() < account.n_entries;
         ++entry) {
      const EntryState state = index.state(entry);
      if (state == EntryState::kFree || state == EntryState::kQuarantined) continue;
      if (entries.tenant(entry) == id) members.push_back(entry);
    }
    std::sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
      return load_word(index.cold(a).stamp) < load_word(index.cold(b).stamp);
    });
    for (const std::uint32_t entry : members)
      entries.policy.move(entry, account.order);
  }
  account.quota_bytes = bytes < 0 ? -1 : bytes;
  drop_if_idle(id);
  return true;
}

}  // namespace kvstrata
