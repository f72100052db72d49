// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/index.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <utility>

#include "base/patience.h"
#include "base/sizes.h"
#include "hash/crc32c.h"

namespace kvstrata {

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kGroupKeys = 16;

std::uint32_t static_header_crc(const IndexHeader& header) noexcept {
  IndexHeader copy{};
  std::memcpy(static_cast<void*>(&copy), &header, kStaticHeaderBytes);
  copy.static_crc = 0;
  return crc32c(&copy, kStaticHeaderBytes);
}

constexpr std::uint64_t kProbeBit = 1ULL << 31;
constexpr std::uint64_t kEntryBits = kProbeBit - 1;
constexpr std::uint64_t kTagBits = 0xFFFFFFFF00000000ULL;

constexpr std::uint32_t slot_entry(std::uint64_t slot) {
  return static_cast<std::uint32_t>(slot & kEntryBits) - 1;
}

inline void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 3);
}

inline Key key_at(const std::uint8_t* keys, std::size_t i) noexcept {
  return Key::load(keys + i * kKeyBytes);
}

// Looks keys up while memory answers: three groups are under way at a time. While `fetch` asks for
// the bucket lines of one group, `guess` asks for the entries of the group before it, and `confirm`
// compares those of the group before that. Ends when `confirm` returns false.
template <class Fetch, class Guess, class Confirm>
inline void in_three_steps(std::size_t n_keys, Fetch fetch, Guess guess, Confirm confirm) {
  const std::size_t groups = (n_keys + kGroupKeys - 1) / kGroupKeys;
  const auto end_of = [&](std::size_t group) { return std::min(n_keys, (group + 1) * kGroupKeys); };
  for (std::size_t stage = 0; stage < groups + 2; ++stage) {
    if (stage < groups) {
      for (std::size_t i = stage * kGroupKeys; i < end_of(stage); ++i)
        fetch(i);
    }
    if (stage >= 1 && stage - 1 < groups) {
      for (std::size_t i = (stage - 1) * kGroupKeys; i < end_of(stage - 1); ++i)
        guess(i);
    }
    if (stage >= 2) {
      for (std::size_t i = (stage - 2) * kGroupKeys; i < end_of(stage - 2); ++i) {
        if (!confirm(i)) return;
      }
    }
  }
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
  // When every entry is in use, half of the slots are in use: then one line in fifty overflows, and
  // none by more than a few lines.
  layout.bucket_lines =
      std::max<std::uint64_t>((2 * entry_capacity + kLineSlots - 1) / kLineSlots, kMaxProbeLines);
  layout.buckets_offset = sizeof(IndexHeader) + sizeof(RowRecord) * kRowCount;
  layout.hot_offset =
      round_up(layout.buckets_offset + sizeof(BucketLine) * layout.bucket_lines, kPage);
  layout.cold_offset = round_up(layout.hot_offset + sizeof(HotEntry) * entry_capacity, kPage);
  layout.file_bytes = round_up(layout.cold_offset + sizeof(ColdEntry) * entry_capacity, kPage);
  return layout;
}

IndexView::IndexView(void* base, const IndexLayout& layout) noexcept {
  auto* bytes = static_cast<std::uint8_t*>(base);
  header_ = reinterpret_cast<IndexHeader*>(bytes);
  rows_ = reinterpret_cast<RowRecord*>(bytes + sizeof(IndexHeader));
  lines_ = reinterpret_cast<BucketLine*>(bytes + layout.buckets_offset);
  hot_ = reinterpret_cast<HotEntry*>(bytes + layout.hot_offset);
  cold_ = reinterpret_cast<ColdEntry*>(bytes + layout.cold_offset);
  bucket_lines_ = layout.bucket_lines;
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
  if (header.bucket_lines != layout->bucket_lines) {
    return differs("bucket_lines", header.bucket_lines, layout->bucket_lines);
  }
  if (mapped_bytes != layout->file_bytes)
    return differs("index_file_bytes", mapped_bytes, layout->file_bytes);
  return Status();
}

void IndexView::seal_static_header() noexcept {
  header_->static_crc = static_header_crc(*header_);
}

std::uint32_t IndexView::probe_length(std::uint64_t line) const noexcept {
  std::uint32_t length = 0;
  for (std::uint32_t bit = 0; bit < 3; ++bit) {
    const std::uint64_t slot = load_word(lines_[line].slot[bit], std::memory_order_relaxed);
    length |= static_cast<std::uint32_t>((slot & kProbeBit) >> 31) << bit;
  }
  return length;
}

void IndexView::set_probe_length(std::uint64_t line, std::uint32_t length) noexcept {
  // Sets bits before it clears others, so that a length read meanwhile may be too long, but never
  // too short.
  for (const bool clearing : {false, true}) {
    for (std::uint32_t bit = 0; bit < 3; ++bit) {
      std::uint64_t& slot = lines_[line].slot[bit];
      const std::uint64_t word = load_word(slot, std::memory_order_relaxed);
      const bool wanted = (length >> bit & 1) != 0;
      if (wanted == clearing || wanted == ((word & kProbeBit) != 0)) continue;
      store_word(slot, word ^ kProbeBit);
    }
  }
}

std::uint32_t IndexView::candidate(std::uint64_t line, std::uint64_t hash) const noexcept {
  for (const std::uint64_t& word : lines_[line].slot) {
    const std::uint64_t slot = load_word(word);
    if (((slot ^ hash) & kTagBits) == 0 && slot_entry(slot) < capacity_) return slot_entry(slot);
  }
  return kNoEntry;
}

// One entry as a reader in another process sees it. REQUIRES: entry < capacity.
IndexView::Match IndexView::match(std::uint32_t entry, const Key& key) const noexcept {
  const HotEntry& hot = hot_[entry];
  std::uint64_t before = load_word(hot.word[0]);
  for (int attempt = 0; attempt < kSeqlockRetries; ++attempt) {
    bool equal = true;
    for (int i = 0; i < 4; ++i)
      equal &= load_word(hot.word[1 + i]) == key.word[i];
    const std::uint64_t after = load_word(hot.word[0]);
    if (before == after && (before & 1) == 0) {
      if (!equal) return Match::kNo;
      const auto state = static_cast<EntryState>(before >> 32 & 0xFF);
      return state == EntryState::kReady ? Match::kReady : Match::kNotReady;
    }
    before = after;
  }
  return Match::kNotReady;
}

bool IndexView::is_ready(const Key& key) const noexcept {
  const std::uint64_t home = home_of(key.word[0]);
  const std::uint32_t length = probe_length(home);
  for (std::uint32_t step = 0; step <= length; ++step) {
    for (const std::uint64_t& word : lines_[(home + step) % bucket_lines_].slot) {
      const std::uint64_t slot = load_word(word);
      if (((slot ^ key.word[0]) & kTagBits) != 0 || slot_entry(slot) >= capacity_) continue;
      const Match found = match(slot_entry(slot), key);
      if (found != Match::kNo) return found == Match::kReady;
    }
  }
  return false;
}

std::size_t IndexView::peek(const std::uint8_t* keys, std::size_t n_keys,
                            std::size_t n_slices) const noexcept {
  std::uint32_t guesses[3 * kGroupKeys];
  std::size_t ready = 0;
  in_three_steps(
      n_keys, [&](std::size_t i) { prefetch_line(keys, i); },
      [&](std::size_t i) {
        const std::uint32_t entry = guesses[i % std::size(guesses)] = guess(keys, i);
        if (entry != kNoEntry) prefetch(&hot_[entry]);
      },
      [&](std::size_t i) {
        const Key key = key_at(keys, i);
        const std::uint32_t entry = guesses[i % std::size(guesses)];
        const Match found = entry == kNoEntry ? Match::kNo : match(entry, key);
        const bool is_next = found == Match::kReady || (found == Match::kNo && is_ready(key));
        ready += is_next ? 1 : 0;
        return is_next;
      });
  return ready / n_slices;
}

std::size_t IndexView::peek_windows(const std::uint8_t* keys, std::size_t n_chunks,
                                    std::span<const std::uint32_t> spans) const noexcept {
  return longest_windows(n_chunks, spans, [&](std::size_t chunk, std::size_t slice) {
    return is_ready(Key::load(keys + (chunk * spans.size() + slice) * kKeyBytes));
  });
}

std::uint32_t IndexView::find(const Key& key) const noexcept {
  const std::uint64_t home = home_of(key.word[0]);
  const std::uint32_t length = probe_length(home);
  for (std::uint32_t step = 0; step <= length; ++step) {
    for (const std::uint64_t& word : lines_[(home + step) % bucket_lines_].slot) {
      const std::uint64_t slot = load_word(word, std::memory_order_relaxed);
      if (((slot ^ key.word[0]) & kTagBits) != 0 || slot_entry(slot) >= capacity_) continue;
      if (this->key(slot_entry(slot)) == key) return slot_entry(slot);
    }
  }
  return kNoEntry;
}

void IndexView::find_batch(const std::uint8_t* keys, std::size_t n_keys, std::uint32_t* entries,
                           const void* beside, std::size_t beside_stride) const noexcept {
  in_three_steps(
      n_keys, [&](std::size_t i) { prefetch_line(keys, i); },
      [&](std::size_t i) {
        guess_batch(keys + i * kKeyBytes, 1, entries + i, beside, beside_stride);
      },
      [&](std::size_t i) {
        confirm_batch(keys + i * kKeyBytes, 1, entries + i);
        return true;
      });
}

void IndexView::prefetch_lines(const std::uint8_t* keys, std::size_t n_keys) const noexcept {
  for (std::size_t i = 0; i < n_keys; ++i)
    prefetch_line(keys, i);
}

void IndexView::guess_batch(const std::uint8_t* keys, std::size_t n_keys, std::uint32_t* entries,
                            const void* beside, std::size_t beside_stride) const noexcept {
  for (std::size_t i = 0; i < n_keys; ++i) {
    const std::uint32_t entry = entries[i] = guess(keys, i);
    if (entry == kNoEntry) continue;
    prefetch(&hot_[entry]);
    prefetch(&cold_[entry]);
    prefetch(static_cast<const std::uint8_t*>(beside) + beside_stride * entry);
  }
}

void IndexView::confirm_batch(const std::uint8_t* keys, std::size_t n_keys,
                              std::uint32_t* entries) const noexcept {
  for (std::size_t i = 0; i < n_keys; ++i) {
    const Key wanted = key_at(keys, i);
    const std::uint32_t guess = entries[i];
    // A READY or UNVERIFIED entry is linked under its key, and no other entry is.
    if (guess != kNoEntry && this->key(guess) == wanted) {
      const EntryState found = state(guess);
      if (found == EntryState::kReady || found == EntryState::kUnverified) continue;
    }
    entries[i] = find(wanted);
  }
}

void IndexView::prefetch_line(const std::uint8_t* keys, std::size_t i) const noexcept {
  prefetch(&lines_[home_of(key_at(keys, i).word[0])]);
}

std::uint32_t IndexView::guess(const std::uint8_t* keys, std::size_t i) const noexcept {
  const std::uint64_t hash = key_at(keys, i).word[0];
  return candidate(home_of(hash), hash);
}

bool IndexView::link(std::uint32_t entry, const Key& key) noexcept {
  const std::uint64_t home = home_of(key.word[0]);
  for (std::uint32_t step = 0; step < kMaxProbeLines; ++step) {
    for (std::uint64_t& word : lines_[(home + step) % bucket_lines_].slot) {
      if ((load_word(word, std::memory_order_relaxed) & kEntryBits) != 0) continue;
      if (step > probe_length(home)) set_probe_length(home, step);
      const std::uint64_t probe_bit = load_word(word, std::memory_order_relaxed) & kProbeBit;
      store_word(word, (key.word[0] & kTagBits) | probe_bit | (entry + 1));
      return true;
    }
  }
  return false;
}

void IndexView::unlink(std::uint32_t entry, const Key& key) noexcept {
  const std::uint64_t home = home_of(key.word[0]);
  const std::uint32_t length = probe_length(home);
  std::uint32_t longest = 0;
  for (std::uint32_t step = 0; step <= length; ++step) {
    for (std::uint64_t& word : lines_[(home + step) % bucket_lines_].slot) {
      const std::uint64_t slot = load_word(word, std::memory_order_relaxed);
      if (slot_entry(slot) == entry) {
        store_word(word, slot & kProbeBit);
        if (step == 0) return;
      } else if (step > 0 && slot_entry(slot) < capacity_ &&
                 home_of(this->key(slot_entry(slot)).word[0]) == home) {
        longest = step;
      }
    }
  }
  if (longest != length) set_probe_length(home, longest);
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
  for (std::uint64_t line = 0; line < bucket_lines_; ++line) {
    for (std::uint64_t& slot : lines_[line].slot) {
      if (load_word(slot, std::memory_order_relaxed) != 0) store_word<std::uint64_t>(slot, 0);
    }
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
  // Otherwise the core dump of a crashed process would include the whole pool, if it is a memfd.
  (void)madvise(address, bytes, MADV_DONTDUMP);
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
  out->heartbeat_limit_ns_ =
      static_cast<std::uint64_t>(patience(std::chrono::nanoseconds(kHeartbeatLimitNs)).count());
  return Status();
}

std::size_t IndexReader::peek(const std::uint8_t* keys, std::size_t n_keys,
                              std::size_t n_slices) const noexcept {
  if (heartbeat_age_ns() > heartbeat_limit_ns_) return 0;
  return view_.peek(keys, n_keys, n_slices);
}

std::size_t IndexReader::peek_windows(const std::uint8_t* keys, std::size_t n_chunks,
                                      std::span<const std::uint32_t> spans) const noexcept {
  if (heartbeat_age_ns() > heartbeat_limit_ns_) return 0;
  return view_.peek_windows(keys, n_chunks, spans);
}

std::uint64_t IndexReader::epoch() const noexcept {
  return load_word(view_.header().epoch);
}

std::uint64_t IndexReader::heartbeat_age_ns() const noexcept {
  const std::uint64_t beat = load_word(view_.header().heartbeat_ns);
  const std::uint64_t now = monotonic_ns();
  // The server may beat between the two reads; a time beyond that cannot be a heartbeat.
  if (beat > now + kHeartbeatLimitNs || beat == 0) return std::numeric_limits<std::uint64_t>::max();
  return beat > now ? 0 : now - beat;
}

bool IndexReader::has(std::uint64_t flag) const noexcept {
  return (load_word(view_.header().flags) & flag) != 0;
}

std::uint64_t IndexReader::extents_bytes() const noexcept {
  return view_.header().extents_bytes;
}

std::span<const std::uint8_t, 16> IndexReader::pool_id() const noexcept {
  return std::span<const std::uint8_t, 16>(view_.header().pool_id);
}

}  // namespace kvstrata
