// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Taking over a pool that another server left, however it ended.
//
//   READY, UNVERIFIED   -> UNVERIFIED; not evictable while rows of an earlier epoch may touch it
//   RESERVED by row r   -> QUARANTINED until r is gone or quiesced; FREE when r is the server
//   itself QUARANTINED         -> stays while rows of an earlier epoch may touch it, else FREE
//   half-changed entry, two entries on one extent, one key twice
//                       -> QUARANTINED while such rows may touch it, else FREE
//
// A server killed in the middle of this leaves a state from which it can be done again: rows are
// written before the state that depends on them.
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>

#include "kvstrata/pool.h"

namespace kvstrata {

namespace {

constexpr std::uint64_t kYearNs = 365ULL * 24 * 3600 * 1'000'000'000ULL;

}  // namespace

Status Pool::adopt(int index_fd, int extents_fd, const PoolOptions& options,
                   std::shared_ptr<Pool>* out, FormatMismatch* mismatch) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_options(options));
  struct stat index_info{};
  struct stat extents_info{};
  if (fstat(index_fd, &index_info) != 0)
    return Status(StatusCode::kOsError, "fstat of the index file failed", errno);
  if (fstat(extents_fd, &extents_info) != 0) {
    return Status(StatusCode::kOsError, "fstat of the extents file failed", errno);
  }
  const auto differs = [&](const char* field, std::uint64_t found, std::uint64_t expected) {
    *mismatch = {field, found, expected};
    return Status(StatusCode::kIncompatible, field, static_cast<std::int64_t>(found),
                  static_cast<std::int64_t>(expected));
  };
  const auto index_bytes = static_cast<std::uint64_t>(index_info.st_size);
  const std::uint64_t smallest = IndexLayout::of(kMinEntryCapacity).file_bytes;
  if (index_bytes < smallest) return differs("index_file_bytes", index_bytes, smallest);
  const std::shared_ptr<Pool> pool(new Pool());
  // A server that was killed while it made the pool may have left no memory even for the header.
  KVSTRATA_RETURN_IF_ERROR(pool->back_index(index_fd, index_bytes, sizeof(IndexHeader), 0, 0));
  KVSTRATA_RETURN_IF_ERROR(Mapping::map(index_fd, index_bytes, true, true, &pool->index_mapping_));
  IndexLayout layout;
  KVSTRATA_RETURN_IF_ERROR(
      IndexView::check(pool->index_mapping_.address(), index_bytes, &layout, mismatch));
  pool->index_ = IndexView(pool->index_mapping_.address(), layout);
  IndexHeader& header = pool->index_.header();
  const auto extents_bytes = static_cast<std::uint64_t>(extents_info.st_size);
  if (header.extents_bytes != extents_bytes) {
    return differs("extents_file_bytes", extents_bytes, header.extents_bytes);
  }
  if (extents_bytes == 0 || extents_bytes % kExtentAlignment != 0) {
    return differs("extents_bytes", extents_bytes, SlabMap::round_up(extents_bytes + 1));
  }
  if (options.extents_bytes != 0 && options.extents_bytes != extents_bytes) {
    return differs("extents_bytes", extents_bytes, options.extents_bytes);
  }
  if (options.entry_capacity != 0 && options.entry_capacity != layout.entry_capacity) {
    return differs("entry_capacity", layout.entry_capacity, options.entry_capacity);
  }
  const std::uint64_t touched = std::min(load_word(header.entries_touched), layout.entry_capacity);
  KVSTRATA_RETURN_IF_ERROR(pool->back_index(index_fd, index_bytes,
                                            layout.hot_offset + touched * sizeof(HotEntry),
                                            layout.cold_offset, touched * sizeof(ColdEntry)));
  KVSTRATA_RETURN_IF_ERROR(pool->start(layout, extents_fd, options));

  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const std::uint64_t now_ns = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000ULL +
                               static_cast<std::uint64_t>(now.tv_nsec);
  const std::uint64_t old_epoch = load_word(header.epoch);
  pool->epoch_ = old_epoch < now_ns + kYearNs ? std::max(now_ns, old_epoch + 1) : now_ns;

  pool->adopt_rows();
  static_cast<void>(pool->slabs_.restore());
  pool->adopt_entries();
  store_word<std::uint64_t>(header.flags, 0);
  store_word(header.epoch, pool->epoch_);
  pool->heartbeat();
  *out = pool;
  return Status();
}

void Pool::adopt_rows() {
  for (std::uint32_t row = 0; row < kRowCount; ++row) {
    RowRecord& record = index_.row(row);
    bool sound = load_word(record.claimed) <= 1;
    for (std::uint32_t other = 1; sound && load_word(record.claimed) == 1 && other < row; ++other) {
      const RowRecord& earlier = index_.row(other);
      sound = load_word(earlier.claimed) == 0 ||
              std::memcmp(earlier.session, record.session, sizeof record.session) != 0;
    }
    if (!sound) store_word<std::uint64_t>(record.claimed, 0);
    // A row claimed in the epoch that begins now cannot be; garbage must not look like one.
    if (load_word(record.epoch) == epoch_) store_word<std::uint64_t>(record.epoch, 0);
    rows_claimed_ += row != 0 && is_row(row) ? 1 : 0;
  }
  store_word<std::uint64_t>(index_.row(0).claimed, 1);
  store_word(index_.row(0).epoch, epoch_);
}

// What one entry becomes; `linked` collects those that stay in the index.
void Pool::adopt_entry(std::uint32_t entry, const RowMask& live_rows, Adoption* adoption) {
  ColdEntry& cold = index_.cold(entry);
  const std::uint64_t head = load_word(index_.hot(entry).word[0]);
  const std::uint8_t state_byte = index_.state_byte(entry);
  const auto set_free = [&] {
    if (head != IndexView::pack_head(static_cast<std::uint32_t>(head) & ~1u, EntryState::kFree)) {
      index_.set_state(entry, EntryState::kFree);
    }
    if (rows_of(entry).any()) set_rows(entry, RowBits{});
    give_entry(entry);
  };
  if (state_byte == static_cast<std::uint8_t>(EntryState::kFree)) return set_free();
  if (state_byte >= kEntryStateCount) {
    counters_.adoption_dropped += 1;
    return set_free();
  }
  const auto state = static_cast<EntryState>(state_byte);
  RowBits touchers = live_rows.among(rows_of(entry)).bits();
  std::uint64_t owner = load_word(cold.owner);
  if (owner == 0 || owner >= kRowCount || !live_rows.test(static_cast<std::uint32_t>(owner)))
    owner = kNoOwner;
  if (state == EntryState::kReserved && owner != kNoOwner)
    touchers.set(static_cast<std::uint32_t>(owner));
  if (owner != kNoOwner && !touchers.test(static_cast<std::uint32_t>(owner))) owner = kNoOwner;
  const bool keeps_key =
      (state == EntryState::kReady || state == EntryState::kUnverified) && (head & 1) == 0;
  if (!keeps_key && !touchers.any()) {
    counters_.adoption_dropped += 1;
    return set_free();
  }
  SlabPlace place;
  std::uint32_t holder = kNoEntry;
  const std::uint32_t length = index_.length(entry);
  if (length == 0 ||
      !slabs_.occupy(index_.offset(entry), SlabMap::round_up(length), entry, &place, &holder)) {
    counters_.adoption_dropped += 1;
    if (holder != kNoEntry) {
      // Two entries on one extent: neither is to be trusted, and both sides' rows may touch it.
      adoption->touchers[holder] |= touchers;
      adoption->distrusted.insert(holder);
    }
    return set_free();
  }
  init_local(entry, place);
  store_word(cold.owner, owner);
  adoption->placed.push_back(entry);
  adoption->touchers[entry] = touchers;
  if (!keeps_key) adoption->distrusted.insert(entry);
}

void Pool::adopt_entries() {
  RowMask live_rows;
  for (std::uint32_t row = 1; row < kRowCount; ++row) {
    if (is_row(row)) live_rows.set(row);
  }
  entries_touched_ =
      std::min<std::uint64_t>(load_word(index_.header().entries_touched), index_.capacity());
  store_word(index_.header().entries_touched, entries_touched_);
  index_.clear_buckets();

  Adoption adoption;
  for (std::uint32_t entry = 0; entry < entries_touched_; ++entry)
    adopt_entry(entry, live_rows, &adoption);

  // Last used first: of two entries with one key the one that was used later stays.
  std::vector<std::uint32_t>& placed = adoption.placed;
  std::stable_sort(placed.begin(), placed.end(), [&](std::uint32_t a, std::uint32_t b) {
    return load_word(index_.cold(a).stamp) > load_word(index_.cold(b).stamp);
  });
  std::vector<std::uint32_t> linked;
  for (const std::uint32_t entry : placed) {
    const RowBits touchers = adoption.touchers[entry];
    const Key key = index_.key(entry);
    const bool keep = !adoption.distrusted.contains(entry) && index_.find(key) == kNoEntry;
    const bool stays_linked = keep && index_.link(entry, key);
    const EntryLocal& local = local_[entry];
    if (!stays_linked && !touchers.any()) {
      counters_.adoption_dropped += 1;
      index_.set_state(entry, EntryState::kFree);
      set_rows(entry, RowBits{});
      slabs_.free(local.run, local.slot);
      give_entry(entry);
      continue;
    }
    const EntryState state = stays_linked ? EntryState::kUnverified : EntryState::kQuarantined;
    set_rows(entry, touchers);
    index_.set_state(entry, state);
    count_state(entry, state, 1);
    used_bytes_ += extent_bytes(entry);
    if (touchers.any()) {
      old_rows_.emplace(entry, live_rows.among(touchers));
      change_blockers(entry, false, [](EntryLocal& changed) { changed.held_back += 1; });
    }
    if (stays_linked) {
      store_word(index_.cold(entry).owner, kNoOwner);
      linked.push_back(entry);
      tenant_charge(entry, 1);
      continue;
    }
    index_.set_parent(entry, kNoEntry);
    change_blockers(entry, false, [](EntryLocal& changed) { changed.held_back += 1; });
    const std::uint64_t owner = load_word(index_.cold(entry).owner);
    if (owner < kRowCount) row_bytes_[owner] += extent_bytes(entry);
    quarantine_.insert(entry);
    counters_.quarantined_entries += 1;
  }
  counters_.adopted_entries = linked.size();
  slabs_.finish_restore();
  adopt_forest(linked);

  // Oldest first into the policy, with stamps from 1 (what was read may be anything).
  std::reverse(linked.begin(), linked.end());
  for (const std::uint32_t entry : linked) {
    stamp_ += 1;
    store_word(index_.cold(entry).stamp, stamp_, std::memory_order_relaxed);
    slabs_.run(local_[entry].run).newest = stamp_;
    policy_->insert(entry, index_.key(entry).word[0], local_[entry].cls);
  }
  verify_queue_ = std::move(linked);
}

// Keeps the parents that are linked entries and form a forest, forgets the others.
void Pool::adopt_forest(const std::vector<std::uint32_t>& linked) {
  std::unordered_map<std::uint32_t, std::uint32_t> parents;
  parents.reserve(linked.size());
  for (const std::uint32_t entry : linked)
    parents.emplace(entry, kNoEntry);
  for (const std::uint32_t entry : linked) {
    const std::uint32_t parent = index_.parent(entry);
    if (parent != entry && parents.contains(parent)) parents[entry] = parent;
  }
  // Walk up from each entry; entries walked before are known to end at a root.
  std::unordered_map<std::uint32_t, std::uint32_t> walk_of;
  walk_of.reserve(linked.size());
  std::uint32_t walk = 0;
  for (const std::uint32_t entry : linked) {
    walk += 1;
    for (std::uint32_t at = entry; at != kNoEntry;) {
      const auto [seen, fresh] = walk_of.emplace(at, walk);
      if (!fresh) break;
      const std::uint32_t up = parents[at];
      const auto above = up == kNoEntry ? walk_of.end() : walk_of.find(up);
      if (above != walk_of.end() && above->second == walk)
        parents[at] = kNoEntry;  // a circle ends here
      at = parents[at];
    }
  }
  for (const std::uint32_t entry : linked) {
    const std::uint32_t parent = parents[entry];
    index_.set_parent(entry, kNoEntry);
    if (parent != kNoEntry) add_child(parent, entry);
  }
}

}  // namespace kvstrata
