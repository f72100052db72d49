// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Eviction policies, which choose the chunk to evict when room is needed: one per source file,
// behind one interface.
//
// A policy orders the entries of each size class by itself. Only an entry that is not blocked
// (pinned, leased or held back) and has no children is a victim. A policy that meets another entry
// at the cold end of a list sets it aside ("parks" it), and the pool gives it back by unblocked().
// So finding a victim is O(1) amortised: each step either ends the search or is paid for by one
// touch or one unblock.
//
// Policies link entries through EntryLocal, of which the pool has one per entry; they allocate
// nothing per entry, only bounded memories of what they evicted. Not thread-safe: called under the
// pool's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pool/index.h"
#include "pool/slab.h"

namespace kvstrata {

// The part of an entry that lies in the server's own memory; made anew after a restart.
// A bit of EntryLocal::marks: the record is a tail, the unfinished last chunk of a prompt.
inline constexpr std::uint8_t kMarkTail = 8;

struct alignas(64) EntryLocal {
  // Eviction list, owned by the policy. `list` 0: in none.
  std::uint32_t list_previous;
  std::uint32_t list_next;
  std::uint8_t list;
  std::uint8_t frequency;
  std::uint8_t parked;
  // Everything below belongs to the pool. `held_back` counts the reasons against eviction that are
  // not in the other counters: reserved, quarantined, touchable by rows of an earlier epoch.
  std::uint8_t held_back;
  std::uint8_t cls;
  std::uint8_t run;
  std::uint8_t marks;
  std::uint8_t padding;
  std::uint32_t slot;
  std::uint32_t pins;
  std::uint32_t leases;
  std::uint32_t children;
  // Family: entries whose parent this is.
  std::uint32_t first_child;
  std::uint32_t next_sibling;
  std::uint32_t previous_sibling;
  // Entries of the same tenant by age, kept only for tenants with a quota.
  std::uint32_t tenant_previous;
  std::uint32_t tenant_next;

  // Cannot be evicted, whatever its children.
  bool is_blocked() const noexcept { return pins != 0 || leases != 0 || held_back != 0; }
  bool is_victim() const noexcept { return !is_blocked() && children == 0; }
  bool is_tail() const noexcept { return (marks & kMarkTail) != 0; }
};
static_assert(sizeof(EntryLocal) == 64);

// Doubly linked list of entries through EntryLocal, hottest first.
struct EntryList {
  std::uint32_t hot = kNoEntry;
  std::uint32_t cold = kNoEntry;
  std::uint32_t size = 0;
};

class EvictionPolicy {
 public:
  // `entries` must outlive the policy.
  explicit EvictionPolicy(EntryLocal* entries) noexcept : entries_(entries) {}
  virtual ~EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;

  virtual const char* name() const noexcept = 0;
  // False for a policy that never has a victim: then nothing else may be evicted either.
  virtual bool evicts() const noexcept { return true; }
  // A key that is not in the pool is about to be stored, before any victim is chosen for it.
  // `fingerprint` is the first word of the key.
  virtual void admit(std::uint64_t fingerprint, std::uint32_t cls) = 0;
  // The entry is in the pool now, as the hottest of its class.
  virtual void insert(std::uint32_t entry, std::uint64_t fingerprint, std::uint32_t cls) = 0;
  // It was used. A policy may move it, and may take it back into a list if it is parked.
  virtual void touch(std::uint32_t entry) noexcept = 0;
  // It is about to leave the pool. `evicted`: it leaves to make room, and the policy may remember
  // it.
  virtual void remove(std::uint32_t entry, std::uint64_t fingerprint, bool evicted) = 0;
  // A parked entry may be a victim again. It goes to the hot end if it was in use until now
  // (`used`), else to the cold end. Does nothing for an entry that is not parked.
  virtual void unblocked(std::uint32_t entry, bool used) noexcept = 0;
  // The next entry of the class to evict, or kNoEntry. It stays until remove().
  virtual std::uint32_t victim(std::uint32_t cls) noexcept = 0;
  // The class id stands for another size from now on. REQUIRES: the class has no entry.
  virtual void forget_class(std::uint32_t cls) noexcept = 0;
  // Sanity of the lists of one class: number of entries listed or parked, -1 when a list is broken.
  virtual std::int64_t count(std::uint32_t cls) const noexcept = 0;

 protected:
  void push_hot(EntryList& list, std::uint32_t entry) noexcept;
  void push_cold(EntryList& list, std::uint32_t entry) noexcept;
  void unlink(EntryList& list, std::uint32_t entry) noexcept;
  // Number of entries, -1 when links or marks do not agree.
  std::int64_t check_list(const EntryList& list, std::uint8_t mark) const noexcept;

  EntryLocal* entries_;
};

// The fingerprints that were added last; trim() forgets the oldest.
class GhostList {
 public:
  bool contains(std::uint64_t fingerprint) const noexcept { return live_.contains(fingerprint); }
  bool erase(std::uint64_t fingerprint);
  void add(std::uint64_t fingerprint);
  // Forgets the oldest until at most `limit` are left.
  void trim(std::size_t limit);
  std::size_t size() const noexcept { return live_.size(); }
  void clear() noexcept;

 private:
  // Order of arrival; a fingerprint counts only at the position that live_ names.
  struct Slot {
    std::uint64_t fingerprint;
    std::uint64_t ticket;
  };
  std::vector<Slot> ring_;
  std::size_t begin_ = 0;
  std::uint64_t next_ticket_ = 1;
  std::unordered_map<std::uint64_t, std::uint64_t> live_;
};

// By name: LRU, ARC, S3FIFO, noop, with tails first. nullptr for any other.
std::unique_ptr<EvictionPolicy> make_policy(std::string_view name, EntryLocal* entries);

}  // namespace kvstrata
