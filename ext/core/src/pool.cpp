// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Pool: making and opening one, its entries, holds, events. The rest of the class is in
// pool_read.cpp, pool_write.cpp, pool_room.cpp, pool_rows.cpp, pool_adopt.cpp and
// pool_validate.cpp.
#include "kvstrata/pool.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <limits>
#include <utility>

#include "kvstrata/record.h"

namespace kvstrata {

namespace {

std::uint64_t realtime_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000ULL +
         static_cast<std::uint64_t>(now.tv_nsec);
}

Status require_fresh(int fd, const char* message) noexcept {
  struct stat info{};
  if (fstat(fd, &info) != 0)
    return Status(StatusCode::kOsError, "fstat of a pool file failed", errno);
  if (info.st_size != 0) return Status(StatusCode::kExists, message, info.st_size);
  return Status();
}

}  // namespace

// ---- Hold

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
    generation_ = other.generation_;
    tenant_ = other.tenant_;
    entry_ = other.entry_;
    address_ = std::exchange(other.address_, nullptr);
    reservation_ = other.reservation_;
    held_.store(other.held_.exchange(false, std::memory_order_acq_rel), std::memory_order_release);
  }
  return *this;
}

void Hold::drop() noexcept {
  if (held_.exchange(false, std::memory_order_acq_rel)) pool_->drop_hold(entry_);
}

// ---- making a pool

Status Pool::check_options(const PoolOptions& options) noexcept {
  if (make_policy(options.policy, nullptr) == nullptr) {
    return Status(StatusCode::kBadArgument, "policy: must be one of LRU, ARC, S3FIFO, noop");
  }
  if (!(options.watermark >= 0.0 && options.watermark <= 1.0)) {
    return Status(StatusCode::kBadArgument, "watermark: must be between 0 and 1");
  }
  if (!(options.watermark_ratio >= 0.0 && options.watermark_ratio <= 1.0)) {
    return Status(StatusCode::kBadArgument, "watermark: the evicted share must be between 0 and 1");
  }
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
  const std::shared_ptr<Pool> pool(new Pool());
  KVSTRATA_RETURN_IF_ERROR(pool->back_index(index_fd, layout.file_bytes, layout.hot_offset, 0, 0));
  KVSTRATA_RETURN_IF_ERROR(
      Mapping::map(index_fd, layout.file_bytes, true, true, &pool->index_mapping_));
  pool->index_ = IndexView(pool->index_mapping_.address(), layout);
  IndexHeader& header = pool->index_.header();
  header.format_version = kIndexFormatVersion;
  if (getrandom(header.pool_id, sizeof header.pool_id, 0) != sizeof header.pool_id) {
    return Status(StatusCode::kOsError, "getrandom failed", errno);
  }
  header.extents_bytes = options.extents_bytes;
  header.entry_capacity = layout.entry_capacity;
  header.bucket_lines = layout.bucket_lines;
  store_word<std::uint64_t>(pool->index_.row(0).claimed, 1);
  KVSTRATA_RETURN_IF_ERROR(pool->start(layout, extents_fd, options));
  pool->epoch_ = realtime_ns();
  store_word(header.epoch, pool->epoch_);
  store_word(pool->index_.row(0).epoch, pool->epoch_);
  store_word(header.magic, kIndexMagic);
  pool->index_.seal_static_header();
  pool->heartbeat();
  *out = pool;
  return Status();
}

// Memory for the first `head_bytes` of the index and for a part of its cold entries. Entries that
// were never used get theirs in take_entry.
Status Pool::back_index(int index_fd, std::uint64_t file_bytes, std::uint64_t head_bytes,
                        std::uint64_t cold_offset, std::uint64_t cold_bytes) {
  if (index_backing_.bytes() == 0)
    KVSTRATA_RETURN_IF_ERROR(index_backing_.attach(index_fd, file_bytes));
  if (index_backing_.ensure(0, head_bytes) && index_backing_.ensure(cold_offset, cold_bytes))
    return Status();
  return Status(StatusCode::kOsError, "the file system has no memory for the index",
                index_backing_.error());
}

// What create and adopt have in common: the mappings beside the index, the server's own tables.
Status Pool::start(const IndexLayout& layout, int extents_fd, const PoolOptions& options) {
  options_ = options;
  const std::uint64_t extents_bytes = index_.header().extents_bytes;
  KVSTRATA_RETURN_IF_ERROR(Mapping::map(extents_fd, extents_bytes, true, true, &extents_mapping_));
  KVSTRATA_RETURN_IF_ERROR(extents_backing_.attach(extents_fd, extents_bytes));
  extents_base_ = static_cast<std::uint8_t*>(extents_mapping_.address());
  KVSTRATA_RETURN_IF_ERROR(
      Mapping::anonymous(layout.entry_capacity * sizeof(EntryLocal), &local_mapping_));
  local_ = static_cast<EntryLocal*>(local_mapping_.address());
  policy_ = make_policy(options.policy, local_);
  slabs_.attach(extents_bytes, &index_.header().slab_bytes, index_.header().slab_table);
  return Status();
}

Pool::~Pool() {
  close();
}

void Pool::close() noexcept {
  {
    // What runs now ends first: afterwards the files may be another server's.
    const std::lock_guard lock(mutex_);
    closed_.store(true, std::memory_order_release);
  }
  prefault_.stop();
  index_backing_.close();
  extents_backing_.close();
}

Status Pool::check_open() const noexcept {
  if (closed_.load(std::memory_order_acquire))
    return Status(StatusCode::kClosed, "the pool was closed");
  return Status();
}

std::span<const std::uint8_t, 16> Pool::pool_id() const noexcept {
  return std::span<const std::uint8_t, 16>(index_.header().pool_id);
}

void Pool::heartbeat() noexcept {
  if (!is_closed()) store_word(index_.header().heartbeat_ns, monotonic_ns());
}

void Pool::set_has_l2(bool has_l2) noexcept {
  if (!is_closed()) store_word(index_.header().flags, has_l2 ? kIndexFlagHasL2 : 0);
}

Status Pool::prefault_start(std::uint32_t threads) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  return prefault_.start(extents_base_, &extents_backing_, threads);
}

std::uint64_t Pool::retry_missing() noexcept {
  const std::lock_guard lock(mutex_);  // close() ends what is used here
  if (is_closed()) return 0;
  index_backing_.try_again();
  extents_backing_.try_again();
  return index_backing_.missing_bytes() + extents_backing_.missing_bytes();
}

// ---- entries

bool Pool::may_become(EntryState from, EntryState to) noexcept {
  using enum EntryState;
  switch (from) {
    case kFree:
      return to == kReserved;
    case kReserved:
      return to == kReady || to == kQuarantined || to == kFree;
    case kReady:
      return to == kUnverified || to == kQuarantined || to == kFree;
    case kUnverified:
      return to == kReady || to == kQuarantined || to == kFree;
    case kQuarantined:
      return to == kFree;
  }
  return false;
}

std::uint64_t Pool::extent_bytes(std::uint32_t entry) const noexcept {
  return SlabMap::round_up(index_.length(entry));
}

void Pool::count_state(std::uint32_t entry, EntryState state, int sign) noexcept {
  const auto at = static_cast<std::size_t>(state);
  counters_.entries[at] += static_cast<std::uint64_t>(sign);
  counters_.bytes[at] += static_cast<std::uint64_t>(sign) * extent_bytes(entry);
}

// The only place that changes a state.
void Pool::set_state(std::uint32_t entry, EntryState state) noexcept {
  const EntryState from = index_.state(entry);
  assert(may_become(from, state));
  const auto holds_back = [](EntryState s) {
    return s == EntryState::kReserved || s == EntryState::kQuarantined ? 1 : 0;
  };
  if (from != EntryState::kFree) count_state(entry, from, -1);
  if (state != EntryState::kFree) count_state(entry, state, 1);
  index_.set_state(entry, state);
  // A commit is a use: what reached the cold end while it was being written is the newest of all.
  const bool used = from == EntryState::kReserved && state == EntryState::kReady;
  change_blockers(entry, used, [&](EntryLocal& local) {
    local.held_back =
        static_cast<std::uint8_t>(local.held_back + holds_back(state) - holds_back(from));
  });
}

void Pool::pin(std::uint32_t entry) noexcept {
  if (local_[entry].pins == 0) pinned_bytes_ += extent_bytes(entry);
  change_blockers(entry, false, [](EntryLocal& local) { local.pins += 1; });
}

void Pool::unpin(std::uint32_t entry, bool used) noexcept {
  assert(local_[entry].pins > 0);
  if (local_[entry].pins == 1) pinned_bytes_ -= extent_bytes(entry);
  change_blockers(entry, used, [](EntryLocal& local) { local.pins -= 1; });
}

std::uint32_t Pool::take_entry() noexcept {
  if (!free_entries_.empty()) {
    const std::uint32_t entry = free_entries_.back();
    free_entries_.pop_back();
    return entry;
  }
  if (entries_touched_ >= index_.capacity()) return kNoEntry;
  const auto entry = static_cast<std::uint32_t>(entries_touched_);
  const auto offset_of = [&](const void* address) {
    return static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(address) -
                                      static_cast<std::uint8_t*>(index_mapping_.address()));
  };
  if (!index_backing_.ensure(offset_of(&index_.hot(entry)), sizeof(HotEntry)) ||
      !index_backing_.ensure(offset_of(&index_.cold(entry)), sizeof(ColdEntry))) {
    return kNoEntry;
  }
  entries_touched_ += 1;
  store_word(index_.header().entries_touched, entries_touched_);
  return entry;
}

void Pool::give_entry(std::uint32_t entry) noexcept {
  free_entries_.push_back(entry);
}

void Pool::init_local(std::uint32_t entry, const SlabPlace& place) noexcept {
  EntryLocal& local = local_[entry];
  local = EntryLocal{};
  local.cls = static_cast<std::uint8_t>(slabs_.run(place.run).cls);
  local.run = static_cast<std::uint8_t>(place.run);
  local.slot = place.slot;
  local.first_child = local.next_sibling = local.previous_sibling = kNoEntry;
  local.tenant_previous = local.tenant_next = kNoEntry;
}

void Pool::add_child(std::uint32_t parent, std::uint32_t child) noexcept {
  EntryLocal& up = local_[parent];
  EntryLocal& down = local_[child];
  index_.set_parent(child, parent);
  down.previous_sibling = kNoEntry;
  down.next_sibling = up.first_child;
  if (up.first_child != kNoEntry) local_[up.first_child].previous_sibling = child;
  up.first_child = child;
  up.children += 1;
}

void Pool::remove_from_parent(std::uint32_t entry) noexcept {
  const std::uint32_t parent = index_.parent(entry);
  if (parent == kNoEntry) return;
  EntryLocal& up = local_[parent];
  EntryLocal& down = local_[entry];
  if (down.previous_sibling != kNoEntry) {
    local_[down.previous_sibling].next_sibling = down.next_sibling;
  } else {
    up.first_child = down.next_sibling;
  }
  if (down.next_sibling != kNoEntry)
    local_[down.next_sibling].previous_sibling = down.previous_sibling;
  down.next_sibling = down.previous_sibling = kNoEntry;
  index_.set_parent(entry, kNoEntry);
  up.children -= 1;
  if (up.is_victim()) policy_->unblocked(parent, false);
}

void Pool::orphan_children(std::uint32_t entry) noexcept {
  EntryLocal& local = local_[entry];
  for (std::uint32_t child = local.first_child; child != kNoEntry;) {
    const std::uint32_t next = local_[child].next_sibling;
    index_.set_parent(child, kNoEntry);
    local_[child].next_sibling = local_[child].previous_sibling = kNoEntry;
    child = next;
  }
  local.first_child = kNoEntry;
  local.children = 0;
}

bool Pool::is_ancestor(std::uint32_t candidate, std::uint32_t entry,
                       std::uint64_t* budget) const noexcept {
  for (std::uint32_t at = entry; at != kNoEntry; at = index_.parent(at)) {
    if (at == candidate || *budget == 0) return true;
    *budget -= 1;
  }
  return false;
}

void Pool::touch(std::uint32_t entry) noexcept {
  EntryLocal& local = local_[entry];
  stamp_ += 1;
  store_word(index_.cold(entry).stamp, stamp_, std::memory_order_relaxed);
  slabs_.run(local.run).newest = stamp_;
  policy_->touch(entry);
  if ((local.marks & kMarkTenantListed) != 0) {
    tenant_unlink(entry);
    tenant_link(entry);
  }
}

Pool::RowBits Pool::rows_of(std::uint32_t entry) const noexcept {
  const ColdEntry& cold = index_.cold(entry);
  return RowBits{{load_word(cold.rows[0]), load_word(cold.rows[1])}};
}

void Pool::set_rows(std::uint32_t entry, const RowBits& bits) noexcept {
  ColdEntry& cold = index_.cold(entry);
  store_word(cold.rows[0], bits.word[0]);
  store_word(cold.rows[1], bits.word[1]);
}

Pool::RowBits Pool::old_rows_of(std::uint32_t entry) const noexcept {
  const auto found = old_rows_.find(entry);
  return found == old_rows_.end() ? RowBits{} : found->second.bits();
}

void Pool::release_owner(std::uint32_t entry) noexcept {
  ColdEntry& cold = index_.cold(entry);
  const std::uint64_t owner = load_word(cold.owner);
  if (owner < kRowCount) row_bytes_[owner] -= extent_bytes(entry);
  store_word(cold.owner, kNoOwner);
}

void Pool::emit(EventKind kind, const Key& key, std::uint64_t bytes) {
  if (events_.size() >= kEventRing) {
    events_.pop_front();
    counters_.events_lost += 1;
  }
  events_.push_back({kind, key, bytes});
}

void Pool::drop(std::uint32_t entry, Cause cause) {
  const Key key = index_.key(entry);
  const std::uint64_t bytes = extent_bytes(entry);
  const bool evicted = cause == Cause::kPolicy || cause == Cause::kWindow ||
                       cause == Cause::kQuota || cause == Cause::kWatermark;
  const bool was_reserved = index_.state(entry) == EntryState::kReserved;
  policy_->remove(entry, key.word[0], evicted);
  index_.unlink(entry, key);
  remove_from_parent(entry);
  orphan_children(entry);
  tenant_charge(entry, -1);
  switch (cause) {
    case Cause::kPolicy:
      counters_.evicted_by_policy += 1;
      break;
    case Cause::kWindow:
      counters_.evicted_by_window += 1;
      break;
    case Cause::kQuota:
      counters_.evicted_by_quota += 1;
      break;
    case Cause::kWatermark:
      counters_.evicted_by_watermark += 1;
      break;
    case Cause::kCleared:
      counters_.cleared_entries += 1;
      emit(EventKind::kCleared, key, bytes);
      break;
    case Cause::kRemoved:
    case Cause::kReturned:
      counters_.cleared_entries += 1;
      emit(cause == Cause::kRemoved ? EventKind::kRemoved : EventKind::kReturned, key, bytes);
      break;
    case Cause::kCorrupt:
      counters_.corrupt_entries += 1;
      emit(EventKind::kCorrupt, key, bytes);
      break;
    case Cause::kAborted:
      break;
  }
  if (evicted) {
    counters_.evicted_entries += 1;
    counters_.evicted_bytes += bytes;
    emit(EventKind::kEvicted, key, bytes);
  }
  const EntryLocal& local = local_[entry];
  const bool touched = local.pins != 0 || local.leases != 0 || old_rows_.contains(entry);
  if (touched) {
    set_state(entry, EntryState::kQuarantined);
    quarantine_.insert(entry);
    counters_.quarantined_entries += 1;
    emit(EventKind::kQuarantined, key, bytes);
    return;
  }
  if (was_reserved) release_owner(entry);
  used_bytes_ -= bytes;
  set_state(entry, EntryState::kFree);
  slabs_.free(local.run, local.slot);
  give_entry(entry);
}

void Pool::free_if_untouched(std::uint32_t entry) {
  const EntryLocal& local = local_[entry];
  if (index_.state(entry) != EntryState::kQuarantined) return;
  if (local.pins != 0 || local.leases != 0 || old_rows_.contains(entry)) return;
  release_owner(entry);
  quarantine_.erase(entry);
  used_bytes_ -= extent_bytes(entry);
  set_state(entry, EntryState::kFree);
  slabs_.free(local.run, local.slot);
  give_entry(entry);
}

// ---- holds

void Pool::fill_hold(std::uint32_t entry, bool reservation, Hold* out) {
  pin(entry);
  holds_ += 1;
  Hold hold;
  hold.pool_ = shared_from_this();
  hold.key_ = index_.key(entry);
  hold.offset_ = index_.offset(entry);
  hold.length_ = index_.length(entry);
  hold.generation_ = index_.generation(entry);
  hold.tenant_ = static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant));
  hold.entry_ = entry;
  hold.address_ = extents_base_ + hold.offset_;
  hold.reservation_ = reservation;
  hold.held_.store(true, std::memory_order_release);
  *out = std::move(hold);
}

Status Pool::hold(const Key& key, Hold* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = index_.find(key);
  if (entry == kNoEntry || index_.state(entry) != EntryState::kReady) {
    return Status(StatusCode::kNotFound, "key: not in the pool");
  }
  fill_hold(entry, false, out);
  return Status();
}

Status Pool::hold_reserved(std::uint64_t ticket, std::uint64_t index, Hold* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const auto found = reservations_.find(ticket);
  if (found == reservations_.end() || index >= found->second.items.size() ||
      found->second.items[index] == kNoEntry) {
    return Status(StatusCode::kNotFound, "item: not reserved");
  }
  fill_hold(found->second.items[index], true, out);
  return Status();
}

void Pool::drop_hold(std::uint32_t entry) noexcept {
  const std::lock_guard lock(mutex_);
  holds_ -= 1;
  if (is_closed()) {
    // The files may be another server's by now.
    local_[entry].pins -= 1;
    return;
  }
  unpin(entry, false);
  free_if_untouched(entry);
}

// ---- events

std::vector<Event> Pool::take_events(std::uint64_t* lost) noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<Event> events(events_.begin(), events_.end());
  events_.clear();
  *lost = counters_.events_lost;
  return events;
}

PoolStats Pool::stats() noexcept {
  const std::lock_guard lock(mutex_);
  PoolStats stats = counters_;
  stats.extents_bytes = extents_bytes();
  stats.used_bytes = used_bytes_;
  stats.slab_bytes = slabs_.slab_bytes();
  stats.unusable_bytes = slabs_.unusable_bytes();
  stats.largest_allocatable_bytes = slabs_.largest_allocatable();
  stats.leased_bytes = leased_bytes_;
  stats.pinned_bytes = pinned_bytes_;
  stats.blocked_bytes = blocked_bytes_;
  stats.lease_tickets = leases_.size();
  stats.reservations = reservations_.size();
  stats.holds = holds_;
  stats.prefaulted_bytes = prefault_.done_bytes();
  stats.entry_capacity = index_.capacity();
  stats.policy = policy_->name();
  const std::uint64_t free_bytes = extents_bytes() - used_bytes_;
  stats.fragmentation = free_bytes == 0
                            ? 0.0
                            : 1.0 - static_cast<double>(stats.largest_allocatable_bytes) /
                                        static_cast<double>(free_bytes);
  stats.rows_claimed = rows_claimed_;
  stats.rows_capacity = kRowCount - 1;
  stats.backed_bytes = extents_backing_.there_bytes();
  stats.missing_bytes = extents_backing_.missing_bytes() + index_backing_.missing_bytes();
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    const SlabMap::Class& size_class = slabs_.size_class(cls);
    if (size_class.extent_bytes == 0 || size_class.capacity == 0) continue;
    stats.classes.push_back({size_class.extent_bytes, size_class.used, size_class.capacity});
  }
  for (const auto& [id, tenant] : tenants_)
    stats.tenants.push_back({id, tenant.bytes, tenant.quota_bytes});
  return stats;
}

}  // namespace kvstrata
