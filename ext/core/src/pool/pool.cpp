// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The public calls: each takes the mutex and hands the work to the part that it concerns.
#include "pool/pool.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "record/record.h"

namespace kvstrata {

namespace {

// The length of the record at the start of `length` bytes; 0 if it is not the promised record.
std::uint32_t promised_bytes(const std::uint8_t* record, std::uint64_t length, const Key& key,
                             const Key& identity) noexcept {
  RecordHeader header;
  if (!read_record_header(record, length, &header).ok()) return 0;
  const bool is_promised = Key::load(header.spec.key.data()) == key &&
                           Key::load(header.spec.identity.data()) == identity && header.plain();
  return is_promised ? static_cast<std::uint32_t>(header.record_bytes()) : 0;
}

// `identity`: the first bytes of a root, as an entry has them.
bool is_of_identity(const std::uint8_t* record, std::uint64_t length,
                    const std::uint8_t (&identity)[sizeof(ColdEntry::identity)]) noexcept {
  RecordHeader header;
  return read_record_header(record, length, &header).ok() &&
         std::memcmp(header.spec.identity.data(), identity, sizeof identity) == 0;
}

}  // namespace

std::vector<std::uint32_t> Checks::match(Lock& lock, const std::vector<std::uint32_t>& pinned,
                                         const Key& identity) const {
  IndexView& index = entries.index;
  std::vector<std::uint32_t> lengths(pinned.size());
  lock.unlock();
  for (std::size_t i = 0; i < pinned.size(); ++i) {
    const std::uint32_t entry = pinned[i];
    if (entry == kNoEntry) continue;
    lengths[i] =
        promised_bytes(entries.address(entry), index.length(entry), index.key(entry), identity);
  }
  lock.lock();
  return lengths;
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
      entries.change(entry, EntryState::kReady);
      departures.changes.note(0, Change::kCame, index.key(entry).word[0]);
      verified.push_back(index.key(entry));
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

namespace {

Status require_fresh(int fd, const char* message) noexcept {
  struct stat info{};
  if (fstat(fd, &info) != 0)
    return Status(StatusCode::kOsError, "fstat of a pool file failed", errno);
  if (info.st_size != 0) return Status(StatusCode::kExists, message, info.st_size);
  return Status();
}

Status check_count(std::size_t n_keys) noexcept {
  if (n_keys <= kMaxBatchKeys) return Status();
  return Status(StatusCode::kBadArgument, "keys: too many in one call",
                static_cast<std::int64_t>(n_keys), static_cast<std::int64_t>(kMaxBatchKeys));
}

}  // namespace

// ---- making and closing a pool

Status Pool::check_options(const PoolOptions& options) noexcept {
  if (!Value::is_name(options.policy))
    return Status(StatusCode::kBadArgument, "policy: must be one of VALUE, LRU, noop");
  if (!options.lessons.empty() && !are_lessons(options.lessons))
    return Status(StatusCode::kBadArgument, "lessons: not those of a pool of this version");
  if (options.max_session_share == 0) {
    return Status(StatusCode::kBadArgument, "max_session_share: must be at least 1");
  }
  return Status();
}

Status Pool::create(int index_fd, int extents_fd, const PoolOptions& options,
                    std::shared_ptr<Pool>* out) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_options(options));
  if (options.extents_bytes == 0 || options.extents_bytes % kExtentAlignment != 0) {
    return Status(StatusCode::kBadArgument, "extents_bytes: must be a positive multiple of 4096",
                  static_cast<std::int64_t>(options.extents_bytes));
  }
  if (options.entry_capacity < kMinEntryCapacity || options.entry_capacity > kMaxEntryCapacity) {
    return Status(StatusCode::kBadArgument, "entry_capacity: must be between 1 and 2^30",
                  static_cast<std::int64_t>(options.entry_capacity), kMaxEntryCapacity);
  }
  KVSTRATA_RETURN_IF_ERROR(
      require_fresh(index_fd, "index file: must be empty to make a pool in it"));
  KVSTRATA_RETURN_IF_ERROR(
      require_fresh(extents_fd, "extents file: must be empty to make a pool in it"));
  const IndexLayout layout = IndexLayout::of(options.entry_capacity);
  if (ftruncate(index_fd, static_cast<off_t>(layout.file_bytes)) != 0) {
    return Status(StatusCode::kOsError, "ftruncate of the index file failed", errno);
  }
  if (ftruncate(extents_fd, static_cast<off_t>(options.extents_bytes)) != 0) {
    return Status(StatusCode::kOsError, "ftruncate of the extents file failed", errno);
  }
  auto segment = std::make_unique<PoolSegment>();
  KVSTRATA_RETURN_IF_ERROR(
      segment->back_index(index_fd, layout.file_bytes, layout.hot_offset, 0, 0));
  KVSTRATA_RETURN_IF_ERROR(segment->map_index(index_fd, layout.file_bytes));
  segment->index = IndexView(segment->index_mapping.address(), layout);
  IndexHeader& header = segment->index.header();
  RowRecord& own_row = segment->index.row(0);
  header.format_version = kIndexFormatVersion;
  if (getrandom(header.pool_id, sizeof header.pool_id, 0) != sizeof header.pool_id) {
    return Status(StatusCode::kOsError, "getrandom failed", errno);
  }
  header.extents_bytes = options.extents_bytes;
  header.entry_capacity = layout.entry_capacity;
  header.bucket_lines = layout.bucket_lines;
  store_word<std::uint64_t>(own_row.claimed, 1);
  KVSTRATA_RETURN_IF_ERROR(segment->open_extents(extents_fd));
  const auto epoch = static_cast<std::uint64_t>(now_unix_ns());
  const std::shared_ptr<Pool> pool(new Pool(std::move(segment), options, epoch));
  store_word(header.epoch, epoch);
  store_word(own_row.epoch, epoch);
  store_word(header.magic, kIndexMagic);
  pool->entries_.index.seal_static_header();
  pool->heartbeat();
  *out = pool;
  return Status();
}

Pool::Pool(std::unique_ptr<PoolSegment> segment, const PoolOptions& options, std::uint64_t epoch)
    : options_(options),
      shadows_(options_.depth_cost),
      segment_(std::move(segment)),
      slabs_(segment_->index.header().extents_bytes, &segment_->index.header().slab_bytes,
             segment_->index.header().slab_table),
      policy_(options.policy, options.depth_cost, segment_->local(), segment_->index.capacity()),
      entries_(*segment_, slabs_, policy_),
      family_(entries_),
      tenants_(entries_),
      rows_(entries_, epoch),
      departures_(entries_, family_, tenants_, rows_, changes_),
      room_(entries_, departures_),
      leases_(departures_, extents_bytes(), next_ticket_),
      reservations_(room_, extents_bytes(), options.max_session_share, next_ticket_),
      checks_(departures_, closed_) {
  if (learner_.restore(options.lessons)) policy_.resume(&learner_);
}

Pool::~Pool() {
  close();
}

void Pool::close() noexcept {
  {
    // Calls that run now end first: afterwards the files may be another server's.
    const std::lock_guard lock(mutex_);
    closed_.store(true, std::memory_order_release);
  }
  prefault_.stop();
  segment_->index_backing.close();
  segment_->extents_backing.close();
}

Status Pool::check_open() const noexcept {
  if (is_closed()) return Status(StatusCode::kClosed, "the pool was closed");
  return Status();
}

std::span<const std::uint8_t, 16> Pool::pool_id() const noexcept {
  return std::span<const std::uint8_t, 16>(entries_.index.header().pool_id);
}

void Pool::heartbeat() noexcept {
  if (!is_closed()) store_word(entries_.index.header().heartbeat_ns, monotonic_ns());
}

void Pool::set_flag(std::uint64_t flag, bool on) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return;
  std::uint64_t& flags = entries_.index.header().flags;
  store_word(flags, on ? load_word(flags) | flag : load_word(flags) & ~flag);
}

Status Pool::prefault_start(std::uint32_t threads) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  return prefault_.start(extents_address(), &segment_->extents_backing, threads);
}

std::uint64_t Pool::retry_missing() noexcept {
  const std::lock_guard lock(mutex_);  // close() ends both backings
  if (is_closed()) return 0;
  segment_->index_backing.try_again();
  segment_->extents_backing.try_again();
  return segment_->missing_bytes();
}

// ---- rows

Status Pool::claim_row(const std::uint8_t* session, const std::uint8_t* group, std::uint64_t pid,
                       bool registers_memory, std::uint32_t* row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  return rows_.claim(session, group, pid, registers_memory, row);
}

std::vector<RowInfo> Pool::rows() noexcept {
  const std::lock_guard lock(mutex_);
  return rows_.list();
}

// Entries of earlier epochs no longer wait for this row, except those that `keep_quarantine` keeps
// (Rows::forget). Returns the bytes of the exceptions.
std::uint64_t Pool::forget(std::uint32_t row, bool keep_quarantine) {
  std::vector<std::uint32_t> settled;
  const std::uint64_t kept_bytes = rows_.forget(row, keep_quarantine, &settled);
  for (const std::uint32_t entry : settled)
    departures_.settle(entry);
  return kept_bytes;
}

void Pool::end_row(std::uint32_t row) {
  leases_.end_row(row);
  reservations_.end_row(row);
  forget(row, false);
  departures_.forgive(row);
  rows_.change(row, RowState::kUnclaimed);
}

Status Pool::row_gone(std::uint32_t row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  KVSTRATA_RETURN_IF_ERROR(rows_.check(row));
  end_row(row);
  return Status();
}

Status Pool::row_stranded(std::uint32_t row, std::uint64_t* kept_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  KVSTRATA_RETURN_IF_ERROR(rows_.check(row));
  *kept_bytes = forget(row, true);
  if (*kept_bytes == 0) {
    end_row(row);
  } else {
    rows_.change(row, RowState::kStranded);
  }
  return Status();
}

Status Pool::row_quiesced(std::uint32_t row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  KVSTRATA_RETURN_IF_ERROR(rows_.check(row));
  forget(row, false);
  rows_.change(row, RowState::kCurrent);
  return Status();
}

// ---- reading

std::size_t Pool::peek(const std::uint8_t* keys, std::size_t n_keys,
                       std::size_t n_slices) const noexcept {
  if (is_closed() || n_slices == 0) return 0;
  return entries_.index.peek(keys, n_keys, n_slices);
}

void Pool::has(const std::uint8_t* keys, std::size_t n_keys, std::uint8_t* answers) const noexcept {
  for (std::size_t i = 0; i < n_keys; ++i)
    answers[i] = static_cast<std::uint8_t>(peek(keys + i * kKeyBytes, 1, 1));
}

std::size_t Pool::peek_windows(const std::uint8_t* keys, std::size_t n_chunks,
                               std::span<const std::uint32_t> spans) const noexcept {
  return is_closed() ? 0 : entries_.index.peek_windows(keys, n_chunks, spans);
}

Status Pool::lease(const std::uint8_t* keys, std::size_t n_keys,
                   std::span<const std::uint32_t> spans, std::span<const std::uint32_t> rows,
                   const std::uint8_t* identity, bool again, LeaseResult* result, bool unread,
                   std::size_t own_chunks, std::uint32_t tenant) noexcept {
  if (spans.empty() || n_keys % spans.size() != 0) {
    return Status(StatusCode::kBadArgument, "keys: their count must be a multiple of n_slices",
                  static_cast<std::int64_t>(n_keys), static_cast<std::int64_t>(spans.size()));
  }
  KVSTRATA_RETURN_IF_ERROR(check_count(n_keys));
  const std::vector<SampledChunk> sampled =
      note_keys(keys, again ? 0 : n_keys / spans.size(), spans.size());
  const std::lock_guard lock(mutex_);
  RowMask holders;
  KVSTRATA_RETURN_IF_ERROR(holders_of(rows, &holders));
  begin_request(sampled, again ? 0 : n_keys / spans.size(), spans.size(), tenant, spans);
  Sought sought(entries_, keys, n_keys, spans.size());
  leases_.take(sought, spans, holders, identity, again, unread, own_chunks, result);
  return Status();
}

Status Pool::lease_chain(ChainKeys& keys, std::span<const std::uint32_t> spans,
                         std::span<const std::uint32_t> rows, const std::uint8_t* identity,
                         bool again, LeaseResult* result, std::size_t own_chunks,
                         std::uint32_t tenant) noexcept {
  if (spans.empty() || spans.size() != keys.n_slices()) {
    return Status(StatusCode::kBadArgument, "spans: one for each of one or more slices",
                  static_cast<std::int64_t>(spans.size()));
  }
  KVSTRATA_RETURN_IF_ERROR(check_open());
  KVSTRATA_RETURN_IF_ERROR(check_count(keys.n_chunks()));
  if (!keys.derive_whole(entries_.index, entries_.local)) {
    result->exceeded = true;
    return Status();
  }
  const std::size_t n_whole = keys.whole_slices().size();
  const std::vector<SampledChunk> sampled =
      note_keys(reinterpret_cast<const std::uint8_t*>(keys.whole().data()),
                again || n_whole == 0 ? 0 : keys.n_chunks(), n_whole);
  const std::lock_guard lock(mutex_);
  RowMask holders;
  KVSTRATA_RETURN_IF_ERROR(holders_of(rows, &holders));
  begin_request(sampled, again || n_whole == 0 ? 0 : keys.n_chunks(), n_whole, tenant, spans);
  Sought sought(entries_, keys);
  leases_.take(sought, spans, holders, identity, again, false, own_chunks, result);
  return Status();
}

Status Pool::holders_of(std::span<const std::uint32_t> rows, RowMask* holders) const noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (rows.empty())
    return Status(StatusCode::kBadArgument, "rows: at least one must hold the lease");
  for (const std::uint32_t row : rows) {
    if (!rows_.is_claimed(row)) return Status(StatusCode::kNotFound, "rows: not claimed", row);
    holders->set(row);
  }
  return Status();
}

bool Pool::release(std::uint64_t ticket, std::int64_t row) noexcept {
  const std::lock_guard lock(mutex_);
  policy_.tell_time(time_ns());
  return !is_closed() && leases_.release(ticket, row);
}

std::size_t Pool::leases_to_end(std::span<const std::uint64_t> tickets,
                                std::uint64_t need_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  return is_closed() ? 0 : leases_.to_end(tickets, need_bytes);
}

Status Pool::verify(const std::uint8_t* keys, std::size_t n_keys, std::uint64_t* good,
                    std::uint64_t* bad) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  checks_.verify(lock, checks_.pin_unverified(entries_.find(keys, n_keys)), good, bad);
  return Status();
}

Status Pool::verify_next(std::uint64_t max_bytes, std::uint64_t* remaining) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::uint64_t good = 0;
  std::uint64_t bad = 0;
  checks_.verify(lock, checks_.pin_next(max_bytes), &good, &bad);
  *remaining = entries_.counts.entries[static_cast<std::size_t>(EntryState::kUnverified)];
  return Status();
}

Status Pool::mark_bad(const Key& key, const std::uint8_t* identity, bool* dropped) noexcept {
  *dropped = false;
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = entries_.index.find(key);
  if (entry == kNoEntry || entries_.index.state(entry) == EntryState::kReserved ||
      !entries_.is_of(entry, identity)) {
    return Status();
  }
  entries_.pin(entry);
  std::uint64_t good = 0;
  std::uint64_t bad = 0;
  checks_.verify(lock, {entry}, &good, &bad);
  *dropped = bad != 0;
  return Status();
}

// ---- writing

Status Pool::reserve(const ReserveRequest& request, ReserveResult* result) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_count(request.n_keys));
  if (request.record_bytes == 0)
    return Status(StatusCode::kBadArgument, "record_bytes: must be positive");
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (!rows_.is_claimed(request.row))
    return Status(StatusCode::kNotFound, "row: not claimed", request.row);
  policy_.tell_time(time_ns());
  reservations_.reserve(request, result);
  return Status();
}

Status Pool::commit(std::uint64_t ticket, std::span<const std::uint32_t> indices, bool check,
                    std::uint8_t* outcomes) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::fill_n(outcomes, indices.size(), static_cast<std::uint8_t>(CommitOutcome::kNotReserved));
  std::vector<std::uint32_t> pinned;
  Key identity;
  if (!reservations_.begin_commit(ticket, indices, &pinned, &identity)) return Status();
  std::vector<std::uint32_t> lengths;
  if (check) lengths = checks_.match(lock, pinned, identity);
  if (is_closed()) {
    for (const std::uint32_t entry : pinned) {
      if (entry != kNoEntry) entries_.unpin(entry);
    }
    return Status();
  }
  reservations_.end_commit(ticket, indices, pinned, lengths, outcomes);
  return Status();
}

std::uint64_t Pool::abort(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                          bool all) noexcept {
  const std::lock_guard lock(mutex_);
  return is_closed() ? 0 : reservations_.abort(ticket, indices, all);
}

// ---- learning

std::uint64_t Pool::time_ns() const noexcept {
  const std::uint64_t set_ns = time_ns_.load(std::memory_order_relaxed);
  return set_ns != 0 ? set_ns : monotonic_ns();
}

std::vector<SampledChunk> Pool::note_keys(const std::uint8_t* keys, std::size_t n_chunks,
                                          std::size_t n_slices) {
  request_log_.add(keys, n_chunks, n_slices, time_ns());
  return shadows_.sample(keys, n_chunks, n_slices);
}

void Pool::missed(const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices,
                  std::uint32_t tenant) noexcept {
  const std::vector<SampledChunk> sampled = note_keys(keys, n_keys, 1);
  const std::lock_guard lock(mutex_);
  if (!is_closed()) begin_request(sampled, n_keys, n_slices, tenant, {});
}

std::size_t Pool::hint(const std::uint8_t* keys, std::size_t n_keys, std::uint8_t next) noexcept {
  constexpr std::size_t kAtOnce = 512;  // before other threads get the mutex
  const std::uint64_t now_ns = time_ns();
  std::vector<Key> chain;  // from its end to its beginning
  Hint hint{next, 0};
  for (bool more = true; more;) {
    const std::lock_guard lock(mutex_);
    if (is_closed()) return 0;
    policy_.tell_time(now_ns);
    std::uint32_t entry = kNoEntry;
    if (chain.empty()) {
      const std::vector<std::uint32_t>& found = entries_.find(keys, n_keys);
      const auto last = std::find_if(found.begin(), found.end(),
                                     [](std::uint32_t one) { return one != kNoEntry; });
      if (last == found.end()) return 0;
      entry = *last;
      const std::uint64_t tenant = load_word(entries_.index.cold(entry).tenant);
      hint.group = static_cast<std::uint8_t>(tenant % Hint::kGroups);
    } else if (const std::uint32_t below = entries_.index.find(chain.back()); below != kNoEntry) {
      entry = entries_.index.parent(below);  // unless it has left meanwhile
    }
    for (std::size_t n = 0; n < kAtOnce && entry != kNoEntry; ++n) {
      if (policy_.hint(entry, hint)) entries_.store_use(entry);
      chain.push_back(entries_.index.key(entry));
      entry = entries_.index.parent(entry);
    }
    more = entry != kNoEntry && chain.size() < kMaxAncestors;
  }
  std::reverse(chain.begin(), chain.end());
  const auto* of_chain = reinterpret_cast<const std::uint8_t*>(chain.data());
  request_log_.add(of_chain, chain.size(), 1, now_ns, hint);
  const std::vector<SampledChunk> sampled = shadows_.sample(of_chain, chain.size(), 1);
  const std::lock_guard lock(mutex_);
  shadows_.add(sampled, {.monotonic_ns = now_ns, .hint = hint});
  return chain.size();
}

void Pool::begin_request(const std::vector<SampledChunk>& sampled, std::size_t n_chunks,
                         std::size_t n_slices, std::uint32_t tenant,
                         std::span<const std::uint32_t> spans) noexcept {
  const std::uint64_t now_ns = time_ns();
  policy_.tell_time(now_ns);
  if (std::any_of(spans.begin(), spans.end(), [](auto span) { return span != 0; }))
    policy_.use_age_alone();
  if (n_chunks == 0) return;
  policy_.count_request();
  shadows_.add(sampled, {now_ns, n_chunks, n_slices, tenant});
}

bool Pool::learn() noexcept {
  constexpr int kSamples = 2048;
  constexpr int kAtOnce = 64;  // before other threads get the mutex
  constexpr std::uint64_t kMinShadowed = 64;
  const std::lock_guard learning(learning_);
  Lesson lesson;
  Shadows::Waiting waiting;
  std::size_t capacity = 0;  // entries, if all are as long as those that are in use now
  bool is_due = false;
  bool has_l2 = false;
  bool ages_alone = false;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed()) return false;
    is_due = policy_.begin_lesson(&lesson);
    ages_alone = policy_.uses_age_alone();
    waiting = shadows_.take();
    has_l2 = (load_word(entries_.index.header().flags) & kIndexFlagHasL2) != 0;
    const std::uint64_t in_use = entries_.touched - entries_.free.size();
    if (in_use >= kMinShadowed)
      capacity = static_cast<std::size_t>(extents_bytes() / (entries_.used_bytes / in_use));
    Tenants::Account others{entries_.used_bytes, in_use};
    for (TenantShare& share : shadows_.shares()) {
      const auto found = tenants_.accounts.find(share.tenant);
      auto account = found == tenants_.accounts.end() ? Tenants::Account{} : found->second;
      if (&share == &shadows_.shares().back()) account = others;
      others.bytes -= share.bytes = account.bytes;
      others.n_entries -= share.entries = account.n_entries;
    }
  }
  shadows_.run(waiting, capacity, ages_alone ? "LRU" : "VALUE", !has_l2);
  {
    Forecasts forecasts = shadows_.forecasts();
    const std::lock_guard lock(mutex_);
    std::swap(forecasts_, forecasts);
  }
  if (!is_due) return false;
  for (int taken = 0; taken < kSamples; taken += kAtOnce) {
    const std::lock_guard lock(mutex_);
    const auto n_entries = static_cast<std::uint32_t>(entries_.touched);
    policy_.sample(&lesson, kAtOnce, n_entries, static_cast<float>(n_entries) / kSamples);
  }
  std::vector<Row> rows = learner_.learn(lesson);
  const std::lock_guard lock(mutex_);
  policy_.teach(std::move(rows));
  return true;
}

Forecasts Pool::forecasts() noexcept {
  const std::lock_guard lock(mutex_);
  return forecasts_;
}

void Pool::set_model(const Key& identity, std::uint8_t model) noexcept {
  const std::lock_guard lock(mutex_);
  policy_.set_model(identity.word[0], model);
}

void Pool::set_cost(std::uint8_t model, double cost) noexcept {
  const std::lock_guard lock(mutex_);
  policy_.set_cost(model, cost);
}

std::string Pool::lessons() noexcept {
  const std::lock_guard learning(learning_);
  return learner_.save();
}

// ---- administration

bool Pool::is_tail(const Key& key) noexcept {
  const std::lock_guard lock(mutex_);
  const std::uint32_t entry = is_closed() ? kNoEntry : entries_.index.find(key);
  return entry != kNoEntry && entries_.local[entry].is_tail();
}

bool Pool::is_reserved(const Key& key) noexcept {
  const std::lock_guard lock(mutex_);
  const std::uint32_t entry = is_closed() ? kNoEntry : entries_.index.find(key);
  return entry != kNoEntry && entries_.index.state(entry) == EntryState::kReserved;
}

std::uint64_t Pool::remove(const std::uint8_t* keys, std::size_t n_keys) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  return departures_.remove(keys, n_keys, Cause::kRemoved);
}

ClearResult Pool::clear(std::int64_t tenant) noexcept {
  constexpr std::uint32_t kStep = 512;  // entries, before other threads get the mutex
  ClearResult result;
  for (std::uint64_t begin = 0;; begin += kStep) {
    const std::lock_guard lock(mutex_);
    if (is_closed() || begin >= entries_.touched) return result;
    const std::uint64_t end = std::min(begin + kStep, entries_.touched);
    departures_.clear(begin, end, tenant, &result);
  }
}

ClearedInUse Pool::cleared_in_use(std::int64_t tenant) noexcept {
  const std::lock_guard lock(mutex_);
  return is_closed() ? ClearedInUse{} : departures_.cleared_in_use(tenant);
}

bool Pool::set_quota(std::uint32_t tenant, std::int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  return is_closed() || tenants_.set_quota(tenant, bytes);
}

std::vector<Key> Pool::take_verified() noexcept {
  const std::lock_guard lock(mutex_);
  return std::exchange(checks_.verified, {});
}

std::uint64_t Pool::ready_tags(std::uint64_t from, std::uint64_t max_entries,
                               std::vector<std::uint64_t>* tags) noexcept {
  const std::lock_guard lock(mutex_);
  return is_closed() ? 0 : entries_.ready_tags(from, max_entries, tags);
}

PoolStats Pool::stats() noexcept {
  const std::lock_guard lock(mutex_);
  PoolStats stats{};
  static_cast<EntryCounts&>(stats) = entries_.counts;
  static_cast<TailCounts&>(stats) = entries_.tails;
  static_cast<ReservationCounts&>(stats) = reservations_.counts;
  static_cast<LeaseCounts&>(stats) = leases_.counts;
  static_cast<DepartureCounts&>(stats) = departures_.counts;
  static_cast<AdoptionCounts&>(stats) = adoption_counts_;
  stats.extents_bytes = extents_bytes();
  stats.used_bytes = entries_.used_bytes;
  stats.slab_bytes = slabs_.slab_bytes();
  stats.unusable_bytes = slabs_.unusable_bytes();
  stats.largest_allocatable_bytes = slabs_.largest_allocatable();
  stats.leased_bytes = leases_.leased_bytes;
  stats.pinned_bytes = entries_.pinned_bytes;
  stats.blocked_bytes = entries_.blocked_bytes;
  stats.lease_tickets = leases_.leases.size();
  stats.reservations = reservations_.reservations.size();
  stats.holds = holds_;
  stats.prefaulted_bytes = prefault_.done_bytes();
  stats.prefault_error = static_cast<std::uint64_t>(prefault_.error());
  stats.entry_capacity = entries_.index.capacity();
  stats.policy = policy_.name();
  stats.free_bytes = stats.extents_bytes - stats.used_bytes;
  stats.fragmentation = stats.free_bytes == 0
                            ? 0.0
                            : 1.0 - static_cast<double>(stats.largest_allocatable_bytes) /
                                        static_cast<double>(stats.free_bytes);
  stats.rows_claimed = rows_.count();
  stats.rows_capacity = kRowCount - 1;
  stats.backed_bytes = segment_->extents_backing.backed_bytes();
  stats.missing_bytes = segment_->missing_bytes();
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    const SlabMap::Class& size_class = slabs_.size_class(cls);
    if (size_class.extent_bytes == 0 || size_class.capacity == 0) continue;
    stats.classes.push_back({size_class.extent_bytes, size_class.used, size_class.capacity});
  }
  for (const auto& [id, account] : tenants_.accounts)
    stats.tenants.push_back({id, account.bytes, account.quota_bytes});
  return stats;
}

Hold::Hold(Hold&& other) noexcept {
  *this = std::move(other);
}

Hold& Hold::operator=(Hold&& other) noexcept {
  if (this != &other) {
    drop();
    pool_ = std::move(other.pool_);
    key_ = other.key_;
    offset_ = other.offset_;
    length_ = other.length_;
    tenant_ = other.tenant_;
    entry_ = other.entry_;
    address_ = std::exchange(other.address_, nullptr);
    reservation_ = other.reservation_;
    counted_.store(other.counted_.exchange(false, std::memory_order_acq_rel),
                   std::memory_order_release);
    held_.store(other.held_.exchange(false, std::memory_order_acq_rel), std::memory_order_release);
  }
  return *this;
}

void Hold::drop() noexcept {
  if (held_.exchange(false, std::memory_order_acq_rel)) {
    pool_->drop_hold(entry_, counted_.exchange(false, std::memory_order_acq_rel));
  }
}

void Hold::uncount() noexcept {
  if (!counted_.exchange(false, std::memory_order_acq_rel)) return;
  const std::lock_guard lock(pool_->mutex_);
  pool_->uncount(entry_);
}

void Pool::fill_hold(std::uint32_t entry, bool reservation, Hold* out) {
  entries_.pin(entry);
  holds_ += 1;
  Hold hold;
  hold.pool_ = shared_from_this();
  hold.key_ = entries_.index.key(entry);
  hold.offset_ = entries_.index.offset(entry);
  hold.length_ = entries_.index.length(entry);
  hold.tenant_ = entries_.tenant(entry);
  hold.entry_ = entry;
  hold.address_ = entries_.address(entry);
  hold.reservation_ = reservation;
  hold.held_.store(true, std::memory_order_release);
  *out = std::move(hold);
}

Status Pool::hold(const Key& key, const std::uint8_t* identity, Hold* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = entries_.index.find(key);
  if (entry == kNoEntry || entries_.index.state(entry) != EntryState::kReady ||
      !entries_.is_of(entry, identity)) {
    return Status(StatusCode::kNotFound, "key: not in the pool");
  }
  fill_hold(entry, false, out);
  return Status();
}

Status Pool::hold_reserved(std::uint64_t ticket, std::uint64_t index, Hold* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = reservations_.item(ticket, index);
  if (entry == kNoEntry) return Status(StatusCode::kNotFound, "item: not reserved");
  fill_hold(entry, true, out);
  return Status();
}

Status Pool::hold_batch(const std::uint8_t* keys, std::size_t n_keys, std::uint64_t limit_bytes,
                        Hold* out, std::uint8_t* left_out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::vector<std::uint32_t>& found = entries_.find(keys, n_keys);
  for (std::size_t i = 0; i < n_keys; ++i) {
    const std::uint32_t entry = found[i];
    if (entry == kNoEntry || entries_.index.state(entry) != EntryState::kReady) {
      left_out[i] = static_cast<std::uint8_t>(LeftOut::kAbsent);
      continue;
    }
    const std::uint64_t bytes = entries_.extent_bytes(entry);
    const auto known = counted_.find(entry);
    if (known == counted_.end() && counted_bytes_ + bytes > limit_bytes) {
      left_out[i] = static_cast<std::uint8_t>(LeftOut::kLimit);
      continue;
    }
    if (known == counted_.end()) {
      counted_.emplace(entry, Counted{1, bytes});
      counted_bytes_ += bytes;
    } else {
      known->second.holds += 1;
    }
    fill_hold(entry, false, &out[i]);
    out[i].counted_.store(true, std::memory_order_release);
    left_out[i] = static_cast<std::uint8_t>(LeftOut::kHeld);
  }
  return Status();
}

std::uint64_t Pool::counted_bytes() noexcept {
  const std::lock_guard lock(mutex_);
  return counted_bytes_;
}

void Pool::uncount(std::uint32_t entry) noexcept {
  const auto known = counted_.find(entry);
  if (--known->second.holds != 0) return;
  counted_bytes_ -= known->second.bytes;
  counted_.erase(known);
}

void Pool::drop_hold(std::uint32_t entry, bool counted) noexcept {
  const std::lock_guard lock(mutex_);
  holds_ -= 1;
  if (counted) uncount(entry);
  if (is_closed()) {
    // The files may be another server's by now.
    entries_.local[entry].pins -= 1;
    return;
  }
  entries_.unpin(entry);
  departures_.settle(entry);
}

}  // namespace kvstrata
