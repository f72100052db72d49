// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The L1 pool: the server's side of the shared-memory segment. It alone decides what an extent is
// used for.
//
// Entry states and their legal moves (Pool::may_become is this table, and every change goes through
// it):
//
//   from \ to      RESERVED   READY      UNVERIFIED  QUARANTINED          FREE
//   FREE           reserve
//   RESERVED                  commit                 abort with holds     abort, owner gone
//   READY                                adopt       dropped while in use evict, clear, remove,
//   corrupt UNVERIFIED                verified               dropped while in use evict, clear,
//   remove, corrupt QUARANTINED                                                           nobody
//   can touch it any more
//
// An extent is handed out only once the file system has given it memory (Backing): nobody dies of
// SIGBUS in one, however full the file system gets. What it refuses is left out and asked for
// again.
//
// Invariants (validate() checks them all)
//  1. An extent belongs to exactly one entry that is not FREE; extents do not overlap.
//  2. An entry that is pinned, leased, reserved, quarantined, or that a row of an earlier epoch may
//  touch
//     keeps its extent. No clock ever ends one of these.
//  3. A key is in the buckets exactly while its entry is RESERVED, READY or UNVERIFIED, and at most
//  once.
//  4. Only commit makes an entry READY, or verify one that an earlier server committed.
//  5. Parents form a forest; `children` counts them; an entry with children is not a victim by
//  itself, and
//     evicting a window takes the descendants along.
//  6. The rows in a cold entry include every row that may touch the bytes, before it can learn
//  where they are.
//
// Thread safety: every method may be called from any thread; one mutex. peek() takes no lock. A
// Hold may be dropped from any thread at any time, after close() too; it keeps the mapping alive.
//
// No method throws: running out of memory for the pool's own tables (not for extents) ends the
// process, and the next server adopts the pool.
//
// Batches are rows of 32-byte keys. Extents are reported as ExtentRecord (24 bytes, packed).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvstrata/backing.h"
#include "kvstrata/index.h"
#include "kvstrata/policy.h"
#include "kvstrata/prefault.h"
#include "kvstrata/slab.h"
#include "kvstrata/status.h"

namespace kvstrata {

inline constexpr std::size_t kMaxBatchKeys = std::size_t{1} << 20;
inline constexpr std::size_t kMaxLeaseTickets = 65'536;
inline constexpr std::size_t kMaxEntriesToEnd = 8'192;
inline constexpr std::size_t kMaxReservations = 65'536;
inline constexpr std::size_t kEventRing = 65'536;
inline constexpr std::size_t kRefusedKeys = 65'536;

struct ExtentRecord {
  std::uint64_t offset;
  std::uint32_t length;
  std::uint32_t entry;
  std::uint32_t generation;
  std::uint32_t zero;
};
static_assert(sizeof(ExtentRecord) == 24);

// Numbers are those of kvstrata.rpc.wire.
enum class ReserveOutcome : std::uint8_t {
  kReserved = 0,
  kPresent = 1,
  kInFlight = 2,
  kChainExceedsPool = 3,
  kPoolPinned = 4,
  kSessionLimit = 5,
  kQuota = 6,
  kTooLarge = 7,
  kEntriesFull = 8,
  // 9 is the server's own: frozen
  kParentAbsent = 10,
};
inline constexpr std::size_t kReserveOutcomes = 11;
enum class CommitOutcome : std::uint8_t { kCommitted = 0, kNotReserved = 1, kBadRecord = 2 };
enum class EventKind : std::uint8_t {
  kEvicted = 1,
  kCleared = 2,
  kCorrupt = 3,
  kInserted = 4,
  kQuarantined = 5,
  kVerified = 6,  // adopted from another server, and READY from now on
  kRemoved = 7,   // by `remove`, or by a clear of one identity
  kReturned = 8   // by `remove`: it came from another instance and was not to stay
};

struct Event {
  EventKind kind;
  Key key;
  std::uint64_t bytes;
};

struct PoolOptions {
  std::uint64_t extents_bytes = 0;   // create: required; adopt: 0 or what it must be
  std::uint64_t entry_capacity = 0;  // likewise
  std::string policy = "LRU";
  double watermark = 0.0;        // share of the pool at which evict_to_watermark acts; 0: never
  double watermark_ratio = 0.0;  // share of the used bytes that it then evicts
  std::uint32_t max_session_share = 8;
};

struct RowInfo {
  std::uint32_t row;
  std::array<std::uint8_t, 16> session;
  std::array<std::uint8_t, 16> group;
  std::uint64_t pid;
  bool old;
  bool registers_memory;
};

struct ClassStats {
  std::uint64_t extent_bytes;
  std::uint32_t used;
  std::uint32_t capacity;
};

struct PoolStats {
  std::uint64_t entries[kEntryStateCount];
  std::uint64_t bytes[kEntryStateCount];
  std::uint64_t extents_bytes, used_bytes, slab_bytes, unusable_bytes, largest_allocatable_bytes;
  std::uint64_t leased_bytes, pinned_bytes, blocked_bytes;
  std::uint64_t lease_tickets, reservations, holds;
  std::uint64_t evicted_entries, evicted_bytes, evicted_by_policy, evicted_by_window,
      evicted_by_quota;
  std::uint64_t evicted_by_watermark;
  std::uint64_t cleared_entries, corrupt_entries, inserted_entries, inserted_bytes,
      quarantined_entries;
  std::uint64_t refused[kReserveOutcomes];  // by ReserveOutcome
  std::uint64_t leases_trimmed, bad_records;
  std::uint64_t adopted_entries, adoption_dropped;
  std::uint64_t events_lost, prefaulted_bytes;
  std::uint64_t entry_capacity, rows_claimed, rows_capacity;
  // Bytes of the extents file that have memory, and those that got none when they were last asked
  // for; both are never handed out before they have it.
  std::uint64_t backed_bytes, missing_bytes;
  double fragmentation;
  const char* policy;
  std::vector<ClassStats> classes;
  struct Tenant {
    std::uint32_t tenant;
    std::uint64_t bytes;
    std::int64_t quota_bytes;  // -1: none
  };
  std::vector<Tenant> tenants;
};

class Pool;

// A reference on an extent: while it lives, the extent's bytes belong to this entry. Move-only; may
// be dropped by any thread. An extent whose reservation was aborted stays until its last hold is
// dropped.
class Hold {
 public:
  Hold() noexcept = default;
  Hold(Hold&& other) noexcept;
  Hold& operator=(Hold&& other) noexcept;
  ~Hold() { drop(); }

  bool is_held() const noexcept { return held_.load(std::memory_order_acquire); }
  // Idempotent; safe against another thread's drop of the same hold.
  void drop() noexcept;

  const Key& key() const noexcept { return key_; }
  std::uint64_t offset() const noexcept { return offset_; }
  std::uint32_t length() const noexcept { return length_; }
  std::uint32_t generation() const noexcept { return generation_; }
  std::uint32_t tenant() const noexcept { return tenant_; }
  // Where the bytes lie in this process; valid while the hold object lives, even after drop().
  std::uint8_t* address() const noexcept { return address_; }
  bool is_reservation() const noexcept { return reservation_; }

 private:
  friend class Pool;
  std::shared_ptr<Pool> pool_;
  Key key_{};
  std::uint64_t offset_ = 0;
  std::uint32_t length_ = 0;
  std::uint32_t generation_ = 0;
  std::uint32_t tenant_ = 0;
  std::uint32_t entry_ = kNoEntry;
  std::uint8_t* address_ = nullptr;
  bool reservation_ = false;
  std::atomic<bool> held_{false};
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Sizes two empty files and makes a pool in them. The descriptors stay the caller's.
  [[nodiscard]] static Status create(int index_fd, int extents_fd, const PoolOptions& options,
                                     std::shared_ptr<Pool>* out) noexcept;
  // Takes over a pool that an earlier server left. kIncompatible with `mismatch` filled in when the
  // files are no pool of this format; whatever else is wrong costs only the entries it concerns.
  [[nodiscard]] static Status adopt(int index_fd, int extents_fd, const PoolOptions& options,
                                    std::shared_ptr<Pool>* out, FormatMismatch* mismatch) noexcept;
  ~Pool();

  std::uint64_t epoch() const noexcept { return epoch_; }
  std::span<const std::uint8_t, 16> pool_id() const noexcept;
  std::uint64_t extents_bytes() const noexcept { return slabs_.extents_bytes(); }
  std::uint8_t* extents_address() const noexcept { return extents_base_; }

  // Rows. Row 0 is the server itself.
  [[nodiscard]] Status claim_row(const std::uint8_t* session, const std::uint8_t* group,
                                 std::uint64_t pid, bool registers_memory,
                                 std::uint32_t* row) noexcept;
  std::vector<RowInfo> rows() noexcept;
  [[nodiscard]] Status row_gone(std::uint32_t row) noexcept;
  // As row_gone, but of a process whose device may still write: what is quarantined because of it,
  // `kept_bytes`, stays so, and then the row stays claimed until row_gone.
  [[nodiscard]] Status row_stranded(std::uint32_t row, std::uint64_t* kept_bytes) noexcept;
  [[nodiscard]] Status row_quiesced(std::uint32_t row) noexcept;

  // Reading.
  std::size_t peek(const std::uint8_t* keys, std::size_t n_keys,
                   std::size_t n_slices) const noexcept;
  struct LeaseResult {
    std::uint64_t ticket = 0;
    std::uint64_t n_chunks = 0;
    std::uint64_t unverified = 0;
    // When leases would pass half of the pool: what must be given back for the rest of the prefix.
    std::uint64_t short_bytes = 0;
    std::vector<ExtentRecord> extents;
  };
  [[nodiscard]] Status lease(const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices,
                             std::span<const std::uint32_t> rows, LeaseResult* result) noexcept;
  // Ends one row's share, or all with row < 0. False when the ticket has no such share (any more).
  bool release(std::uint64_t ticket, std::int64_t row) noexcept;
  // How many of these leases, in this order, would have to end until `need_bytes` more can be
  // leased; up to the last that frees anything if that is never enough. After kMaxEntriesToEnd
  // entries the search ends with those looked at. REQUIRES: each ticket is named once. Changes
  // nothing.
  std::size_t leases_to_end(std::span<const std::uint64_t> tickets,
                            std::uint64_t need_bytes) noexcept;
  [[nodiscard]] Status verify(const std::uint8_t* keys, std::size_t n_keys, std::uint64_t* good,
                              std::uint64_t* bad) noexcept;
  // Checks unverified entries, last used first, until `max_bytes` were read; returns how many
  // remain.
  [[nodiscard]] Status verify_next(std::uint64_t max_bytes, std::uint64_t* remaining) noexcept;
  [[nodiscard]] Status mark_bad(const Key& key, bool* dropped) noexcept;

  // Writing.
  //
  // A lookup counts leading chunks, so a chunk is of no use while the one before it is missing.
  // What is reserved behind a missing parent therefore evicts nothing:
  // - if the parent was refused to a process, nobody has it, and the chunk is refused
  //   (kParentAbsent); what the server itself loads is in L2 and not bound by this;
  // - if there is no L2, the chunk gets free room or is refused likewise;
  // - otherwise L2 may have the parent, and the chunk is treated like any other.
  struct ReserveRequest {
    const std::uint8_t* keys = nullptr;
    std::size_t n_keys = 0;
    const std::uint8_t* parent = nullptr;  // 32 bytes or none
    std::uint64_t record_bytes = 0;
    std::uint32_t row = 0;
    const std::uint8_t* identity = nullptr;  // 32 bytes
    std::uint32_t tenant = 0;
  };
  struct ReserveResult {
    std::uint64_t ticket = 0;
    std::vector<std::uint8_t> outcomes;
    std::vector<ExtentRecord> extents;
  };
  [[nodiscard]] Status reserve(const ReserveRequest& request, ReserveResult* result) noexcept;
  [[nodiscard]] Status commit(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                              bool check, std::uint8_t* outcomes) noexcept;
  // `indices` empty with `all`: every item that is left. Returns how many were given back.
  std::uint64_t abort(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                      bool all) noexcept;

  // kNotFound when the key is not READY, or the item is not reserved.
  [[nodiscard]] Status hold(const Key& key, Hold* out) noexcept;
  [[nodiscard]] Status hold_reserved(std::uint64_t ticket, std::uint64_t index, Hold* out) noexcept;

  // Administration.
  // Drops READY and UNVERIFIED entries that nobody uses. `returned`: they were read from another
  // instance and were not to stay.
  std::uint64_t remove(const std::uint8_t* keys, std::size_t n_keys,
                       bool returned = false) noexcept;
  struct ClearResult {
    std::uint64_t dropped = 0;
    // READY, but leased by the server itself: pinned, or read by another instance.
    std::uint64_t kept = 0;
  };
  // Takes READY and UNVERIFIED entries out of the index; the extent of one that is in use is free
  // when its uses have ended. Of every tenant with tenant < 0; of every identity without `identity`
  // (32 bytes).
  ClearResult clear(std::int64_t tenant, const std::uint8_t* identity = nullptr) noexcept;
  // What clears took out of the index and somebody still uses: leased, or else held.
  struct ClearedInUse {
    std::uint64_t held = 0;
    std::uint64_t leased = 0;  // also by processes that were attached to an earlier server
  };
  ClearedInUse cleared_in_use() noexcept;
  void set_quota(std::uint32_t tenant, std::int64_t bytes) noexcept;
  std::uint64_t evict_to_watermark() noexcept;
  std::vector<Key> victims_preview(std::uint64_t need_bytes) noexcept;
  std::vector<Event> take_events(std::uint64_t* lost) noexcept;
  // Appends the first words of the keys that are READY among the next `max_entries` entries from
  // number `from` on; returns where to go on, 0 when there are no more. What changes meanwhile is
  // told by the events.
  std::uint64_t ready_tags(std::uint64_t from, std::uint64_t max_entries,
                           std::vector<std::uint64_t>* tags) noexcept;
  PoolStats stats() noexcept;
  void heartbeat() noexcept;
  void set_has_l2(bool has_l2) noexcept;
  [[nodiscard]] Status prefault_start(std::uint32_t threads) noexcept;
  // Asks again for memory that the file system refused; call it now and then. Returns the bytes
  // that are still missing.
  std::uint64_t retry_missing() noexcept;
  Prefault& prefault() noexcept { return prefault_; }
  // Ends prefaulting and refuses everything but releasing holds from now on. Idempotent.
  void close() noexcept;
  bool is_closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // OK, or kInternal naming the broken invariant. Looks at everything: for tests.
  [[nodiscard]] Status validate() noexcept;

  static bool may_become(EntryState from, EntryState to) noexcept;

 private:
  friend class Hold;
  static constexpr std::uint64_t kNoOwner = 0xFFFF;
  static constexpr std::uint32_t kMaxAncestors = 65'536;  // of one walk up a chain
  static constexpr std::uint8_t kMarkVisited = 1;         // of EntryLocal::marks
  static constexpr std::uint8_t kMarkTenantListed = 2;
  static constexpr std::uint8_t kMarkCleared = 4;  // quarantined by a clear
  // What ColdEntry::rows holds: several rows share a bit.
  struct RowBits {
    std::uint64_t word[kRowBits / 64] = {};
    void set(std::uint32_t row) noexcept { word[row % kRowBits / 64] |= 1ULL << (row % 64); }
    bool test(std::uint32_t row) const noexcept {
      return (word[row % kRowBits / 64] >> (row % 64)) & 1;
    }
    bool any() const noexcept { return (word[0] | word[1]) != 0; }
    RowBits& operator|=(const RowBits& other) noexcept {
      for (std::size_t i = 0; i < std::size(word); ++i)
        word[i] |= other.word[i];
      return *this;
    }
    bool operator==(const RowBits& other) const noexcept = default;
  };
  struct RowMask {
    std::uint64_t word[kRowCount / 64] = {};
    void set(std::uint32_t row) noexcept { word[row / 64] |= 1ULL << (row % 64); }
    void clear(std::uint32_t row) noexcept { word[row / 64] &= ~(1ULL << (row % 64)); }
    bool test(std::uint32_t row) const noexcept { return (word[row / 64] >> (row % 64)) & 1; }
    bool any() const noexcept {
      for (const std::uint64_t bits : word) {
        if (bits != 0) return true;
      }
      return false;
    }
    RowBits bits() const noexcept {
      RowBits folded;
      for (std::size_t i = 0; i < std::size(word); ++i)
        folded.word[i % std::size(folded.word)] |= word[i];
      return folded;
    }
    // The rows of this mask that `bits` may stand for.
    RowMask among(const RowBits& bits) const noexcept {
      RowMask result;
      for (std::size_t i = 0; i < std::size(word); ++i)
        result.word[i] = word[i] & bits.word[i % std::size(bits.word)];
      return result;
    }
  };
  struct Lease {
    RowMask rows;
    std::vector<std::uint32_t> entries;
  };
  struct Reservation {
    std::uint32_t row = 0;
    std::uint32_t left = 0;
    Key identity{};
    std::vector<std::uint32_t>
        items;  // entry per requested key, kNoEntry where none is reserved (any more)
  };
  struct Tenant {
    std::uint64_t bytes = 0;
    std::int64_t quota_bytes = -1;
    std::uint32_t hot = kNoEntry;
    std::uint32_t cold = kNoEntry;
  };
  enum class Cause : std::uint8_t {
    kPolicy,
    kWindow,
    kQuota,
    kWatermark,
    kCleared,
    kRemoved,
    kReturned,
    kCorrupt,
    kAborted
  };

  Pool() = default;
  [[nodiscard]] static Status check_options(const PoolOptions& options) noexcept;
  [[nodiscard]] Status back_index(int index_fd, std::uint64_t file_bytes, std::uint64_t head_bytes,
                                  std::uint64_t cold_offset, std::uint64_t cold_bytes);
  [[nodiscard]] Status start(const IndexLayout& layout, int extents_fd, const PoolOptions& options);
  [[nodiscard]] Status check_open() const noexcept;
  bool is_row(std::uint32_t row) const noexcept;
  void find(const std::uint8_t* keys, std::size_t n_keys) { find_into(keys, n_keys, &found_); }
  void find_into(const std::uint8_t* keys, std::size_t n_keys,
                 std::vector<std::uint32_t>* out) const;

  // adopt (pool_adopt.cpp)
  void adopt_rows();
  struct Adoption {
    std::vector<std::uint32_t> placed;  // entries that own an extent
    std::unordered_map<std::uint32_t, RowBits> touchers;
    std::unordered_set<std::uint32_t> distrusted;  // not to be found by their key again
  };
  void adopt_entries();
  void adopt_entry(std::uint32_t entry, const RowMask& live_rows, Adoption* adoption);
  void adopt_forest(const std::vector<std::uint32_t>& linked);

  // entries
  std::uint32_t take_entry() noexcept;
  void give_entry(std::uint32_t entry) noexcept;
  void set_state(std::uint32_t entry, EntryState state) noexcept;
  void count_state(std::uint32_t entry, EntryState state, int sign) noexcept;
  std::uint64_t extent_bytes(std::uint32_t entry) const noexcept;
  void init_local(std::uint32_t entry, const SlabPlace& place) noexcept;
  // Applies a change of pins, leases or held_back to the local entry and does what follows from it.
  template <typename Change>
  void change_blockers(std::uint32_t entry, bool used, Change change) noexcept {
    EntryLocal& local = local_[entry];
    const bool before = local.is_blocked();
    change(local);
    const bool after = local.is_blocked();
    if (before == after) return;
    if (after) {
      slabs_.run(local.run).blocked += 1;
      blocked_bytes_ += extent_bytes(entry);
    } else {
      slabs_.run(local.run).blocked -= 1;
      blocked_bytes_ -= extent_bytes(entry);
      if (used || local.children == 0) policy_->unblocked(entry, used);
    }
  }
  void pin(std::uint32_t entry) noexcept;
  void unpin(std::uint32_t entry, bool used) noexcept;
  void add_child(std::uint32_t parent, std::uint32_t child) noexcept;
  void remove_from_parent(std::uint32_t entry) noexcept;
  void orphan_children(std::uint32_t entry) noexcept;
  // Whether `candidate` is `entry` or above it; true as well when the walk uses up `budget`.
  bool is_ancestor(std::uint32_t candidate, std::uint32_t entry,
                   std::uint64_t* budget) const noexcept;
  void touch(std::uint32_t entry) noexcept;
  void set_rows(std::uint32_t entry, const RowBits& bits) noexcept;
  RowBits rows_of(std::uint32_t entry) const noexcept;
  RowBits old_rows_of(std::uint32_t entry) const noexcept;
  // Takes the entry out of the index; its extent is free at once, or when nobody can touch it any
  // more.
  void drop(std::uint32_t entry, Cause cause);
  void free_if_untouched(std::uint32_t entry);
  void release_owner(std::uint32_t entry) noexcept;
  void end_lease(std::unordered_map<std::uint64_t, Lease>::iterator lease);
  std::uint64_t forget_old_row(std::uint32_t row, bool keep_quarantine);
  void end_row(std::uint32_t row);

  // writing
  ReserveOutcome reserve_one(const ReserveRequest& request, const Key& key, std::uint64_t bytes,
                             std::uint64_t row_limit, std::uint32_t parent, bool may_evict,
                             std::uint32_t* cls, std::uint32_t* out);
  ReserveOutcome why_no_room(const ReserveRequest& request, const std::vector<std::uint32_t>& own,
                             const Reservation& reservation);
  bool record_matches(std::uint32_t entry, const Key& identity) const noexcept;
  void commit_one(std::uint32_t entry);

  // room
  bool take_place(std::uint32_t cls, std::uint32_t entry, SlabPlace* place);
  bool make_room(std::uint32_t cls, std::uint32_t entry, bool may_evict, SlabPlace* place);
  bool evict_window(const SlabMap::Window& window, std::uint64_t older_than);
  std::uint32_t oldest_victim() noexcept;
  bool evict_one_entry();
  bool fit_quota(std::uint32_t tenant, std::uint64_t bytes, bool may_evict);
  void tenant_link(std::uint32_t entry) noexcept;
  void tenant_unlink(std::uint32_t entry) noexcept;
  void tenant_charge(std::uint32_t entry, std::int64_t sign);

  void emit(EventKind kind, const Key& key, std::uint64_t bytes);
  // Checks pinned entries without the lock, then settles and unpins them under it.
  void verify_pinned(std::unique_lock<std::mutex>& lock, const std::vector<std::uint32_t>& pinned,
                     std::uint64_t* good, std::uint64_t* bad);
  void drop_hold(std::uint32_t entry) noexcept;
  void fill_hold(std::uint32_t entry, bool reservation, Hold* out);
  ExtentRecord extent_record(std::uint32_t entry) const noexcept;

  mutable std::mutex mutex_;
  std::atomic<bool> closed_{false};
  Mapping index_mapping_;
  Mapping extents_mapping_;
  Mapping local_mapping_;
  IndexView index_;
  std::uint8_t* extents_base_ = nullptr;
  EntryLocal* local_ = nullptr;
  SlabMap slabs_;
  std::unique_ptr<EvictionPolicy> policy_;
  PoolOptions options_;
  std::uint64_t epoch_ = 0;

  std::vector<std::uint32_t> free_entries_;
  std::uint64_t entries_touched_ = 0;
  std::uint64_t stamp_ = 1;
  std::uint64_t operations_ = 0;
  std::uint64_t next_ticket_ = 1;
  std::unordered_map<std::uint64_t, Lease> leases_;
  std::size_t lease_items_ = 0;
  std::unordered_map<std::uint64_t, Reservation> reservations_;
  GhostList refused_;  // keys that were refused to processes and that nobody has stored since
  std::unordered_map<std::uint32_t, RowMask>
      old_rows_;  // entries that rows of earlier epochs may touch
  std::unordered_set<std::uint32_t> quarantine_;
  std::vector<std::uint32_t> verify_queue_;  // entry ids, last used at the end
  std::unordered_map<std::uint32_t, Tenant> tenants_;
  std::uint64_t row_bytes_[kRowCount] = {};  // reserved + quarantined
  std::uint32_t rows_claimed_ = 0;           // row 0 apart

  std::deque<Event> events_;
  std::uint64_t used_bytes_ = 0;
  std::uint64_t blocked_bytes_ = 0;
  std::uint64_t leased_bytes_ = 0;
  std::uint64_t pinned_bytes_ = 0;
  std::uint64_t holds_ = 0;
  PoolStats counters_{};               // only the counting fields
  std::vector<std::uint32_t> found_;   // scratch of batch calls
  std::vector<std::uint32_t> family_;  // scratch of evict_window
  Backing index_backing_;
  Backing extents_backing_;
  Prefault prefault_;
};

}  // namespace kvstrata
