// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/checks.h"

#include <cstring>

#include "record/record.h"

namespace kvstrata {

namespace {

bool is_promised(const std::uint8_t* record, std::uint64_t length, const Key& key,
                 const Key& identity) noexcept {
  RecordHeader header;
  if (!read_record_header(record, length, &header).ok()) return false;
  return Key::load(header.spec.key.data()) == key &&
         Key::load(header.spec.identity.data()) == identity && header.record_bytes() == length &&
         header.plain() && !header.crc_pending();
}

// `identity`: the first bytes of a root, as an entry has them.
bool is_of_identity(const std::uint8_t* record, std::uint64_t length,
                    const std::uint8_t (&identity)[sizeof(ColdEntry::identity)]) noexcept {
  RecordHeader header;
  return read_record_header(record, length, &header).ok() &&
         std::memcmp(header.spec.identity.data(), identity, sizeof identity) == 0;
}

}  // namespace

std::vector<std::uint8_t> Checks::match(Lock& lock, const std::vector<std::uint32_t>& pinned,
                                        const Key& identity) const {
  IndexView& index = entries.index;
  std::vector<std::uint8_t> sound(pinned.size(), 1);
  lock.unlock();
  for (std::size_t i = 0; i < pinned.size(); ++i) {
    const std::uint32_t entry = pinned[i];
    if (entry == kNoEntry) continue;
    sound[i] = is_promised(entries.address(entry), index.length(entry), index.key(entry), identity);
  }
  lock.lock();
  return sound;
}

void Checks::verify(Lock& lock, const std::vector<std::uint32_t>& pinned, std::uint64_t* good,
                    std::uint64_t* bad) {
  IndexView& index = entries.index;
  for (const std::uint32_t entry : pinned) {
    Digest key;
    index.key(entry).store(key.data());
    const std::uint8_t* address = entries.address(entry);
    const std::uint64_t length = index.length(entry);
    std::uint8_t identity[sizeof(ColdEntry::identity)];
    std::memcpy(identity, index.cold(entry).identity, sizeof identity);
    lock.unlock();
    const bool sound =
        verify_record(address, length, &key).ok() && is_of_identity(address, length, identity);
    lock.lock();
    *(sound ? good : bad) += 1;
    entries.unpin(entry);
    if (closed.load(std::memory_order_acquire)) continue;
    const EntryState state = index.state(entry);
    if (sound && state == EntryState::kUnverified) {
      entries.change(entry, EntryEvent::kVerify);
      departures.events.emit(EventKind::kVerified, index.key(entry), length);
    } else if (!sound && (state == EntryState::kUnverified || state == EntryState::kReady)) {
      departures.leave(entry, Cause::kCorrupt);
    } else {
      departures.settle(entry);
    }
  }
}

std::vector<std::uint32_t> Checks::pin_unverified(const std::vector<std::uint32_t>& found) {
  std::vector<std::uint32_t> pinned;
  for (const std::uint32_t entry : found) {
    if (entry == kNoEntry || entries.index.state(entry) != EntryState::kUnverified) continue;
    entries.pin(entry);
    pinned.push_back(entry);
  }
  return pinned;
}

std::vector<std::uint32_t> Checks::pin_next(std::uint64_t max_bytes) {
  std::vector<std::uint32_t> pinned;
  std::uint64_t bytes = 0;
  while (!queue.empty() && (bytes < max_bytes || pinned.empty())) {
    const std::uint32_t entry = queue.back();
    queue.pop_back();
    if (entries.index.state(entry) != EntryState::kUnverified) continue;
    bytes += entries.index.length(entry);
    entries.pin(entry);
    pinned.push_back(entry);
  }
  return pinned;
}

}  // namespace kvstrata
