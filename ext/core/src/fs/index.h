// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// In-memory index of the records in a directory, a map from keys to lengths, in the order of the
// records' last use. A record is always older than the one that it continues, as far as that is
// known. So a use of a record is one of its ancestors too. They are not moved if the nearest one
// was used shortly before: the record then goes to its side, and a chain costs little however long
// it is. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

#include "base/key_hash.h"
#include "fs/paths.h"
#include "kvstrata/digest.h"

namespace kvstrata {

struct FsRecord {
  std::uint64_t copy = 0;  // unique among all files that were ever in this index
  std::int64_t recency_unix_ns = 0;
  std::uint32_t length = 0;
  std::uint32_t loads = 0;  // running now; a record that is being loaded is not evicted
  std::list<Digest>::iterator age{};
  Digest parent{};        // zeros: none is known
  std::uint64_t use = 0;  // number of its last use
};

class FsIndex {
 public:
  [[nodiscard]] FsRecord* find(const Digest& key) noexcept {
    const auto found = records_.find(key);
    return found == records_.end() ? nullptr : &found->second;
  }
  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }
  // Oldest first.
  [[nodiscard]] const std::list<Digest>& ages() const noexcept { return ages_; }
  // Sum of fs_charge() over all records.
  [[nodiscard]] std::uint64_t charge() const noexcept { return charge_; }

  // See Connector::list(). A cursor holds a bucket and the count of rehashes. After a rehash the
  // buckets hold other keys, so the listing starts again.
  std::uint64_t list(std::uint64_t cursor, std::size_t most, std::vector<Digest>* keys) {
    constexpr int kChangesShift = 48;
    const std::size_t buckets = records_.bucket_count();
    if (buckets != buckets_) changes_ += 1;
    buckets_ = buckets;
    const std::uint64_t changes = (changes_ & 0xffff) << kChangesShift;
    std::size_t bucket = cursor & ((std::uint64_t{1} << kChangesShift) - 1);
    if (cursor - bucket != changes) bucket = 0;
    const std::size_t before = keys->size();
    std::size_t looked = 0;
    for (; bucket < buckets; ++bucket) {
      const std::size_t so_far = keys->size();
      if (so_far - before == most || looked > kLookedPerKey * most) return changes | bucket;
      for (auto at = records_.cbegin(bucket); at != records_.cend(bucket); ++at)
        keys->push_back(at->first);
      looked += 1;
      if (keys->size() - before > most && so_far > before) {
        keys->resize(so_far);
        return changes | bucket;
      }
    }
    return 0;
  }

  void reserve(std::size_t count) { records_.reserve(count); }

  // Adds a record as the newest, with a new copy number. REQUIRES: the key is not in the index.
  FsRecord& add(const Digest& key, std::uint32_t length, std::int64_t recency_unix_ns) {
    FsRecord& record = records_[key];
    record.copy = ++copies_;
    record.recency_unix_ns = recency_unix_ns;
    record.length = length;
    record.age = ages_.insert(ages_.end(), key);
    record.use = ++uses_;
    charge_ += fs_charge(length);
    return record;
  }

  // Puts back a record that remove() returned, as the oldest. It gets a new copy number, so that
  // loads which began before do not affect it. REQUIRES: the key is not in the index.
  void put_back(const Digest& key, FsRecord record) {
    record.copy = ++copies_;
    record.loads = 0;
    record.age = ages_.insert(ages_.begin(), key);
    charge_ += fs_charge(record.length);
    records_[key] = record;
  }

  // REQUIRES: the key is in the index.
  FsRecord remove(const Digest& key) {
    const auto found = records_.find(key);
    const FsRecord record = found->second;
    ages_.erase(record.age);
    records_.erase(found);
    charge_ -= fs_charge(record.length);
    return record;
  }

  void used(FsRecord& record) {
    uses_ += 1;
    const std::uint64_t shortly = std::min<std::uint64_t>(kShortly, records_.size() / 8);
    path_.clear();
    FsRecord* at = &record;
    do {
      path_.push_back(at);
      at->use = uses_;  // ends the walk where parents form a circle: a loaded record may be damaged
      at = find(at->parent);
    } while (at != nullptr && uses_ - at->use > shortly);
    auto newer = at == nullptr ? ages_.end() : at->age;
    for (std::size_t i = path_.size(); i-- > 0;) {
      ages_.splice(newer, ages_, path_[i]->age);
      newer = path_[i]->age;
    }
  }

 private:
  // Buckets that one call of list() visits for each key that it may name.
  static constexpr std::size_t kLookedPerKey = 16;
  static constexpr std::uint64_t kShortly = 1024;  // uses

  std::unordered_map<Digest, FsRecord, KeyHash> records_;
  std::size_t buckets_ = 0;    // at the last call of list()
  std::uint64_t changes_ = 0;  // how many times list() found it changed
  std::list<Digest> ages_;
  std::uint64_t charge_ = 0;
  std::uint64_t copies_ = 0;
  std::uint64_t uses_ = 0;
  std::vector<FsRecord*> path_;  // scratch of used()
};

}  // namespace kvstrata
