// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/entries.h"

#include <algorithm>

namespace kvstrata {

namespace {

// The number that a state adds to EntryLocal::held_back.
int held_back(EntryState state) noexcept {
  return state == EntryState::kReserved || state == EntryState::kQuarantined ? 1 : 0;
}

}  // namespace

Entries::Entries(PoolSegment& segment, SlabMap& slabs, EvictionPolicy& policy) noexcept
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

void Entries::init_local(std::uint32_t entry, const SlabPlace& place, bool tail) noexcept {
  EntryLocal& made = local[entry];
  made = EntryLocal{};
  made.marks = tail ? kMarkTail : 0;
  made.cls = static_cast<std::uint8_t>(slabs.run(place.run).cls);
  made.run = static_cast<std::uint8_t>(place.run);
  made.slot = place.slot;
  made.first_child = made.next_sibling = made.previous_sibling = kNoEntry;
  made.tenant_previous = made.tenant_next = kNoEntry;
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

void Entries::change(std::uint32_t entry, EntryEvent event) noexcept {
  const EntryState from = index.state(entry);
  const EntryState to = kEntryMachine.after(from, event);
  if (from != EntryState::kFree) count_state(entry, from, -1);
  if (to != EntryState::kFree) count_state(entry, to, 1);
  index.set_state(entry, to);
  // A commit is a use: an entry that reached the cold end while it was being written is the newest
  // of all when it is committed.
  change_blockers(entry, event == EntryEvent::kCommit, [&](EntryLocal& changed) {
    changed.held_back =
        static_cast<std::uint8_t>(changed.held_back + held_back(to) - held_back(from));
  });
}

void Entries::adopt(std::uint32_t entry, EntryEvent event) noexcept {
  const std::uint8_t byte = index.state_byte(entry);  // damage may have left anything
  const EntryState from =
      byte < kEntryStateCount ? static_cast<EntryState>(byte) : EntryState::kFree;
  const EntryState to = kEntryMachine.after(from, event);
  index.set_state(entry, to);
  if (to == EntryState::kFree) return;
  count_state(entry, to, 1);
  used_bytes += extent_bytes(entry);
  change_blockers(entry, false, [&](EntryLocal& changed) {
    changed.held_back = static_cast<std::uint8_t>(changed.held_back + held_back(to));
  });
}

void Entries::release(std::uint32_t entry, EntryEvent event) noexcept {
  used_bytes -= extent_bytes(entry);
  change(entry, event);
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

}  // namespace kvstrata
