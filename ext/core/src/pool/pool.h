// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The L1 pool: the server's side of the shared-memory segment. Only the pool decides how an extent
// is used.
//
// The state of a pool lies in its parts. The header of each part states its invariants:
//
//   | part         | what it does                                                       |
//   |--------------|--------------------------------------------------------------------|
//   | entries      | keeps the entries, their states, and what protects them            |
//   | family       | links chunks that continue each other                              |
//   | tenants      | counts each tenant's bytes, and keeps its quota                    |
//   | rows         | keeps the session table, and the entries its processes may touch   |
//   | departures   | removes entries from the index, and keeps the quarantine           |
//   | room         | finds a place for a new extent, and evicts entries for it          |
//   | leases       | protects entries that lookups have leased to processes             |
//   | reservations | gives processes entries to write, until they commit or abort       |
//   | checks       | reads and verifies records: the only work without the mutex        |
//   | changes      | reports changes of chunks, numbered, to the server and followers   |
//
// adopt.cpp takes over the pool of an earlier server. tests/support/pool_validation.cpp recomputes
// everything that the parts keep, and compares.
//
// Thread safety: every method may be called from any thread; one mutex, a leaf of the lock order.
// peek() takes no lock.
//
// No method throws: running out of memory for the pool's own tables (not for extents) ends the
// process, and the next server adopts the pool.
//
// A batch of keys is one array of 32-byte keys. Extents are reported as ExtentRecord (24 bytes).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "memory/prefault.h"
#include "pool/departures.h"
#include "pool/entries.h"
#include "pool/index.h"
#include "pool/leases.h"
#include "pool/reservations.h"
#include "pool/room.h"
#include "pool/rows.h"
#include "pool/shadow.h"
#include "pool/slab.h"
#include "pool/stats.h"
#include "pool/value.h"

namespace kvstrata {

class Pool;

// Why hold_batch has taken no hold.
enum class LeftOut : std::uint8_t { kHeld = 0, kAbsent = 1, kLimit = 2 };

// A reference to an entry's extent: while it lives, the extent's bytes belong to that entry.
// Move-only. It may be dropped from any thread at any time, after Pool::close() too, and keeps the
// mapping alive.
// An extent whose reservation was aborted stays until its last hold is dropped.
//
// Dropping a hold locks the pool's mutex, a leaf of the lock order, so a thread drops a hold only
// while it has none of our locks (base/README.md). Pool fills only Hold objects that hold nothing.
class Hold {
 public:
  Hold() noexcept = default;
  Hold(Hold&& other) noexcept;
  Hold& operator=(Hold&& other) noexcept;
  ~Hold() { drop(); }

  bool is_held() const noexcept { return held_.load(std::memory_order_acquire); }
  // Stops counting the bytes against the limit of Pool::hold_batch, though they are still held.
  // Idempotent; drop() does it too.
  void uncount() noexcept;
  // Idempotent; safe against another thread's drop of the same hold.
  void drop() noexcept;

  const Key& key() const noexcept { return key_; }
  std::uint64_t offset() const noexcept { return offset_; }
  std::uint32_t length() const noexcept { return length_; }
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
  std::uint32_t tenant_ = 0;
  std::uint32_t entry_ = kNoEntry;
  std::uint8_t* address_ = nullptr;
  bool reservation_ = false;
  std::atomic<bool> counted_{false};
  std::atomic<bool> held_{false};
};

// Reads and verifies records: the only work of the pool that is done without its mutex. A pin
// protects each extent meanwhile.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex is locked by `lock`. Functions
// that take it release it while they read, and hold it again when they return; another thread may
// have closed the pool by then.

struct Checks {
  using Lock = std::unique_lock<std::mutex>;

  // Both must outlive the object.
  Checks(Departures& departures, const std::atomic<bool>& closed) noexcept
      : entries(departures.entries), departures(departures), closed(closed) {}

  // The length of each pinned record whose header is sound and that its reservation promised: key,
  // identity, and no more bytes; 0 for all others.
  std::vector<std::uint32_t> match(Lock& lock, const std::vector<std::uint32_t>& pinned,
                                   const Key& identity) const;
  // Compares all checksums of pinned records, and their key and identity with the entry's, and
  // unpins them: UNVERIFIED ones become READY, bad ones leave. Adds to both counts.
  void verify(Lock& lock, const std::vector<std::uint32_t>& pinned, std::uint64_t* good,
              std::uint64_t* bad);
  // Pins the UNVERIFIED entries: those among `found`, or the next ones of the queue, until they
  // have `max_bytes` together.
  std::vector<std::uint32_t> pin_unverified(const std::vector<std::uint32_t>& found);
  std::vector<std::uint32_t> pin_next(std::uint64_t max_bytes);

  Entries& entries;
  Departures& departures;
  const std::atomic<bool>& closed;
  std::vector<std::uint32_t> queue;  // entries to verify, last used at the end
  std::vector<Key> verified;         // entries that became READY, until somebody takes them
};

struct PoolOptions {
  std::uint64_t extents_bytes = 0;   // create: required; adopt: the expected value, or 0 for any
  std::uint64_t entry_capacity = 0;  // likewise
  std::string policy = "VALUE";
  double depth_cost = 0.0085;  // see Value
  std::string lessons;         // of an earlier pool, or empty
  std::uint32_t max_session_share = 8;
};

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Sizes two empty files and makes a pool in them. The caller keeps the descriptors.
  [[nodiscard]] static Status create(int index_fd, int extents_fd, const PoolOptions& options,
                                     std::shared_ptr<Pool>* out) noexcept;
  // Takes over a pool that an earlier server left. kIncompatible, with `mismatch` filled in, if the
  // files are not a pool of this format. Any other damage costs only the entries that it concerns.
  [[nodiscard]] static Status adopt(int index_fd, int extents_fd, const PoolOptions& options,
                                    std::shared_ptr<Pool>* out, FormatMismatch* mismatch) noexcept;
  ~Pool();

  std::uint64_t epoch() const noexcept { return rows_.epoch; }
  std::span<const std::uint8_t, 16> pool_id() const noexcept;
  std::uint64_t extents_bytes() const noexcept { return slabs_.extents_bytes(); }
  std::uint8_t* extents_address() const noexcept { return segment_->extents_address(); }

  // Rows. Row 0 is the server itself.
  [[nodiscard]] Status claim_row(const std::uint8_t* session, const std::uint8_t* group,
                                 std::uint64_t pid, bool registers_memory,
                                 std::uint32_t* row) noexcept;
  std::vector<RowInfo> rows() noexcept;
  // The process is dead: ends its reservations, its shares of leases and its quarantine.
  [[nodiscard]] Status row_gone(std::uint32_t row) noexcept;
  // As row_gone, for a process whose device may still write: entries that are quarantined because
  // of the row stay so (`kept_bytes`). If any do, the row stays claimed until row_gone.
  [[nodiscard]] Status row_stranded(std::uint32_t row, std::uint64_t* kept_bytes) noexcept;
  // The process is alive, and no longer touches extents of earlier epochs.
  [[nodiscard]] Status row_quiesced(std::uint32_t row) noexcept;

  // Reading.
  std::size_t peek(const std::uint8_t* keys, std::size_t n_keys,
                   std::size_t n_slices) const noexcept;
  // For each key whether it is READY: 1 or 0.
  void has(const std::uint8_t* keys, std::size_t n_keys, std::uint8_t* answers) const noexcept;
  // As IndexView::peek_windows.
  std::size_t peek_windows(const std::uint8_t* keys, std::size_t n_chunks,
                           std::span<const std::uint32_t> spans) const noexcept;
  // Leases the leading chunks that are READY for these rows, in each slice as far as its span needs
  // (see Leases::take). Here and below `identity` is the root of the identity for which the caller
  // asks, 32 bytes, or nullptr for any: entries of another identity count as absent. `again`: not
  // the first lease of a request; the policy does not count it as a return. `unread`: the rows read
  // no bytes by this lease, so UNVERIFIED entries are leased too. `own_chunks`: the number of
  // leading chunks in a cache of the caller, which serves them; leasing them does not count as a
  // use. `tenant`: the tenant of the request.
  [[nodiscard]] Status lease(const std::uint8_t* keys, std::size_t n_keys,
                             std::span<const std::uint32_t> spans,
                             std::span<const std::uint32_t> rows, const std::uint8_t* identity,
                             bool again, LeaseResult* result, bool unread = false,
                             std::size_t own_chunks = 0, std::uint32_t tenant = 0) noexcept;
  // The same for the keys of a prompt, which are derived here, those of slices with a span only as
  // far as the answer needs them. With `result->exceeded` nothing was leased, since that would take
  // more keys than `keys` may derive. The lock is held for the lease, not for the derivation of
  // keys of slices without a span.
  [[nodiscard]] Status lease_chain(ChainKeys& keys, std::span<const std::uint32_t> spans,
                                   std::span<const std::uint32_t> rows,
                                   const std::uint8_t* identity, bool again, LeaseResult* result,
                                   std::size_t own_chunks = 0, std::uint32_t tenant = 0) noexcept;
  // Ends one row's share, or all with row < 0. False when the ticket has no such share (any more).
  bool release(std::uint64_t ticket, std::int64_t row) noexcept;
  // How many of these leases, in this order, would have to end before `need_bytes` more can be
  // leased. If all of them are not enough, the count ends with the last one that frees anything.
  // After kMaxEntriesToEnd entries the search stops and counts every lease that it has looked at.
  // Changes nothing. REQUIRES: each ticket is named once.
  std::size_t leases_to_end(std::span<const std::uint64_t> tickets,
                            std::uint64_t need_bytes) noexcept;
  // Checks the UNVERIFIED entries among the keys; bad ones are dropped.
  [[nodiscard]] Status verify(const std::uint8_t* keys, std::size_t n_keys, std::uint64_t* good,
                              std::uint64_t* bad) noexcept;
  // Checks unverified entries, last used first, until `max_bytes` were read; returns how many
  // remain.
  [[nodiscard]] Status verify_next(std::uint64_t max_bytes, std::uint64_t* remaining) noexcept;
  // Checks a record that a reader reported as corrupt.
  [[nodiscard]] Status mark_bad(const Key& key, const std::uint8_t* identity,
                                bool* dropped) noexcept;

  // Whether the key is in the index and its record is a tail.
  bool is_tail(const Key& key) noexcept;
  bool is_reserved(const Key& key) noexcept;

  // Writing.
  [[nodiscard]] Status reserve(const ReserveRequest& request, ReserveResult* result) noexcept;
  // `check`: whether the header of each record must be the promised one. `outcomes`: one
  // CommitOutcome for each index.
  [[nodiscard]] Status commit(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                              bool check, std::uint8_t* outcomes) noexcept;
  // Frees the items at `indices` or, with `all`, every item that is left. Returns their number.
  std::uint64_t abort(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                      bool all) noexcept;

  // kNotFound when the key is not READY, or the item is not reserved. REQUIRES: `out` holds
  // nothing.
  [[nodiscard]] Status hold(const Key& key, const std::uint8_t* identity, Hold* out) noexcept;
  [[nodiscard]] Status hold_reserved(std::uint64_t ticket, std::uint64_t index, Hold* out) noexcept;
  // Holds for puts: takes a hold on each READY entry, as long as the counted holds together have at
  // most `limit_bytes` of extents; an entry with several counted holds counts once. `left_out` has
  // one LeftOut for each key. REQUIRES: `out` has room for `n_keys` holds that hold nothing.
  [[nodiscard]] Status hold_batch(const std::uint8_t* keys, std::size_t n_keys,
                                  std::uint64_t limit_bytes, Hold* out,
                                  std::uint8_t* left_out) noexcept;
  // Bytes of the extents that have counted holds.
  std::uint64_t counted_bytes() noexcept;

  // Learns the worth of entries from the requests since the last call, if they are enough: a sample
  // is taken under the mutex a few entries at a time, the rest is done without it. Returns whether
  // it learnt. Passes these requests to the shadows too.
  bool learn() noexcept;
  // A request that found none of its chunks in the index, and therefore leases nothing. `keys`:
  // those of the first of its slices.
  void missed(const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices,
              std::uint32_t tenant) noexcept;
  // A hint about the next request with these chunks of a prompt: sets `next` of Hint for the first
  // of these entries that is present and all before it in its prompt. Returns their number.
  std::size_t hint(const std::uint8_t* keys, std::size_t n_keys, std::uint8_t next) noexcept;
  // The requests from now on are logged, for take(); see RequestLog.
  RequestLog& request_log() noexcept { return request_log_; }
  Forecasts forecasts() noexcept;
  // The learnt state, at most 1 MiB, for PoolOptions::lessons of a later pool. It has no keys.
  std::string lessons() noexcept;
  static bool are_lessons(std::string_view bytes) noexcept { return Learner().restore(bytes); }
  // See Value.
  void set_model(const Key& identity, std::uint8_t model) noexcept;
  void set_cost(std::uint8_t model, double cost) noexcept;
  // For a replay: the policy's time is this from now on, not the clock's.
  void set_time(std::uint64_t monotonic_ns) noexcept { time_ns_ = monotonic_ns; }

  // Administration.
  // Drops READY and UNVERIFIED entries that are not in use.
  std::uint64_t remove(const std::uint8_t* keys, std::size_t n_keys) noexcept;
  // Removes READY and UNVERIFIED entries from the index. The extent of an entry in use becomes free
  // when its last use has ended. tenant < 0: entries of every tenant.
  ClearResult clear(std::int64_t tenant) noexcept;
  // tenant < 0: of every tenant.
  ClearedInUse cleared_in_use(std::int64_t tenant = -1) noexcept;
  // See Tenants.
  [[nodiscard]] bool set_quota(std::uint32_t tenant, std::int64_t bytes) noexcept;
  // The adopted chunks that have become READY since the last call.
  std::vector<Key> take_verified() noexcept;
  // The changes of L1 (tier 0), and of the tiers that the server writes there. Not under the mutex.
  Changes& changes() noexcept { return changes_; }
  // Appends the first words of the keys that are READY among the next `max_entries` entries from
  // number `from` on; returns the number to continue from, 0 when there are no more. Changes made
  // meanwhile are in `changes`.
  std::uint64_t ready_tags(std::uint64_t from, std::uint64_t max_entries,
                           std::vector<std::uint64_t>* tags) noexcept;
  PoolStats stats() noexcept;
  void heartbeat() noexcept;
  // Sets or clears a kIndexFlag.
  void set_flag(std::uint64_t flag, bool on) noexcept;
  [[nodiscard]] Status prefault_start(std::uint32_t threads) noexcept;
  // Asks again for memory that the file system refused; call it periodically. Returns the bytes
  // that are still missing.
  std::uint64_t retry_missing() noexcept;
  Prefault& prefault() noexcept { return prefault_; }
  // Ends prefaulting and refuses everything but releasing holds from now on. Idempotent.
  void close() noexcept;
  bool is_closed() const noexcept { return closed_.load(std::memory_order_acquire); }

 private:
  friend class Hold;
  friend class Adoption;
  friend class Validation;  // of the tests

  Pool(std::unique_ptr<PoolSegment> segment, const PoolOptions& options, std::uint64_t epoch);
  [[nodiscard]] static Status check_options(const PoolOptions& options) noexcept;
  [[nodiscard]] Status check_open() const noexcept;
  // The claimed rows that will hold a lease.
  [[nodiscard]] Status holders_of(std::span<const std::uint32_t> rows,
                                  RowMask* holders) const noexcept;
  std::uint64_t forget(std::uint32_t row, bool keep_quarantine);
  void end_row(std::uint32_t row);
  void fill_hold(std::uint32_t entry, bool reservation, Hold* out);
  void drop_hold(std::uint32_t entry, bool counted) noexcept;
  void uncount(std::uint32_t entry) noexcept;  // REQUIRES: the mutex
  std::uint64_t time_ns() const noexcept;
  // REQUIRES: the mutex.
  void begin_request(const std::vector<SampledChunk>& sampled, std::size_t n_chunks,
                     std::size_t n_slices, std::uint32_t tenant,
                     std::span<const std::uint32_t> spans) noexcept;
  // A sample of the first slice's keys, for begin_request(); logs them all.
  std::vector<SampledChunk> note_keys(const std::uint8_t* keys, std::size_t n_chunks,
                                      std::size_t n_slices);

  mutable std::mutex mutex_;
  std::mutex learning_;  // taken before mutex_; guards learner_, and the shadows where they run
  Learner learner_;
  std::atomic<std::uint64_t> time_ns_{0};  // 0: the clock's
  std::atomic<bool> closed_{false};
  const PoolOptions options_;
  Shadows shadows_;
  RequestLog request_log_;
  Forecasts forecasts_;  // as of the last learn()
  const std::unique_ptr<PoolSegment> segment_;
  std::uint64_t next_ticket_ = 1;
  std::uint64_t holds_ = 0;
  struct Counted {
    std::uint64_t holds, bytes;
  };
  std::unordered_map<std::uint32_t, Counted> counted_;  // by entry
  std::uint64_t counted_bytes_ = 0;
  SlabMap slabs_;
  Value policy_;
  Changes changes_;  // has a mutex of its own
  Entries entries_;
  Family family_;
  Tenants tenants_;
  Rows rows_;
  Departures departures_;
  Room room_;
  Leases leases_;
  Reservations reservations_;
  Checks checks_;
  AdoptionCounts adoption_counts_{};
  Prefault prefault_;
};

}  // namespace kvstrata
