// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/index.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <limits>
#include <utility>

#include "kvstrata/crc32c.h"

namespace kvstrata {

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kGroupKeys = 16;

constexpr std::uint64_t round_to_page(std::uint64_t bytes) {
  return (bytes + kPage - 1) & ~(kPage - 1);
}

std::uint32_t static_header_crc(const IndexHeader& header) noexcept {
  IndexHeader copy{};
  std::memcpy(static_cast<void*>(&copy), &header, kStaticHeaderBytes);
  copy.static_crc = 0;
  return crc32c(&copy, kStaticHeaderBytes);
}

// A bucket names its first entry, carries the upper half of that entry's hash and says whether the
// chain goes on, so that a lookup of another key need not touch the entry when the chain ends
// there.
constexpr std::uint64_t kChainGoesOn = 1ULL << 31;
constexpr std::uint64_t kHashBits = 0xFFFFFFFF00000000ULL;

constexpr std::uint32_t bucket_entry(std::uint64_t bucket) {
  return static_cast<std::uint32_t>(bucket & (kChainGoesOn - 1)) - 1;
}
constexpr bool cannot_hold(std::uint64_t bucket, std::uint64_t hash) {
  return ((bucket ^ hash) & kHashBits) != 0 && (bucket & kChainGoesOn) == 0;
}

inline void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 3);
}

}  // namespace

std::uint64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000ULL +
         static_cast<std::uint64_t>(now.tv_nsec);
}

IndexLayout IndexLayout::of(std::uint64_t entry_capacity) noexcept {
  IndexLayout layout;
  layout.entry_capacity = entry_capacity;
  layout.bucket_count = std::bit_ceil(std::max<std::uint64_t>(entry_capacity, 64));
  layout.buckets_offset = sizeof(IndexHeader) + sizeof(RowRecord) * kRowCount;
  layout.hot_offset = round_to_page(layout.buckets_offset + 8 * layout.bucket_count);
  layout.cold_offset = round_to_page(layout.hot_offset + sizeof(HotEntry) * entry_capacity);
  layout.file_bytes = round_to_page(layout.cold_offset + sizeof(ColdEntry) * entry_capacity);
  return layout;
}

IndexView::IndexView(void* base, const IndexLayout& layout) noexcept {
  auto* bytes = static_cast<std::uint8_t*>(base);
  header_ = reinterpret_cast<IndexHeader*>(bytes);
  rows_ = reinterpret_cast<RowRecord*>(bytes + sizeof(IndexHeader));
  buckets_ = reinterpret_cast<std::uint64_t*>(bytes + layout.buckets_offset);
  hot_ = reinterpret_cast<HotEntry*>(bytes + layout.hot_offset);
  cold_ = reinterpret_cast<ColdEntry*>(bytes + layout.cold_offset);
  bucket_mask_ = layout.bucket_count - 1;
  capacity_ = static_cast<std::uint32_t>(layout.entry_capacity);
}

Status IndexView::check(const void* base, std::uint64_t mapped_bytes, IndexLayout* layout,
                        FormatMismatch* mismatch) noexcept {
  const auto differs = [&](const char* field, std::uint64_t found, std::uint64_t expected) {
    *mismatch = {field, found, expected};
    return Status(StatusCode::kIncompatible, field, static_cast<std::int64_t>(found),
                  static_cast<std::int64_t>(expected));
  };
  const std::uint64_t smallest = IndexLayout::of(kMinEntryCapacity).file_bytes;
  if (mapped_bytes < smallest) return differs("index_file_bytes", mapped_bytes, smallest);
  const auto& header = *static_cast<const IndexHeader*>(base);
  if (header.magic != kIndexMagic) return differs("magic", header.magic, kIndexMagic);
  if (header.format_version != kIndexFormatVersion) {
    return differs("format_version", header.format_version, kIndexFormatVersion);
  }
  const std::uint32_t crc = static_header_crc(header);
  if (header.static_crc != crc) return differs("static_crc", header.static_crc, crc);
  if (header.entry_capacity < kMinEntryCapacity || header.entry_capacity > kMaxEntryCapacity) {
    return differs("entry_capacity", header.entry_capacity, kMaxEntryCapacity);
  }
  *layout = IndexLayout::of(header.entry_capacity);
  if (header.bucket_count != layout->bucket_count) {
    return differs("bucket_count", header.bucket_count, layout->bucket_count);
  }
  if (mapped_bytes != layout->file_bytes)
    return differs("index_file_bytes", mapped_bytes, layout->file_bytes);
  return Status();
}

void IndexView::seal_static_header() noexcept {
  header_->static_crc = static_header_crc(*header_);
}

// One chain, as a reader in another process sees it: bounded, bounds-checked, each entry a seqlock.
bool IndexView::is_ready(const Key& key, std::uint64_t bucket) const noexcept {
  if (cannot_hold(bucket, key.word[0])) return false;
  std::uint32_t entry = bucket_entry(bucket);
  for (std::uint32_t step = 0; step < kMaxChainSteps; ++step) {
    if (entry >= capacity_) return false;
    const HotEntry& hot = hot_[entry];
    std::uint64_t links = 0;
    bool matches = false;
    bool stable = false;
    std::uint64_t before = load_word(hot.word[0]);
    for (int attempt = 0; attempt < kSeqlockRetries; ++attempt) {
      matches = true;
      for (int i = 0; i < 4; ++i)
        matches &= load_word(hot.word[1 + i]) == key.word[i];
      links = load_word(hot.word[7]);
      const std::uint64_t after = load_word(hot.word[0]);
      if (before == after && (before & 1) == 0) {
        stable = true;
        break;
      }
      before = after;
    }
    if (!stable) return false;
    if (matches)
      return static_cast<std::uint8_t>(before >> 32) ==
             static_cast<std::uint8_t>(EntryState::kReady);
    entry = static_cast<std::uint32_t>(links >> 32) - 1;
  }
  return false;
}

std::size_t IndexView::peek(const std::uint8_t* keys, std::size_t n_keys,
                            std::size_t n_slices) const noexcept {
  // Three groups are under way at a time: the buckets of one are fetched while the entries of the
  // one before are, and those of the one before that are compared.
  Key key[3][kGroupKeys];
  std::uint64_t bucket[3][kGroupKeys];
  const std::size_t groups = (n_keys + kGroupKeys - 1) / kGroupKeys;
  for (std::size_t stage = 0; stage < groups + 2; ++stage) {
    if (stage < groups) {
      const std::size_t first = stage * kGroupKeys;
      const std::size_t count = std::min(kGroupKeys, n_keys - first);
      for (std::size_t i = 0; i < count; ++i) {
        key[stage % 3][i] = Key::load(keys + (first + i) * kKeyBytes);
        prefetch(&bucket_of(key[stage % 3][i].word[0]));
      }
    }
    if (stage >= 1 && stage - 1 < groups) {
      const std::size_t group = stage - 1;
      const std::size_t count = std::min(kGroupKeys, n_keys - group * kGroupKeys);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t word = load_word(bucket_of(key[group % 3][i].word[0]));
        bucket[group % 3][i] = word;
        if (bucket_entry(word) < capacity_) prefetch(&hot_[bucket_entry(word)]);
      }
    }
    if (stage >= 2) {
      const std::size_t group = stage - 2;
      const std::size_t first = group * kGroupKeys;
      const std::size_t count = std::min(kGroupKeys, n_keys - first);
      for (std::size_t i = 0; i < count; ++i) {
        if (!is_ready(key[group % 3][i], bucket[group % 3][i])) return (first + i) / n_slices;
      }
    }
  }
  return n_keys / n_slices;
}

std::uint32_t IndexView::walk(const Key& key, std::uint64_t bucket) const noexcept {
  if (cannot_hold(bucket, key.word[0])) return kNoEntry;
  std::uint32_t entry = bucket_entry(bucket);
  for (std::uint32_t step = 0; step < kMaxChainSteps && entry < capacity_; ++step) {
    if (this->key(entry) == key) return entry;
    entry = next(entry);
  }
  return kNoEntry;
}

std::uint32_t IndexView::find(const Key& key) const noexcept {
  return walk(key, load_word(bucket_of(key.word[0])));
}

void IndexView::find_batch(const std::uint8_t* keys, std::size_t n_keys, std::uint32_t* entries,
                           const void* beside, std::size_t beside_stride) const noexcept {
  const auto* beside_bytes = static_cast<const std::uint8_t*>(beside);
  Key key[3][kGroupKeys];
  std::uint64_t bucket[3][kGroupKeys];
  const std::size_t groups = (n_keys + kGroupKeys - 1) / kGroupKeys;
  for (std::size_t stage = 0; stage < groups + 2; ++stage) {
    if (stage < groups) {
      const std::size_t first = stage * kGroupKeys;
      const std::size_t count = std::min(kGroupKeys, n_keys - first);
      for (std::size_t i = 0; i < count; ++i) {
        key[stage % 3][i] = Key::load(keys + (first + i) * kKeyBytes);
        prefetch(&bucket_of(key[stage % 3][i].word[0]));
      }
    }
    if (stage >= 1 && stage - 1 < groups) {
      const std::size_t group = stage - 1;
      const std::size_t count = std::min(kGroupKeys, n_keys - group * kGroupKeys);
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t word = load_word(bucket_of(key[group % 3][i].word[0]));
        bucket[group % 3][i] = word;
        const std::uint32_t entry = bucket_entry(word);
        if (entry < capacity_) {
          prefetch(&hot_[entry]);
          prefetch(&cold_[entry]);
          prefetch(beside_bytes + beside_stride * entry);
        }
      }
    }
    if (stage >= 2) {
      const std::size_t group = stage - 2;
      const std::size_t first = group * kGroupKeys;
      const std::size_t count = std::min(kGroupKeys, n_keys - first);
      for (std::size_t i = 0; i < count; ++i) {
        entries[first + i] = walk(key[group % 3][i], bucket[group % 3][i]);
      }
    }
  }
}

std::uint64_t IndexView::pack_bucket(std::uint64_t hash, std::uint32_t entry) const noexcept {
  if (entry >= capacity_) return 0;
  return (hash & kHashBits) | (next(entry) < capacity_ ? kChainGoesOn : 0) | (entry + 1);
}

std::uint32_t IndexView::first_of(std::uint64_t bucket) const noexcept {
  return bucket_entry(load_word(buckets_[bucket]));
}

bool IndexView::link(std::uint32_t entry, const Key& key) noexcept {
  std::uint64_t& bucket = bucket_of(key.word[0]);
  const std::uint32_t head = bucket_entry(load_word(bucket));
  std::uint32_t steps = 1;
  for (std::uint32_t at = head; at < capacity_; at = next(at)) {
    if (++steps > kMaxChainSteps) return false;
  }
  set_next(entry, head < capacity_ ? head : kNoEntry);
  store_word(bucket, pack_bucket(key.word[0], entry));
  return true;
}

void IndexView::unlink(std::uint32_t entry, const Key& key) noexcept {
  std::uint64_t& bucket = bucket_of(key.word[0]);
  const std::uint32_t head = bucket_entry(load_word(bucket));
  const std::uint32_t after = next(entry);
  if (head == entry) {
    store_word(bucket, pack_bucket(after < capacity_ ? this->key(after).word[0] : 0, after));
    return;
  }
  std::uint32_t at = head;
  for (std::uint32_t step = 0; step < kMaxChainSteps && at < capacity_; ++step) {
    if (next(at) == entry) {
      set_next(at, after);
      if (at == head) store_word(bucket, pack_bucket(this->key(head).word[0], head));
      return;
    }
    at = next(at);
  }
}

void IndexView::write_entry(std::uint32_t entry, const Key& key, std::uint64_t offset,
                            std::uint32_t length) noexcept {
  const std::uint64_t next_generation = static_cast<std::uint32_t>(generation(entry) + 1);
  HotEntry& hot = hot_[entry];
  begin_change(entry);
  for (int i = 0; i < 4; ++i)
    store_word(hot.word[1 + i], key.word[i]);
  store_word(hot.word[5], offset);
  store_word(hot.word[6], length | (next_generation << 32));
  store_word<std::uint64_t>(hot.word[7], 0);
  end_change(entry, EntryState::kFree);
}

void IndexView::clear_buckets() noexcept {
  for (std::uint64_t i = 0; i <= bucket_mask_; ++i) {
    if (load_word(buckets_[i], std::memory_order_relaxed) != 0)
      store_word<std::uint64_t>(buckets_[i], 0);
  }
}

Mapping::Mapping(Mapping&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    address_ = std::exchange(other.address_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Mapping::~Mapping() {
  reset();
}

void Mapping::reset() noexcept {
  if (address_ != nullptr) munmap(address_, bytes_);
  address_ = nullptr;
  bytes_ = 0;
}

Status Mapping::map(int fd, std::uint64_t bytes, bool writable, bool dont_fork,
                    Mapping* out) noexcept {
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED)
    return Status(StatusCode::kOsError, "mmap of a pool file failed", errno);
  if (dont_fork && madvise(address, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(address, bytes);
    return Status(StatusCode::kOsError, "madvise(MADV_DONTFORK) of a pool file failed", error);
  }
  Mapping mapping;
  mapping.address_ = address;
  mapping.bytes_ = bytes;
  *out = std::move(mapping);
  return Status();
}

Status Mapping::anonymous(std::uint64_t bytes, Mapping* out) noexcept {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED)
    return Status(StatusCode::kOsError, "mmap of private memory failed", errno);
  Mapping mapping;
  mapping.address_ = address;
  mapping.bytes_ = bytes;
  *out = std::move(mapping);
  return Status();
}

Status IndexReader::open(int index_fd, IndexReader* out, FormatMismatch* mismatch) noexcept {
  struct stat info{};
  if (fstat(index_fd, &info) != 0)
    return Status(StatusCode::kOsError, "fstat of the index file failed", errno);
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  const std::uint64_t smallest = IndexLayout::of(kMinEntryCapacity).file_bytes;
  if (bytes < smallest) {
    *mismatch = {"index_file_bytes", bytes, smallest};
    return Status(StatusCode::kIncompatible, "index_file_bytes");
  }
  Mapping mapping;
  KVSTRATA_RETURN_IF_ERROR(Mapping::map(index_fd, bytes, false, true, &mapping));
  IndexLayout layout;
  KVSTRATA_RETURN_IF_ERROR(IndexView::check(mapping.address(), bytes, &layout, mismatch));
  out->view_ = IndexView(mapping.address(), layout);
  out->mapping_ = std::move(mapping);
  return Status();
}

std::size_t IndexReader::peek(const std::uint8_t* keys, std::size_t n_keys,
                              std::size_t n_slices) const noexcept {
  if (heartbeat_age_ns() > kHeartbeatLimitNs) return 0;
  return view_.peek(keys, n_keys, n_slices);
}

std::uint64_t IndexReader::epoch() const noexcept {
  return load_word(view_.header().epoch);
}

std::uint64_t IndexReader::heartbeat_age_ns() const noexcept {
  const std::uint64_t beat = load_word(view_.header().heartbeat_ns);
  const std::uint64_t now = monotonic_ns();
  // The server may beat between the two reads; anything later than that is no time of ours.
  if (beat > now + kHeartbeatLimitNs || beat == 0) return std::numeric_limits<std::uint64_t>::max();
  return beat > now ? 0 : now - beat;
}

bool IndexReader::has_l2() const noexcept {
  return (load_word(view_.header().flags) & kIndexFlagHasL2) != 0;
}

std::uint64_t IndexReader::extents_bytes() const noexcept {
  return view_.header().extents_bytes;
}

std::span<const std::uint8_t, 16> IndexReader::pool_id() const noexcept {
  return std::span<const std::uint8_t, 16>(view_.header().pool_id);
}

}  // namespace kvstrata
