// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Taking over a pool that another server left, however it ended.
//
// An entry is adopted (it becomes UNVERIFIED) if it was READY or UNVERIFIED, was not half changed,
// is the only entry on its extent, was used later than any other entry of its key, and if its
// extent lies in no hole of the file: where the file system is full, to read a hole ends the
// process. Rows of earlier servers that may touch it keep it from eviction. Any other entry is
// quarantined while such rows may touch it, and FREE otherwise; a RESERVED entry can only be
// touched by its owner.
//
// A server killed in the middle of an adoption leaves a state from which it can be done again: rows
// are written before the state that depends on them.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "pool/pool.h"

namespace kvstrata {

namespace {

constexpr std::uint64_t kYearNs = 365ULL * 24 * 3600 * 1'000'000'000ULL;

// A new epoch: after that of the earlier server, unless the earlier epoch lies a year in the
// future.
std::uint64_t epoch_after(std::uint64_t old_epoch) noexcept {
  const auto now_ns = static_cast<std::uint64_t>(now_unix_ns());
  return old_epoch < now_ns + kYearNs ? std::max(now_ns, old_epoch + 1) : now_ns;
}

// The parts of a file that are not holes: where each begins -> where it ends.
std::map<std::uint64_t, std::uint64_t> data_of(int fd, std::uint64_t file_bytes) {
  struct stat found{};
  if (fstat(fd, &found) == 0 && static_cast<std::uint64_t>(found.st_blocks) * 512 >= file_bytes)
    return {{0, file_bytes}};
  std::map<std::uint64_t, std::uint64_t> parts;
  for (off_t end = 0;;) {
    const off_t begin = lseek(fd, end, SEEK_DATA);
    if (begin < 0 && errno == ENXIO) return parts;
    end = begin < 0 ? begin : lseek(fd, begin, SEEK_HOLE);
    if (end < 0) return {{0, file_bytes}};  // the file system does not know
    parts.emplace(begin, end);
  }
}

}  // namespace

// Fills the parts of a new Pool from the contents of its files. Used once, before anybody else has
// the pool.
class Adoption {
 public:
  Adoption(Pool& pool, int extents_fd)
      : pool_(pool),
        data_(data_of(extents_fd, pool.extents_bytes())),
        entries_(pool.entries_),
        slabs_(pool.slabs_),
        rows_(pool.rows_),
        index_(entries_.index) {}

  void run() {
    take_rows();
    static_cast<void>(slabs_.restore());
    take_entries();
  }

 private:
  void take_rows();
  void take_entries();
  [[nodiscard]] bool has_data(std::uint64_t offset, std::uint64_t length) const noexcept;
  void place(std::uint32_t entry);
  void take(std::uint32_t entry);
  void take_forest();

  Pool& pool_;
  const std::map<std::uint64_t, std::uint64_t> data_;  // of the extents file
  Entries& entries_;
  SlabMap& slabs_;
  Rows& rows_;
  IndexView& index_;
  RowMask live_rows_;                  // of processes that were attached to an earlier server
  std::vector<std::uint32_t> placed_;  // entries that own an extent
  std::vector<std::uint32_t> linked_;  // of these: entries that stay in the index
  std::unordered_map<std::uint32_t, RowBits> touchers_;
  std::unordered_set<std::uint32_t> distrusted_;  // not to be found by their key again
};

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
  auto segment = std::make_unique<PoolSegment>();
  // A server that was killed while it made the pool may have left no memory even for the header.
  KVSTRATA_RETURN_IF_ERROR(segment->back_index(index_fd, index_bytes, sizeof(IndexHeader), 0, 0));
  KVSTRATA_RETURN_IF_ERROR(segment->map_index(index_fd, index_bytes));
  IndexLayout layout;
  KVSTRATA_RETURN_IF_ERROR(
      IndexView::check(segment->index_mapping.address(), index_bytes, &layout, mismatch));
  segment->index = IndexView(segment->index_mapping.address(), layout);
  IndexHeader& header = segment->index.header();
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
  const std::uint64_t old_epoch = load_word(header.epoch);
  const std::uint64_t touched = std::min(load_word(header.entries_touched), layout.entry_capacity);
  KVSTRATA_RETURN_IF_ERROR(segment->back_index(index_fd, index_bytes,
                                               layout.hot_offset + touched * sizeof(HotEntry),
                                               layout.cold_offset, touched * sizeof(ColdEntry)));
  KVSTRATA_RETURN_IF_ERROR(segment->open_extents(extents_fd));

  const std::uint64_t epoch = epoch_after(old_epoch);
  const std::shared_ptr<Pool> pool(new Pool(std::move(segment), options, epoch));
  Adoption(*pool, extents_fd).run();
  store_word<std::uint64_t>(header.flags, 0);
  store_word(header.epoch, epoch);
  pool->heartbeat();
  *out = pool;
  return Status();
}

void Adoption::take_rows() {
  for (std::uint32_t row = 1; row < kRowCount; ++row) {
    const RowRecord& record = index_.row(row);
    bool sound = load_word(record.claimed) <= 1;
    for (std::uint32_t other = 1; sound && load_word(record.claimed) == 1 && other < row; ++other) {
      const RowRecord& earlier = index_.row(other);
      sound = load_word(earlier.claimed) == 0 ||
              std::memcmp(earlier.session, record.session, sizeof record.session) != 0;
    }
    rows_.adopt(row, sound);
    if (rows_.is_claimed(row)) live_rows_.set(row);
  }
  store_word<std::uint64_t>(index_.row(0).claimed, 1);
  store_word(index_.row(0).epoch, rows_.epoch);
}

bool Adoption::has_data(std::uint64_t offset, std::uint64_t length) const noexcept {
  const auto behind = data_.upper_bound(offset);
  return behind != data_.begin() && offset + length <= std::prev(behind)->second;
}

// Places the entry on its extent, or frees it.
void Adoption::place(std::uint32_t entry) {
  ColdEntry& cold = index_.cold(entry);
  const std::uint64_t head = load_word(index_.hot(entry).word[0]);
  const std::uint8_t state_byte = index_.state_byte(entry);
  const auto set_free = [&] {
    if (head != IndexView::pack_head(static_cast<std::uint32_t>(head) & ~1u, EntryState::kFree)) {
      entries_.adopt(entry, EntryState::kFree);
    }
    if (rows_.rows_of(entry).any()) rows_.set_rows(entry, RowBits{});
    entries_.give(entry);
  };
  if (state_byte == static_cast<std::uint8_t>(EntryState::kFree)) return set_free();
  if (state_byte >= kEntryStateCount) {
    pool_.adoption_counts_.adoption_dropped += 1;
    return set_free();
  }
  const auto state = static_cast<EntryState>(state_byte);
  RowBits touchers = live_rows_.among(rows_.rows_of(entry)).bits();
  std::uint64_t owner = load_word(cold.owner);
  if (owner == 0 || owner >= kRowCount || !live_rows_.test(static_cast<std::uint32_t>(owner)))
    owner = Rows::kNoOwner;
  if (state == EntryState::kReserved && owner != Rows::kNoOwner)
    touchers.set(static_cast<std::uint32_t>(owner));
  if (owner != Rows::kNoOwner && !touchers.test(static_cast<std::uint32_t>(owner)))
    owner = Rows::kNoOwner;
  const std::uint32_t length = index_.length(entry);
  const bool keeps_key = (state == EntryState::kReady || state == EntryState::kUnverified) &&
                         (head & 1) == 0 && has_data(index_.offset(entry), length);
  if (!keeps_key && !touchers.any()) {
    pool_.adoption_counts_.adoption_dropped += 1;
    return set_free();
  }
  SlabPlace found;
  std::uint32_t holder = kNoEntry;
  const std::uint64_t use = load_word(cold.use);
  const auto traits = std::bit_cast<Traits>(static_cast<std::uint32_t>(use));
  if (length == 0 || !slabs_.occupy(index_.offset(entry), SlabMap::round_up(length),
                                    traits.is_tail != 0, entry, &found, &holder)) {
    pool_.adoption_counts_.adoption_dropped += 1;
    if (holder != kNoEntry) {
      // Two entries claim one extent: neither can be trusted, and the rows of both may touch it.
      touchers_[holder] |= touchers;
      distrusted_.insert(holder);
    }
    return set_free();
  }
  entries_.init_local(entry, found, traits, static_cast<std::uint32_t>(use >> 32));
  store_word(cold.owner, owner);
  placed_.push_back(entry);
  touchers_[entry] = touchers;
  if (!keeps_key) distrusted_.insert(entry);
}

void Adoption::take_entries() {
  const std::uint64_t touched =
      std::min<std::uint64_t>(load_word(index_.header().entries_touched), index_.capacity());
  entries_.touched = touched;
  store_word(index_.header().entries_touched, touched);
  index_.clear_buckets();
  for (std::uint32_t entry = 0; entry < touched; ++entry)
    place(entry);

  // Last used first: of two entries with one key the one that was used later stays.
  std::stable_sort(placed_.begin(), placed_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return load_word(index_.cold(a).stamp) > load_word(index_.cold(b).stamp);
  });
  for (const std::uint32_t entry : placed_)
    take(entry);
  pool_.adoption_counts_.adopted_entries = linked_.size();
  slabs_.finish_restore();
  take_forest();

  // The entries enter the policy oldest first, with stamps from 1: stamps in the file may be
  // anything.
  std::reverse(linked_.begin(), linked_.end());
  pool_.policy_.tell_time(pool_.time_ns());
  for (const std::uint32_t entry : linked_) {
    entries_.renew(entry, std::memory_order_relaxed);
    entries_.policy.insert(entry);
  }
  pool_.checks_.queue = std::move(linked_);
}

// Links, quarantines or frees an entry that owns its extent.
void Adoption::take(std::uint32_t entry) {
  const RowBits touchers = touchers_[entry];
  const Key key = index_.key(entry);
  const bool keep = !distrusted_.contains(entry) && index_.find(key) == kNoEntry;
  const bool stays_linked = keep && index_.link(entry, key);
  const EntryLocal& local = entries_.local[entry];
  if (!stays_linked && !touchers.any()) {
    pool_.adoption_counts_.adoption_dropped += 1;
    entries_.adopt(entry, EntryState::kFree);
    rows_.set_rows(entry, RowBits{});
    slabs_.free(local.run, local.slot);
    entries_.give(entry);
    return;
  }
  rows_.set_rows(entry, touchers);
  entries_.adopt(entry, stays_linked ? EntryState::kUnverified : EntryState::kQuarantined);
  if (touchers.any()) {
    rows_.old_rows.emplace(entry, live_rows_.among(touchers));
    entries_.change_blockers(entry, false, [](EntryLocal& changed) { changed.held_back += 1; });
  }
  if (stays_linked) {
    store_word(index_.cold(entry).owner, Rows::kNoOwner);
    linked_.push_back(entry);
    pool_.tenants_.add(entry);
    return;
  }
  index_.set_parent(entry, kNoEntry);
  const std::uint64_t owner = load_word(index_.cold(entry).owner);
  if (owner < kRowCount) rows_.bytes[owner] += entries_.extent_bytes(entry);
  pool_.departures_.quarantine.insert(entry);
  pool_.departures_.counts.quarantined_entries += 1;
}

// Keeps the parents that are linked entries and form a forest, and forgets the others.
void Adoption::take_forest() {
  std::unordered_map<std::uint32_t, std::uint32_t> parents;
  parents.reserve(linked_.size());
  for (const std::uint32_t entry : linked_)
    parents.emplace(entry, kNoEntry);
  for (const std::uint32_t entry : linked_) {
    const std::uint32_t parent = index_.parent(entry);
    if (parent != entry && parents.contains(parent)) parents[entry] = parent;
  }
  // Walk up from each entry; entries walked before are known to end at a root.
  std::unordered_map<std::uint32_t, std::uint32_t> walk_of;
  walk_of.reserve(linked_.size());
  std::uint32_t walk = 0;
  for (const std::uint32_t entry : linked_) {
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
  for (const std::uint32_t entry : linked_) {
    const std::uint32_t parent = parents[entry];
    index_.set_parent(entry, kNoEntry);
    if (parent != kNoEntry) pool_.family_.add(parent, entry);
  }
}

}  // namespace kvstrata
