// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log's index, a map from keys to the places of their records. Open addressing with linear
// probing, in 64 shards, so that growing one shard copies a small part of the index. Not
// thread-safe. Keys are digests, so their own bits are the hash.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kvstrata/digest.h"

namespace kvstrata {

// Where a record lies. `sequence` distinguishes two copies of one record.
struct DiskPlace {
  std::uint64_t sequence = 0;
  std::uint32_t segment = 0;
  std::uint32_t block = 0;  // of its frame, from the start of the segment's file
  std::uint32_t record_bytes = 0;
  // Finder::uses() at the last use from this place; 0: it was never used.
  std::uint32_t used = 0;
  std::uint64_t parent = 0;  // the first eight bytes of the parent's key; 0: none is known
};

class DiskIndex {
 public:
  struct Entry {
    Digest key{};
    DiskPlace place;  // sequence 0: the slot is free
  };

  DiskIndex() : shards_(kShards) {}

  // The first eight bytes of a key.
  static std::uint64_t hash(const Digest& key) noexcept {
    std::uint64_t bits;
    std::memcpy(&bits, key.data(), sizeof(bits));
    return bits;
  }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  // The place of the key's record, or nullptr. Valid until the index changes.
  [[nodiscard]] DiskPlace* find(const Digest& key) noexcept {
    Entry* const found = probe(hash(key), [&](const Entry& entry) { return entry.key == key; });
    return found == nullptr ? nullptr : &found->place;
  }

  // The same for a key of which only the first eight bytes are known.
  [[nodiscard]] DiskPlace* find(std::uint64_t bits) noexcept {
    Entry* const found = probe(bits, [&](const Entry& entry) { return hash(entry.key) == bits; });
    return found == nullptr ? nullptr : &found->place;
  }

  // The entry of the record that lies at this segment and block, given the first eight bytes of its
  // key; or nullptr. Valid until the index changes.
  [[nodiscard]] const Entry* find_at(std::uint32_t hash_low, std::uint32_t hash_high,
                                     std::uint32_t segment, std::uint32_t block) noexcept {
    return probe(std::uint64_t{hash_high} << 32 | hash_low, [&](const Entry& entry) {
      return entry.place.segment == segment && entry.place.block == block;
    });
  }

  // See Connector::list(). A cursor holds a shard, the shard's size, and a home slot in it. A shard
  // that has grown since is listed again from its start, because its keys have other homes. A key
  // is listed at its home slot, however far from there it lies.
  std::uint64_t list(std::uint64_t cursor, std::size_t most, std::vector<Digest>* keys) const {
    constexpr int kShardShift = 56;
    constexpr int kSizeShift = 48;
    const std::size_t before = keys->size();
    std::size_t looked = 0;
    std::size_t at_home = cursor & ((std::uint64_t{1} << kSizeShift) - 1);
    std::uint64_t size_then = cursor >> kSizeShift & 0xff;
    for (std::size_t number = cursor >> kShardShift; number < kShards; ++number) {
      const Shard& shard = shards_[number];
      const auto size_now = static_cast<std::uint64_t>(std::countr_zero(shard.slots.size()));
      if (size_now != size_then) at_home = 0;
      for (; at_home < shard.slots.size(); ++at_home) {
        const std::uint64_t here = std::uint64_t{number} << kShardShift | size_now << kSizeShift |
                                   static_cast<std::uint64_t>(at_home);
        const std::size_t so_far = keys->size();
        if (so_far - before == most || looked > kLookedPerKey * most) return here;
        const std::size_t mask = shard.slots.size() - 1;
        for (std::size_t at = at_home; shard.slots[at].place.sequence != 0; at = (at + 1) & mask) {
          looked += 1;
          if (home(shard.slots[at].key, shard) == at_home) keys->push_back(shard.slots[at].key);
        }
        looked += 1;
        if (keys->size() - before > most && so_far > before) {
          keys->resize(so_far);
          return here;
        }
      }
      at_home = 0;
      size_then = 0;
    }
    return 0;
  }

  // Adds the key, or replaces its place. REQUIRES: place.sequence > 0.
  void set(const Digest& key, const DiskPlace& place) {
    if (DiskPlace* const found = find(key)) {
      *found = place;
      return;
    }
    Shard& shard = shards_[shard_of(key)];
    if ((shard.used + 1) * 4 > shard.slots.size() * 3) grow(shard);
    insert(shard, Entry{key, place});
    ++shard.used;
    ++size_;
  }

  bool erase(const Digest& key) noexcept {
    Shard& shard = shards_[shard_of(key)];
    if (shard.slots.empty()) return false;
    const std::size_t mask = shard.slots.size() - 1;
    std::size_t hole = home(key, shard);
    while (shard.slots[hole].place.sequence != 0 && shard.slots[hole].key != key)
      hole = (hole + 1) & mask;
    if (shard.slots[hole].place.sequence == 0) return false;
    // An entry behind the hole moves into the hole, unless its home lies between the two.
    for (std::size_t at = (hole + 1) & mask; shard.slots[at].place.sequence != 0;
         at = (at + 1) & mask) {
      const std::size_t wanted = home(shard.slots[at].key, shard);
      if (((at - wanted) & mask) >= ((at - hole) & mask)) {
        shard.slots[hole] = shard.slots[at];
        hole = at;
      }
    }
    shard.slots[hole].place.sequence = 0;
    --shard.used;
    --size_;
    return true;
  }

  void swap(DiskIndex& other) noexcept {
    shards_.swap(other.shards_);
    std::swap(size_, other.size_);
  }

 private:
  static constexpr std::size_t kShards = 64;
  // Slots that one call of list() visits for each key that it may name.
  static constexpr std::size_t kLookedPerKey = 16;

  struct Shard {
    std::vector<Entry> slots;  // a power of two of them, or none
    std::size_t used = 0;
  };

  template <typename Is>
  [[nodiscard]] Entry* probe(std::uint64_t bits, Is&& is) noexcept {
    Shard& shard = shards_[bits % kShards];
    if (shard.slots.empty()) return nullptr;
    const std::size_t mask = shard.slots.size() - 1;
    for (std::size_t at = (bits / kShards) & mask; shard.slots[at].place.sequence != 0;
         at = (at + 1) & mask) {
      if (is(shard.slots[at])) return &shard.slots[at];
    }
    return nullptr;
  }

  static std::size_t shard_of(const Digest& key) noexcept { return hash(key) % kShards; }
  static std::size_t home(const Digest& key, const Shard& shard) noexcept {
    return (hash(key) / kShards) & (shard.slots.size() - 1);
  }

  static void insert(Shard& shard, const Entry& entry) noexcept {
    std::size_t at = home(entry.key, shard);
    while (shard.slots[at].place.sequence != 0)
      at = (at + 1) & (shard.slots.size() - 1);
    shard.slots[at] = entry;
  }

  static void grow(Shard& shard) {
    Shard larger;
    larger.slots.resize(shard.slots.empty() ? 16 : 2 * shard.slots.size());
    larger.used = shard.used;
    for (const Entry& entry : shard.slots)
      if (entry.place.sequence != 0) insert(larger, entry);
    shard = std::move(larger);
  }

  std::vector<Shard> shards_;
  std::uint64_t size_ = 0;
};

}  // namespace kvstrata
