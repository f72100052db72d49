// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Finding and loading records of a disk log: the index in memory, and the keys of running puts.
//
// Invariants
//  1. A record gets into the index only when its frame is synced, and only if its segment is then
//     neither retiring nor gone.
//  2. Of two frames of one key, the frame with the higher sequence counts. A record never gets into
//     the index if a tombstone for its key was placed after its frame and before its publication.
//
// REQUIRES, for every call: Shared::mutex is held.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/key_hash.h"
#include "disk/frames.h"
#include "disk/index.h"
#include "disk/segments.h"
#include "kvstrata/connector.h"

namespace kvstrata::disk {

class Finder {
 public:
  Finder(Shared& shared, Segments& segments) : shared_(shared), segments_(segments) {}

  [[nodiscard]] const DiskPlace* find(const Digest& key) noexcept { return index_.find(key); }
  // The entry of the record that was published at this place, or nullptr if the index has another
  // record of the key or none. Valid until the index changes.
  [[nodiscard]] const DiskIndex::Entry* find_at(const Segment& segment,
                                                const FramePlace& place) noexcept {
    return index_.find_at(place.hash_low, place.hash_high, segment.number, place.block);
  }
  [[nodiscard]] std::uint64_t size() const noexcept { return index_.size(); }
  [[nodiscard]] std::uint64_t live_bytes() const noexcept { return live_bytes_; }
  // The number of all uses, modulo 2^32 and never 0 after the first use. DiskPlace::used is the
  // value at the record's last use.
  [[nodiscard]] std::uint32_t uses() const noexcept { return uses_; }

  // See Connector.
  void exists(std::span<ExistsItem> items) noexcept;
  std::uint64_t list(std::uint64_t cursor, std::size_t most, std::vector<Digest>* keys) const;
  // Loads the item; `copy` is then the sequence of the frame that was read. Unlocks the mutex.
  // True: the frame is no longer at its place, and the caller must remove this copy.
  [[nodiscard]] bool load(Lock& lock, LoadItem& item) noexcept;

  // A load of a record, and a put of its child, use the record and its ancestors. If the nearest of
  // these was used shortly before, they are left as they are, and the record counts as used then.
  // `key`: the first eight bytes of its key; nothing happens if it has no record.
  void used(std::uint64_t key) noexcept;

  // -- running puts: their frames have places and are not published yet

  void begin_put(const Digest& key) { putting_.emplace(key, 0); }
  void end_put(const Digest& key) { putting_.erase(key); }
  [[nodiscard]] bool is_being_put(const Digest& key) const { return putting_.contains(key); }

  // Puts a synced record into the index, or reports the record as evicted if its segment is
  // retiring or gone.
  void publish(const PlacedFrame& placed);

  // -- records that leave

  // Takes the key out of the index, and prevents the publication of a running put of the key, on
  // behalf of a tombstone with this sequence. False: the key has no record and no running put, or
  // this tombstone has prevented the put's publication already.
  bool remove(const Digest& key, std::uint64_t tombstone);
  // Does the same for all keys. Returns the old index, which the caller frees without the mutex.
  [[nodiscard]] DiskIndex remove_all(std::uint64_t tombstone);
  // Takes the record at this place of a retiring segment out of the index, if it is still there,
  // and reports it as evicted.
  void evict_at(const Segment& segment, const FramePlace& place);
  void take_evicted(std::vector<Digest>* keys);

  // Called by recovery, in any order, for each record that no later tombstone or clear removes.
  void adopt(Segment& segment, const TableEntry& entry);

 private:
  Shared& shared_;
  Segments& segments_;
  DiskIndex index_;
  std::uint64_t live_bytes_ = 0;  // of the frames in the index
  std::uint32_t uses_ = 0;
  // Keys of running puts -> sequence of the last tombstone that names the key; 0: none.
  std::unordered_map<Digest, std::uint64_t, KeyHash> putting_;
  std::vector<Digest> evicted_;  // not taken yet
};

}  // namespace kvstrata::disk
