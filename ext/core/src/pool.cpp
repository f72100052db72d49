// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
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

constexpr std::uint64_t kNoOwner = 0xFFFF;
constexpr std::uint32_t kMaxAncestors = 65'536;
constexpr std::uint64_t kRelinkBudget = 1'000'000;
constexpr int kQuotaLookSteps = 256;
constexpr std::uint8_t kMarkVisited = 1;
constexpr std::uint8_t kMarkTenantListed = 2;

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

// What create and adopt have in common: the mappings beside the index, the server's own tables.
Status Pool::start(const IndexLayout& layout, int extents_fd, const PoolOptions& options) {
  options_ = options;
  const std::uint64_t extents_bytes = index_.header().extents_bytes;
  KVSTRATA_RETURN_IF_ERROR(Mapping::map(extents_fd, extents_bytes, true, true, &extents_mapping_));
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
  return prefault_.start(extents_base_, extents_bytes(), threads);
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
  const auto entry = static_cast<std::uint32_t>(entries_touched_++);
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

Pool::RowMask Pool::rows_of(std::uint32_t entry) const noexcept {
  const ColdEntry& cold = index_.cold(entry);
  return RowMask{{load_word(cold.rows[0]), load_word(cold.rows[1])}};
}

void Pool::set_rows(std::uint32_t entry, const RowMask& mask) noexcept {
  ColdEntry& cold = index_.cold(entry);
  store_word(cold.rows[0], mask.word[0]);
  store_word(cold.rows[1], mask.word[1]);
}

Pool::RowMask Pool::old_rows_of(std::uint32_t entry) const noexcept {
  const auto found = old_rows_.find(entry);
  return found == old_rows_.end() ? RowMask{} : found->second;
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

// ---- tenants

void Pool::tenant_link(std::uint32_t entry) noexcept {
  const auto found =
      tenants_.find(static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant)));
  if (found == tenants_.end()) return;
  Tenant& tenant = found->second;
  EntryLocal& local = local_[entry];
  local.tenant_previous = kNoEntry;
  local.tenant_next = tenant.hot;
  if (tenant.hot != kNoEntry) local_[tenant.hot].tenant_previous = entry;
  tenant.hot = entry;
  if (tenant.cold == kNoEntry) tenant.cold = entry;
  local.marks |= kMarkTenantListed;
}

void Pool::tenant_unlink(std::uint32_t entry) noexcept {
  EntryLocal& local = local_[entry];
  if ((local.marks & kMarkTenantListed) == 0) return;
  Tenant& tenant = tenants_[static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant))];
  if (local.tenant_previous != kNoEntry) {
    local_[local.tenant_previous].tenant_next = local.tenant_next;
  } else {
    tenant.hot = local.tenant_next;
  }
  if (local.tenant_next != kNoEntry) {
    local_[local.tenant_next].tenant_previous = local.tenant_previous;
  } else {
    tenant.cold = local.tenant_previous;
  }
  local.tenant_previous = local.tenant_next = kNoEntry;
  local.marks &= static_cast<std::uint8_t>(~kMarkTenantListed);
}

// Adds the entry to its tenant's account, or takes it off (sign -1).
void Pool::tenant_charge(std::uint32_t entry, std::int64_t sign) {
  const auto id = static_cast<std::uint32_t>(load_word(index_.cold(entry).tenant));
  Tenant& tenant = tenants_[id];
  if (sign > 0) {
    tenant.bytes += extent_bytes(entry);
    if (tenant.quota_bytes >= 0) tenant_link(entry);
    return;
  }
  tenant_unlink(entry);
  tenant.bytes -= extent_bytes(entry);
  if (tenant.bytes == 0 && tenant.quota_bytes < 0) tenants_.erase(id);
}

void Pool::set_quota(std::uint32_t id, std::int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return;
  Tenant& tenant = tenants_[id];
  const bool listed = tenant.quota_bytes >= 0;
  tenant.quota_bytes = bytes < 0 ? -1 : bytes;
  if (bytes < 0) {
    while (tenant.hot != kNoEntry)
      tenant_unlink(tenant.hot);
    if (tenant.bytes == 0) tenants_.erase(id);
  } else if (!listed) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t entry = 0; entry < entries_touched_; ++entry) {
      const EntryState state = index_.state(entry);
      if (state == EntryState::kFree || state == EntryState::kQuarantined) continue;
      if (load_word(index_.cold(entry).tenant) == id) members.push_back(entry);
    }
    std::sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
      return load_word(index_.cold(a).stamp) < load_word(index_.cold(b).stamp);
    });
    for (const std::uint32_t entry : members)
      tenant_link(entry);
  }
}

// ---- room

// Evicts everything in the window with all descendants, unless one of them is blocked or was used
// at or after the stamp `older_than`; then nothing changes and the window is left alone for a
// while.
bool Pool::evict_window(const SlabMap::Window& window, std::uint64_t older_than) {
  family_.clear();
  const auto visit = [&](std::uint32_t entry) {
    if ((local_[entry].marks & kMarkVisited) != 0) return;
    local_[entry].marks |= kMarkVisited;
    family_.push_back(entry);
  };
  std::uint64_t runs = 0;
  for (std::uint32_t slab = window.first; slab < window.first + window.slabs; ++slab) {
    const std::uint32_t first = slabs_.run_of(slab);
    if (first == kNoRun || (runs >> first & 1) != 0) continue;
    runs |= 1ULL << first;
    for (const std::uint32_t occupant : slabs_.run(first).slots) {
      if (occupant != 0) visit(occupant - 1);
    }
  }
  std::uint64_t newest = 0;
  bool blocked = false;
  for (std::size_t i = 0; i < family_.size() && !blocked; ++i) {
    const std::uint32_t entry = family_[i];
    blocked = local_[entry].is_blocked();
    newest = std::max(newest, load_word(index_.cold(entry).stamp));
    blocked |= newest >= older_than;
    for (std::uint32_t child = local_[entry].first_child; child != kNoEntry;
         child = local_[child].next_sibling) {
      visit(child);
    }
  }
  const auto unmark = [&](std::uint32_t entry) {
    local_[entry].marks &= static_cast<std::uint8_t>(~kMarkVisited);
  };
  if (blocked) {
    for (const std::uint32_t entry : family_)
      unmark(entry);
    for (std::uint32_t first = 0; first < kMaxSlabs; ++first) {
      if ((runs >> first & 1) == 0) continue;
      SlabMap::Run& run = slabs_.run(first);
      // A look costs the entries that were met; so many operations pass before the next one.
      run.retry_at = operations_ + family_.size() / 16;
      // Descendants elsewhere can be newer than anything in the run.
      run.newest = std::max(run.newest, newest);
    }
    return false;
  }
  // Leaves first, each followed by its ancestors as they become leaves. The family holds all
  // descendants of its members, so this reaches everybody.
  for (const std::uint32_t entry : family_) {
    std::uint32_t at = entry;
    while (at != kNoEntry && (local_[at].marks & kMarkVisited) != 0 && local_[at].children == 0) {
      const std::uint32_t parent = index_.parent(at);
      unmark(at);
      drop(at, Cause::kWindow);
      at = parent;
    }
  }
  return true;
}

// An extent for the entry, evicting what must go. False when what is left cannot be evicted.
bool Pool::make_room(std::uint32_t cls, std::uint32_t entry, SlabPlace* place) {
  std::uint64_t tried = 0;
  while (!slabs_.allocate(cls, entry, place)) {
    operations_ += 1;
    if (!policy_->evicts()) return false;
    const std::uint32_t victim = policy_->victim(cls);
    const std::uint64_t stamp = victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max()
                                                   : load_word(index_.cold(victim).stamp);
    const std::uint64_t now =
        victim == kNoEntry ? std::numeric_limits<std::uint64_t>::max() : operations_;
    SlabMap::Window window;
    if (slabs_.oldest_window(cls, now, tried, &window) && window.newest < stamp) {
      tried |= 1ULL << window.first;
      static_cast<void>(evict_window(window, stamp));
    } else if (victim != kNoEntry) {
      drop(victim, Cause::kPolicy);
    } else {
      return false;
    }
  }
  return true;
}

std::uint32_t Pool::oldest_victim() noexcept {
  std::uint32_t oldest = kNoEntry;
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    if (slabs_.size_class(cls).used == 0) continue;
    const std::uint32_t victim = policy_->victim(cls);
    if (victim == kNoEntry) continue;
    if (oldest == kNoEntry ||
        load_word(index_.cold(victim).stamp) < load_word(index_.cold(oldest).stamp)) {
      oldest = victim;
    }
  }
  return oldest;
}

bool Pool::evict_one_entry() {
  const std::uint32_t victim = oldest_victim();
  if (victim == kNoEntry) return false;
  drop(victim, Cause::kPolicy);
  return true;
}

// Evicts the tenant's own oldest leaves until `bytes` more are within its quota.
bool Pool::fit_quota(std::uint32_t id, std::uint64_t bytes) {
  while (true) {
    const auto found = tenants_.find(id);
    if (found == tenants_.end() || found->second.quota_bytes < 0) return true;
    const auto quota = static_cast<std::uint64_t>(found->second.quota_bytes);
    if (bytes > quota) return false;
    if (found->second.bytes + bytes <= quota) return true;
    if (!policy_->evicts()) return false;
    std::uint32_t victim = found->second.cold;
    for (int step = 0; victim != kNoEntry && !local_[victim].is_victim(); ++step) {
      victim = step < kQuotaLookSteps ? local_[victim].tenant_previous : kNoEntry;
    }
    if (victim == kNoEntry) return false;
    drop(victim, Cause::kQuota);
  }
}

// ---- rows

bool Pool::is_row(std::uint32_t row) const noexcept {
  return row < kRowCount && load_word(index_.row(row).claimed) == 1;
}

Status Pool::claim_row(const std::uint8_t* session, const std::uint8_t* group, std::uint64_t pid,
                       std::uint32_t* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::uint32_t chosen = 0;
  bool known = false;
  for (std::uint32_t row = kRowCount; row-- > 1;) {
    const RowRecord& record = index_.row(row);
    if (load_word(record.claimed) == 0) {
      if (!known) chosen = row;
    } else if (std::memcmp(record.session, session, sizeof record.session) == 0) {
      chosen = row;
      known = true;
    }
  }
  if (chosen == 0) return Status(StatusCode::kNoSpace, "sessions_full", kRowCount - 1);
  RowRecord& record = index_.row(chosen);
  std::memcpy(record.session, session, sizeof record.session);
  std::memcpy(record.group, group, sizeof record.group);
  store_word(record.pid, pid);
  if (!known) {
    store_word(record.epoch, epoch_);
    store_word<std::uint64_t>(record.claimed, 1);
  }
  *out = chosen;
  return Status();
}

std::vector<RowInfo> Pool::rows() noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<RowInfo> result;
  for (std::uint32_t row = 1; row < kRowCount; ++row) {
    const RowRecord& record = index_.row(row);
    if (load_word(record.claimed) == 0) continue;
    RowInfo info{};
    info.row = row;
    std::copy(std::begin(record.session), std::end(record.session), info.session.begin());
    std::copy(std::begin(record.group), std::end(record.group), info.group.begin());
    info.pid = load_word(record.pid);
    info.old = load_word(record.epoch) != epoch_;
    result.push_back(info);
  }
  return result;
}

// Entries of earlier epochs need not wait for this row any more.
void Pool::forget_old_row(std::uint32_t row) {
  std::vector<std::uint32_t> settled;
  for (auto& [entry, mask] : old_rows_) {
    if (!mask.test(row)) continue;
    mask.clear(row);
    if (!mask.any()) settled.push_back(entry);
    if (local_[entry].leases == 0) set_rows(entry, mask);
  }
  for (const std::uint32_t entry : settled) {
    old_rows_.erase(entry);
    change_blockers(entry, true, [](EntryLocal& local) { local.held_back -= 1; });
    free_if_untouched(entry);
  }
}

Status Pool::row_gone(std::uint32_t row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (row == 0 || !is_row(row)) return Status(StatusCode::kNotFound, "row: not claimed", row);
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto next = std::next(lease);
    if (lease->second.rows.test(row)) {
      lease->second.rows.clear(row);
      if (!lease->second.rows.any()) end_lease(lease);
    }
    lease = next;
  }
  for (auto reservation = reservations_.begin(); reservation != reservations_.end();) {
    if (reservation->second.row != row) {
      ++reservation;
      continue;
    }
    for (const std::uint32_t entry : reservation->second.items) {
      if (entry != kNoEntry) drop(entry, Cause::kAborted);
    }
    reservation = reservations_.erase(reservation);
  }
  forget_old_row(row);
  // What is still held here is no longer this process's debt.
  for (const std::uint32_t entry : quarantine_) {
    if (load_word(index_.cold(entry).owner) == row) release_owner(entry);
  }
  store_word<std::uint64_t>(index_.row(row).claimed, 0);
  return Status();
}

Status Pool::row_quiesced(std::uint32_t row) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (row == 0 || !is_row(row)) return Status(StatusCode::kNotFound, "row: not claimed", row);
  forget_old_row(row);
  store_word(index_.row(row).epoch, epoch_);
  return Status();
}

// ---- reading

void Pool::find_into(const std::uint8_t* keys, std::size_t n_keys,
                     std::vector<std::uint32_t>* out) const {
  out->resize(n_keys);
  index_.find_batch(keys, n_keys, out->data(), local_, sizeof(EntryLocal));
}

std::size_t Pool::peek(const std::uint8_t* keys, std::size_t n_keys,
                       std::size_t n_slices) const noexcept {
  if (is_closed() || n_slices == 0) return 0;
  return index_.peek(keys, n_keys, n_slices);
}

ExtentRecord Pool::extent_record(std::uint32_t entry) const noexcept {
  return {index_.offset(entry), index_.length(entry), entry, index_.generation(entry), 0};
}

Status Pool::lease(const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices,
                   std::span<const std::uint32_t> rows, LeaseResult* result) noexcept {
  if (n_slices == 0 || n_keys % n_slices != 0) {
    return Status(StatusCode::kBadArgument, "keys: their count must be a multiple of n_slices",
                  static_cast<std::int64_t>(n_keys), static_cast<std::int64_t>(n_slices));
  }
  if (n_keys > kMaxBatchKeys) {
    return Status(StatusCode::kBadArgument, "keys: too many in one call",
                  static_cast<std::int64_t>(n_keys), static_cast<std::int64_t>(kMaxBatchKeys));
  }
  if (rows.empty())
    return Status(StatusCode::kBadArgument, "rows: at least one must hold the lease");
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  RowMask mask;
  for (const std::uint32_t row : rows) {
    if (!is_row(row)) return Status(StatusCode::kNotFound, "rows: not claimed", row);
    mask.set(row);
  }
  find(keys, n_keys);
  const std::uint64_t limit = extents_bytes() / 2;
  std::uint64_t bytes = leased_bytes_;
  std::uint64_t prefix_bytes = 0;
  std::size_t n_chunks = 0;
  bool readable = true;
  bool trimmed = false;
  const bool room = leases_.size() < kMaxLeaseTickets;
  for (std::size_t first = 0; first < n_keys; first += n_slices) {
    std::uint64_t chunk_bytes = 0;
    std::uint64_t more = 0;
    std::uint64_t unverified = 0;
    bool present = true;
    for (std::size_t i = first; i < first + n_slices && present; ++i) {
      const std::uint32_t entry = found_[i];
      const EntryState state = entry == kNoEntry ? EntryState::kFree : index_.state(entry);
      present = state == EntryState::kReady || state == EntryState::kUnverified;
      unverified += state == EntryState::kUnverified;
      if (!present) break;
      chunk_bytes += extent_bytes(entry);
      if (local_[entry].leases == 0) more += extent_bytes(entry);
    }
    if (!present || (trimmed && unverified != 0)) break;
    readable &= unverified == 0;
    result->unverified += unverified;
    if (!readable) continue;
    if (!room) break;
    // Beyond the bound only the bytes are counted, up to where the prefix ends.
    trimmed |= bytes + more > limit;
    bytes += more;
    prefix_bytes += chunk_bytes;
    n_chunks += trimmed ? 0 : 1;
  }
  if (trimmed) {
    counters_.leases_trimmed += 1;
    // A prefix longer than the bound wants what others have, and no more.
    result->short_bytes = bytes - std::min(bytes, std::max(limit, prefix_bytes));
  }
  const std::size_t n_items = n_chunks * n_slices;
  if (n_items == 0 ||
      lease_items_ + n_items > 4 * std::max<std::size_t>(index_.capacity(), kMaxBatchKeys)) {
    return Status();
  }
  result->extents.resize(n_items);
  for (std::size_t i = n_items; i-- > 0;) {
    // From the last chunk to the first, so that the start of a prompt is what goes last.
    const std::uint32_t entry = found_[i];
    EntryLocal& local = local_[entry];
    if (local.leases == 0) leased_bytes_ += extent_bytes(entry);
    change_blockers(entry, false, [](EntryLocal& changed) { changed.leases += 1; });
    RowMask present = rows_of(entry);
    present.word[0] |= mask.word[0];
    present.word[1] |= mask.word[1];
    set_rows(entry, present);
    touch(entry);
    result->extents[i] = extent_record(entry);
  }
  for (std::size_t i = 0; i < n_slices; ++i) {
    std::uint32_t steps = 0;
    for (std::uint32_t up = index_.parent(found_[i]); up != kNoEntry && steps < kMaxAncestors;
         up = index_.parent(up), ++steps) {
      touch(up);
    }
  }
  result->n_chunks = n_chunks;
  result->ticket = next_ticket_++;
  Lease& lease = leases_[result->ticket];
  lease.rows = mask;
  lease.entries.assign(found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(n_items));
  lease_items_ += n_items;
  return Status();
}

std::size_t Pool::leases_to_end(std::span<const std::uint64_t> tickets,
                                std::uint64_t need_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  // Ends them in the counts alone, and puts those back below: nobody else looks meanwhile.
  std::uint64_t freed_bytes = 0;
  std::size_t looked_at = 0;
  std::size_t count = 0;
  std::size_t useful = 0;
  while (count < tickets.size() && freed_bytes < need_bytes && looked_at < kMaxEntriesToEnd) {
    const auto lease = leases_.find(tickets[count++]);
    if (lease == leases_.end()) continue;
    for (const std::uint32_t entry : lease->second.entries) {
      EntryLocal& local = local_[entry];
      local.leases -= 1;
      if (local.leases != 0) continue;
      freed_bytes += extent_bytes(entry);
      useful = count;
    }
    looked_at += lease->second.entries.size();
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto lease = leases_.find(tickets[i]);
    if (lease == leases_.end()) continue;
    for (const std::uint32_t entry : lease->second.entries)
      local_[entry].leases += 1;
  }
  // Where the bound ends the search, those asked for now are not looked at again.
  return looked_at < kMaxEntriesToEnd ? useful : count;
}

void Pool::end_lease(std::unordered_map<std::uint64_t, Lease>::iterator lease) {
  const std::vector<std::uint32_t>& entries = lease->second.entries;
  for (std::size_t i = entries.size(); i-- > 0;) {
    const std::uint32_t entry = entries[i];
    EntryLocal& local = local_[entry];
    if (i >= 8) __builtin_prefetch(&local_[entries[i - 8]], 1);
    if (i >= 8) __builtin_prefetch(&index_.cold(entries[i - 8]), 1);
    if (local.leases == 1) {
      leased_bytes_ -= extent_bytes(entry);
      set_rows(entry, old_rows_of(entry));
    }
    change_blockers(entry, true, [](EntryLocal& changed) { changed.leases -= 1; });
    if (local.leases == 0) free_if_untouched(entry);
  }
  lease_items_ -= entries.size();
  leases_.erase(lease);
}

bool Pool::release(std::uint64_t ticket, std::int64_t row) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return false;
  const auto lease = leases_.find(ticket);
  if (lease == leases_.end()) return false;
  if (row >= 0) {
    if (row >= kRowCount || !lease->second.rows.test(static_cast<std::uint32_t>(row))) return false;
    lease->second.rows.clear(static_cast<std::uint32_t>(row));
    if (lease->second.rows.any()) return true;
  }
  end_lease(lease);
  return true;
}

void Pool::verify_pinned(std::unique_lock<std::mutex>& lock,
                         const std::vector<std::uint32_t>& pinned, std::uint64_t* good,
                         std::uint64_t* bad) {
  for (const std::uint32_t entry : pinned) {
    Digest key;
    index_.key(entry).store(key.data());
    const std::uint8_t* address = extents_base_ + index_.offset(entry);
    const std::uint64_t length = index_.length(entry);
    lock.unlock();
    const bool sound = verify_record(address, length, &key).ok();
    lock.lock();
    *(sound ? good : bad) += 1;
    unpin(entry, false);
    if (is_closed()) continue;
    const EntryState state = index_.state(entry);
    if (sound && state == EntryState::kUnverified) {
      set_state(entry, EntryState::kReady);
    } else if (!sound && (state == EntryState::kUnverified || state == EntryState::kReady)) {
      drop(entry, Cause::kCorrupt);
    } else {
      free_if_untouched(entry);
    }
  }
}

Status Pool::verify(const std::uint8_t* keys, std::size_t n_keys, std::uint64_t* good,
                    std::uint64_t* bad) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::vector<std::uint32_t> pinned;
  find(keys, n_keys);
  for (const std::uint32_t entry : found_) {
    if (entry == kNoEntry || index_.state(entry) != EntryState::kUnverified) continue;
    pin(entry);
    pinned.push_back(entry);
  }
  verify_pinned(lock, pinned, good, bad);
  return Status();
}

Status Pool::verify_next(std::uint64_t max_bytes, std::uint64_t* remaining) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::vector<std::uint32_t> pinned;
  std::uint64_t bytes = 0;
  while (!verify_queue_.empty() && (bytes < max_bytes || pinned.empty())) {
    const std::uint32_t entry = verify_queue_.back();
    verify_queue_.pop_back();
    if (index_.state(entry) != EntryState::kUnverified) continue;
    bytes += index_.length(entry);
    pin(entry);
    pinned.push_back(entry);
  }
  std::uint64_t good = 0;
  std::uint64_t bad = 0;
  verify_pinned(lock, pinned, &good, &bad);
  *remaining = counters_.entries[static_cast<std::size_t>(EntryState::kUnverified)];
  return Status();
}

Status Pool::mark_bad(const Key& key, bool* dropped) noexcept {
  *dropped = false;
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = index_.find(key);
  if (entry == kNoEntry || index_.state(entry) == EntryState::kReserved) return Status();
  pin(entry);
  std::uint64_t good = 0;
  std::uint64_t bad = 0;
  verify_pinned(lock, {entry}, &good, &bad);
  *dropped = bad != 0;
  return Status();
}

// ---- writing

Status Pool::reserve(const ReserveRequest& request, ReserveResult* result) noexcept {
  if (request.n_keys > kMaxBatchKeys) {
    return Status(StatusCode::kBadArgument, "keys: too many in one call",
                  static_cast<std::int64_t>(request.n_keys),
                  static_cast<std::int64_t>(kMaxBatchKeys));
  }
  if (request.record_bytes == 0)
    return Status(StatusCode::kBadArgument, "record_bytes: must be positive");
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  if (!is_row(request.row)) return Status(StatusCode::kNotFound, "row: not claimed", request.row);
  result->outcomes.assign(request.n_keys, 0);
  result->extents.assign(request.n_keys, ExtentRecord{});
  find(request.keys, request.n_keys);

  // The request's own chain is pinned for its duration: what is present of it, and its parent,
  // through which all ancestors have a descendant that must stay.
  std::vector<std::uint32_t> own;
  std::uint32_t previous = kNoEntry;
  if (request.parent != nullptr) {
    previous = index_.find(Key::load(request.parent));
    if (previous != kNoEntry) own.push_back(previous);
  }
  for (const std::uint32_t entry : found_) {
    if (entry != kNoEntry) own.push_back(entry);
  }
  for (const std::uint32_t entry : own)
    pin(entry);

  const std::uint64_t bytes = SlabMap::round_up(request.record_bytes);
  const std::uint64_t row_limit = extents_bytes() / options_.max_session_share;
  std::uint32_t cls = kNoClass;
  auto refusal = ReserveOutcome::kReserved;
  if (request.record_bytes > extents_bytes() ||
      request.record_bytes > std::numeric_limits<std::uint32_t>::max()) {
    refusal = ReserveOutcome::kTooLarge;
  }
  Reservation reservation;
  reservation.row = request.row;
  reservation.identity = Key::load(request.identity);
  std::uint64_t relink_budget = kRelinkBudget;
  for (std::size_t i = 0; i < request.n_keys; ++i) {
    const Key key = Key::load(request.keys + i * kKeyBytes);
    std::uint32_t entry = found_[i];
    // An eviction cannot have taken it (pinned), but an earlier item of this request can be the
    // same key.
    if (entry == kNoEntry && reservation.left > 0) entry = index_.find(key);
    if (entry != kNoEntry) {
      const bool in_flight = index_.state(entry) == EntryState::kReserved;
      result->outcomes[i] = static_cast<std::uint8_t>(in_flight ? ReserveOutcome::kInFlight
                                                                : ReserveOutcome::kPresent);
      if (previous != kNoEntry && previous != entry && index_.parent(entry) == kNoEntry &&
          relink_budget > 0 && !is_ancestor(entry, previous, &relink_budget)) {
        add_child(previous, entry);
      }
      previous = entry;
      continue;
    }
    if (refusal == ReserveOutcome::kReserved) {
      refusal = reserve_one(request, key, bytes, row_limit, previous, &cls, &entry);
    }
    if (refusal == ReserveOutcome::kChainExceedsPool) {
      refusal = why_no_room(request, own, reservation);
    }
    if (refusal != ReserveOutcome::kReserved) {
      result->outcomes[i] = static_cast<std::uint8_t>(refusal);
      counters_.refused[static_cast<std::size_t>(refusal)] += 1;
      previous = kNoEntry;
      continue;
    }
    reservation.items.resize(request.n_keys, kNoEntry);
    reservation.items[i] = entry;
    reservation.left += 1;
    result->extents[i] = extent_record(entry);
    previous = entry;
  }
  for (const std::uint32_t entry : own)
    unpin(entry, false);
  for (std::size_t i = reservation.items.size(); i-- > 0;) {
    const std::uint32_t entry = reservation.items[i];
    if (entry != kNoEntry) policy_->insert(entry, index_.key(entry).word[0], local_[entry].cls);
  }
  if (reservation.left > 0) {
    result->ticket = next_ticket_++;
    reservations_.emplace(result->ticket, std::move(reservation));
  }
  return Status();
}

// Reserves one key that is not in the pool. kReserved, or why not; kChainExceedsPool stands for "no
// room, whoever takes it".
ReserveOutcome Pool::reserve_one(const ReserveRequest& request, const Key& key, std::uint64_t bytes,
                                 std::uint64_t row_limit, std::uint32_t parent, std::uint32_t* cls,
                                 std::uint32_t* out) {
  if (reservations_.size() >= kMaxReservations) return ReserveOutcome::kSessionLimit;
  // The server's own loads are bounded where they are begun, adapter by adapter: a hung one must
  // not use up what another one needs.
  const bool is_session = request.row != 0;
  if (is_session && row_bytes_[request.row] != 0 && row_bytes_[request.row] + bytes > row_limit) {
    return ReserveOutcome::kSessionLimit;
  }
  if (!fit_quota(request.tenant, bytes)) return ReserveOutcome::kQuota;
  if (*cls == kNoClass) {
    bool recycled = false;
    *cls = slabs_.class_for(bytes, &recycled);
    if (recycled) policy_->forget_class(*cls);
    if (*cls == kNoClass) return ReserveOutcome::kPoolPinned;
  }
  policy_->admit(key.word[0], *cls);
  std::uint32_t entry = take_entry();
  if (entry == kNoEntry) {
    if (policy_->evicts() && evict_one_entry()) entry = take_entry();
    if (entry == kNoEntry) return ReserveOutcome::kEntriesFull;
  }
  SlabPlace place;
  if (!make_room(*cls, entry, &place)) {
    give_entry(entry);
    return ReserveOutcome::kChainExceedsPool;
  }
  init_local(entry, place);
  ColdEntry& cold = index_.cold(entry);
  set_rows(entry, RowMask{});
  store_word<std::uint64_t>(cold.owner, request.row);
  store_word<std::uint64_t>(cold.tenant, request.tenant);
  std::memcpy(cold.identity, request.identity, sizeof cold.identity);
  stamp_ += 1;
  store_word(cold.stamp, stamp_);
  slabs_.run(place.run).newest = stamp_;
  index_.write_entry(entry, key, place.offset, static_cast<std::uint32_t>(request.record_bytes));
  set_state(entry, EntryState::kReserved);
  used_bytes_ += bytes;
  row_bytes_[request.row] += bytes;
  tenant_charge(entry, 1);
  if (!index_.link(entry, key)) {
    // All lines in reach are full, which takes keys made for it. drop() expects a linked entry.
    tenant_charge(entry, -1);
    release_owner(entry);
    used_bytes_ -= bytes;
    set_state(entry, EntryState::kFree);
    slabs_.free(place.run, place.slot);
    give_entry(entry);
    return ReserveOutcome::kEntriesFull;
  }
  if (parent != kNoEntry) add_child(parent, entry);
  *out = entry;
  return ReserveOutcome::kReserved;
}

// There was no room: who takes most of what cannot be evicted, the request's own chain or others?
ReserveOutcome Pool::why_no_room(const ReserveRequest& request,
                                 const std::vector<std::uint32_t>& own,
                                 const Reservation& reservation) {
  if (!policy_->evicts()) return ReserveOutcome::kPoolPinned;
  std::unordered_set<std::uint32_t> chain(own.begin(), own.end());
  for (const std::uint32_t entry : reservation.items) {
    if (entry != kNoEntry) chain.insert(entry);
  }
  if (request.parent != nullptr && !own.empty()) {
    std::uint32_t steps = 0;
    for (std::uint32_t up = index_.parent(own.front()); up != kNoEntry && steps < kMaxAncestors;
         up = index_.parent(up), ++steps) {
      chain.insert(up);
    }
  }
  std::uint64_t own_bytes = 0;
  std::uint64_t own_blocked_bytes = 0;
  for (const std::uint32_t entry : chain) {
    own_bytes += extent_bytes(entry);
    if (local_[entry].is_blocked()) own_blocked_bytes += extent_bytes(entry);
  }
  return own_bytes >= blocked_bytes_ - own_blocked_bytes ? ReserveOutcome::kChainExceedsPool
                                                         : ReserveOutcome::kPoolPinned;
}

Status Pool::commit(std::uint64_t ticket, std::span<const std::uint32_t> indices, bool check,
                    std::uint8_t* outcomes) noexcept {
  std::unique_lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  std::fill_n(outcomes, indices.size(), static_cast<std::uint8_t>(CommitOutcome::kNotReserved));
  auto reservation = reservations_.find(ticket);
  if (reservation == reservations_.end()) return Status();
  std::vector<std::uint32_t> pinned(indices.size(), kNoEntry);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] >= reservation->second.items.size()) continue;
    pinned[i] = reservation->second.items[indices[i]];
    if (pinned[i] != kNoEntry) pin(pinned[i]);
  }
  const Key identity = reservation->second.identity;
  // The headers are read without the lock; the pins keep the extents meanwhile.
  std::vector<std::uint8_t> sound(indices.size(), 1);
  if (check) {
    lock.unlock();
    for (std::size_t i = 0; i < indices.size(); ++i) {
      if (pinned[i] != kNoEntry) sound[i] = record_matches(pinned[i], identity) ? 1 : 0;
    }
    lock.lock();
  }
  reservation = reservations_.find(ticket);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::uint32_t entry = pinned[i];
    if (entry == kNoEntry) continue;
    unpin(entry, false);
    if (is_closed()) continue;
    // Another thread may have ended the item meanwhile, or an earlier index named it too.
    if (reservation == reservations_.end() || reservation->second.items[indices[i]] != entry) {
      free_if_untouched(entry);
      continue;
    }
    reservation->second.items[indices[i]] = kNoEntry;
    reservation->second.left -= 1;
    if (sound[i] != 0) {
      commit_one(entry);
      outcomes[i] = static_cast<std::uint8_t>(CommitOutcome::kCommitted);
    } else {
      // A commit says that the writer has ended, so the extent can go.
      drop(entry, Cause::kAborted);
      counters_.bad_records += 1;
      outcomes[i] = static_cast<std::uint8_t>(CommitOutcome::kBadRecord);
    }
  }
  if (reservation != reservations_.end() && reservation->second.left == 0)
    reservations_.erase(reservation);
  return Status();
}

// Whether the record in the extent is complete as far as its header tells, and is the one that was
// promised.
bool Pool::record_matches(std::uint32_t entry, const Key& identity) const noexcept {
  const std::uint64_t length = index_.length(entry);
  RecordHeader header;
  if (!read_record_header(extents_base_ + index_.offset(entry), length, &header).ok()) return false;
  return Key::load(header.spec.key.data()) == index_.key(entry) &&
         Key::load(header.spec.identity.data()) == identity && header.record_bytes() == length &&
         header.plain() && !header.crc_pending();
}

void Pool::commit_one(std::uint32_t entry) {
  stamp_ += 1;
  store_word(index_.cold(entry).stamp, stamp_);
  slabs_.run(local_[entry].run).newest = stamp_;
  set_state(entry, EntryState::kReady);
  release_owner(entry);
  counters_.inserted_entries += 1;
  counters_.inserted_bytes += extent_bytes(entry);
  emit(EventKind::kInserted, index_.key(entry), extent_bytes(entry));
}

std::uint64_t Pool::abort(std::uint64_t ticket, std::span<const std::uint32_t> indices,
                          bool all) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  const auto found = reservations_.find(ticket);
  if (found == reservations_.end()) return 0;
  Reservation& reservation = found->second;
  std::uint64_t given_back = 0;
  const auto abort_item = [&](std::size_t index) {
    if (index >= reservation.items.size() || reservation.items[index] == kNoEntry) return;
    drop(reservation.items[index], Cause::kAborted);
    reservation.items[index] = kNoEntry;
    reservation.left -= 1;
    given_back += 1;
  };
  if (all) {
    for (std::size_t i = 0; i < reservation.items.size(); ++i)
      abort_item(i);
  } else {
    for (const std::uint32_t index : indices)
      abort_item(index);
  }
  if (reservation.left == 0) reservations_.erase(found);
  return given_back;
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

// ---- administration

std::uint64_t Pool::remove(const std::uint8_t* keys, std::size_t n_keys) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_closed()) return 0;
  std::uint64_t removed = 0;
  for (std::size_t i = 0; i < n_keys; ++i) {
    const std::uint32_t entry = index_.find(Key::load(keys + i * kKeyBytes));
    if (entry == kNoEntry || local_[entry].is_blocked()) continue;
    drop(entry, Cause::kCleared);
    removed += 1;
  }
  return removed;
}

std::uint64_t Pool::clear(std::int64_t tenant) noexcept {
  constexpr std::uint32_t kStep = 512;
  std::uint64_t removed = 0;
  for (std::uint64_t begin = 0;; begin += kStep) {
    const std::lock_guard lock(mutex_);
    if (is_closed() || begin >= entries_touched_) return removed;
    const std::uint64_t end = std::min(begin + kStep, entries_touched_);
    for (auto entry = static_cast<std::uint32_t>(begin); entry < end; ++entry) {
      const EntryState state = index_.state(entry);
      if (state != EntryState::kReady && state != EntryState::kUnverified) continue;
      if (local_[entry].is_blocked()) continue;
      if (tenant >= 0 &&
          load_word(index_.cold(entry).tenant) != static_cast<std::uint64_t>(tenant)) {
        continue;
      }
      drop(entry, Cause::kCleared);
      removed += 1;
    }
  }
}

std::uint64_t Pool::evict_to_watermark() noexcept {
  constexpr int kStep = 64;
  std::uint64_t evicted_bytes = 0;
  std::uint64_t goal_bytes = 0;
  for (bool first = true;; first = false) {
    const std::lock_guard lock(mutex_);
    if (is_closed() || options_.watermark == 0.0 || !policy_->evicts()) return evicted_bytes;
    if (first) {
      const auto total = static_cast<double>(extents_bytes());
      if (static_cast<double>(used_bytes_) <= options_.watermark * total) return 0;
      goal_bytes =
          static_cast<std::uint64_t>(static_cast<double>(used_bytes_) * options_.watermark_ratio);
    }
    for (int step = 0; step < kStep; ++step) {
      if (evicted_bytes >= goal_bytes) return evicted_bytes;
      const std::uint32_t victim = oldest_victim();
      if (victim == kNoEntry) return evicted_bytes;
      evicted_bytes += extent_bytes(victim);
      drop(victim, Cause::kWatermark);
    }
  }
}

std::vector<Key> Pool::victims_preview(std::uint64_t need_bytes) noexcept {
  constexpr std::uint64_t kMost = 4096;
  const std::lock_guard lock(mutex_);
  std::vector<Key> keys;
  if (is_closed()) return keys;
  struct Candidate {
    std::uint64_t stamp;
    std::size_t order;
    std::uint32_t entry;
  };
  std::vector<Candidate> candidates;
  for (std::uint32_t cls = 0; cls < kMaxClasses; ++cls) {
    const SlabMap::Class& size_class = slabs_.size_class(cls);
    if (size_class.used == 0) continue;
    std::vector<std::uint32_t> entries;
    policy_->preview(cls, std::min(kMost, need_bytes / size_class.extent_bytes + 1), &entries);
    // A policy's own order counts within a class, age between classes.
    std::uint64_t stamp = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      stamp = std::max(stamp, load_word(index_.cold(entries[i]).stamp));
      candidates.push_back({stamp, i, entries[i]});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.stamp != b.stamp ? a.stamp < b.stamp : a.order < b.order;
                   });
  std::uint64_t bytes = 0;
  for (const Candidate& candidate : candidates) {
    if (bytes >= need_bytes) break;
    if (index_.state(candidate.entry) != EntryState::kReady) continue;
    bytes += extent_bytes(candidate.entry);
    keys.push_back(index_.key(candidate.entry));
  }
  return keys;
}

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
  for (std::uint32_t row = 1; row < kRowCount; ++row)
    stats.rows_claimed += is_row(row) ? 1 : 0;
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
