// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The index file: maps each chunk to its place in the extents file. One process, the server, writes
// it; any number of processes map it read-only and look keys up without a request.
// docs/internals/formats.md describes it for readers in other languages.
//
// Layout, all words little-endian, offsets from the start of the file:
//
//   0       IndexHeader                 4096 bytes
//   4096    RowRecord[1024]             64 bytes each: attached processes
//   69632   BucketLine[bucket_lines]    64 bytes each: where to look for a key
//   ...     HotEntry[entry_capacity]    64 bytes each, page aligned: what readers need
//   ...     ColdEntry[entry_capacity]   64 bytes each, page aligned: what only the server needs
//
// Every word that is shared is read and written with std::atomic_ref. A hot entry is a seqlock: bit
// 0 of its first word is set while the writer changes it. A reader that sees the bit set, or finds
// that the word has changed while it read the others, tries again. After kSeqlockRetries attempts
// it reports a miss.
//
// A SIGKILL leaves a prefix of the writer's stores behind. The writer orders its stores so that
// every prefix is safe: it stores an entry's fields before the state that makes them count, and the
// state that ends an entry before it changes the fields.
//
// A key's hash names its home line. A key that found its home line full is in one of the lines
// after it, at most kMaxProbeLines - 1 away; the home line says how many lines to look at. Entries
// never move. A reader that races with the writer can miss a key, and never finds a wrong one.
//
// Readers trust nothing in the file: every index is checked against the capacity that was validated
// when the file was mapped, and every walk has a bound.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/status.h"

namespace kvstrata {

inline constexpr std::uint64_t kIndexMagic = 0x315845444E49564BULL;  // "KVINDEX1"
inline constexpr std::uint32_t kIndexFormatVersion = 5;
inline constexpr std::size_t kKeyBytes = 32;
inline constexpr std::uint32_t kRowCount = 1024;  // row 0 is the server's
// Bits of ColdEntry::rows. Rows that are equal modulo this share a bit.
inline constexpr std::uint32_t kRowBits = 128;
inline constexpr std::uint32_t kMaxSlabs = 64;
inline constexpr std::uint32_t kLineSlots = 8;
inline constexpr std::uint32_t kMaxProbeLines = 8;
inline constexpr int kSeqlockRetries = 4;
inline constexpr std::uint64_t kExtentAlignment = 4096;
inline constexpr std::uint32_t kMinEntryCapacity = 1;
inline constexpr std::uint32_t kMaxEntryCapacity = 1u << 30;
inline constexpr std::uint64_t kHeartbeatLimitNs = 1'000'000'000;
// An entry id that names no entry. Stored links are id + 1, so that a zeroed file is an empty
// index.
inline constexpr std::uint32_t kNoEntry = 0xFFFFFFFFu;

// Flags of the header.
inline constexpr std::uint64_t kIndexFlagHasL2 = 1;
inline constexpr std::uint64_t kIndexFlagPromises = 2;  // engines promise chunks now

// A device may access the extents on behalf of the row's process.
inline constexpr std::uint64_t kRowFlagRegistersMemory = 1;

enum class EntryState : std::uint8_t {
  kFree = 0,
  kReserved = 1,     // one session may write; invisible to readers
  kReady = 2,        // visible
  kUnverified = 3,   // adopted from an earlier server, checksums not verified yet
  kQuarantined = 4,  // not in the index, but a process may still touch the bytes
};
inline constexpr int kEntryStateCount = 5;

// A 32-byte key as words, as it lies in memory.
struct Key {
  std::uint64_t word[4];

  static Key load(const void* bytes) noexcept {
    Key key;
    std::memcpy(key.word, bytes, kKeyBytes);
    return key;
  }
  void store(void* bytes) const noexcept { std::memcpy(bytes, word, kKeyBytes); }
  bool operator==(const Key& other) const noexcept = default;
};

struct IndexHeader {
  // Written once, when the file is made; covered by static_crc.
  std::uint64_t magic;
  std::uint32_t format_version;
  std::uint32_t static_crc;  // CRC32C of the static fields with this word as zero
  std::uint8_t pool_id[16];
  std::uint64_t extents_bytes;
  std::uint64_t entry_capacity;
  std::uint64_t bucket_lines;
  std::uint64_t reserved_static;
  // Changed by the server while it runs.
  std::uint64_t epoch;
  std::uint64_t heartbeat_ns;  // CLOCK_MONOTONIC
  std::uint64_t flags;
  std::uint64_t slab_bytes;       // 0: geometry not chosen
  std::uint64_t entries_touched;  // entries at or above this id were never used
  std::uint64_t unused[3];
  // One word a slab, see SlabMap.
  std::uint64_t slab_table[kMaxSlabs];
  std::uint8_t padding[4096 - 128 - 8 * kMaxSlabs];
};
static_assert(sizeof(IndexHeader) == 4096);
inline constexpr std::size_t kStaticHeaderBytes = offsetof(IndexHeader, epoch);

struct RowRecord {
  std::uint64_t claimed;  // 0 or 1
  std::uint8_t session[16];
  std::uint8_t group[16];
  std::uint64_t epoch;  // the row's process may touch nothing of epochs before this one
  std::uint64_t pid;
  std::uint64_t flags;  // kRowFlag…
};
static_assert(sizeof(RowRecord) == 64);

// A slot: entry id + 1 (bits 0..30; 0: the slot is empty) | one bit of the probe length (31) |
// upper half of the key's first word (32..63). The probe length is the number of lines after this
// one that may hold keys whose home is this line: bit 31 of slot 0 is its lowest bit, of slot 2 its
// highest.
struct alignas(64) BucketLine {
  std::uint64_t slot[kLineSlots];
};
static_assert(sizeof(BucketLine) == 64);

// word[0]: sequence (bits 0..31, odd while changing) | state (32..39) | zero
// word[1..4]: key   word[5]: offset   word[6]: length | generation << 32   word[7]: parent
struct alignas(64) HotEntry {
  std::uint64_t word[8];
};
static_assert(sizeof(HotEntry) == 64);

struct alignas(64) ColdEntry {
  // Processes that may touch the bytes: bit `row % kRowBits`. Up to 127 attached processes have a
  // bit each. With more, some share a bit, and a restarted server waits for all that share it.
  std::uint64_t rows[kRowBits / 64];
  std::uint64_t stamp;        // greater than those of all entries that were used before
  std::uint8_t identity[16];  // the first half of the identity root
  std::uint64_t owner;        // row that reserved it, or Rows::kNoOwner
  std::uint64_t tenant;
  std::uint64_t use;  // Traits of the policy, and above them the tick of its last use
};
static_assert(sizeof(ColdEntry) == 64);

template <typename T>
inline T load_word(const T& word, std::memory_order order = std::memory_order_acquire) noexcept {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(order);
}
template <typename T>
inline void store_word(T& word, T value,
                       std::memory_order order = std::memory_order_release) noexcept {
  std::atomic_ref<T>(word).store(value, order);
}

// Sizes and offsets that follow from the entry capacity.
struct IndexLayout {
  std::uint64_t entry_capacity = 0;
  std::uint64_t bucket_lines = 0;
  std::uint64_t buckets_offset = 0;
  std::uint64_t hot_offset = 0;
  std::uint64_t cold_offset = 0;
  std::uint64_t file_bytes = 0;

  // REQUIRES: kMinEntryCapacity <= entry_capacity <= kMaxEntryCapacity.
  static IndexLayout of(std::uint64_t entry_capacity) noexcept;
};

// A field of the header with a wrong value, for the error that names it.
struct FormatMismatch {
  const char* field = "";
  std::uint64_t found = 0;
  std::uint64_t expected = 0;
};

// The longest hit of a prompt whose KV has several groups. A slice with span 0 is needed in each
// chunk of a hit; a slice with span k only in the last k chunks: those of a sliding window, or the
// last chunk for a state. Chunks before them may be absent.

// The most chunks n, at most `n_chunks`, such that `present(chunk, slice)` for the last
// `spans[slice]` of these n chunks (all n, if there are fewer) of each slice whose span is not 0.
// Asks for each chunk of a slice at most once.
template <class Present>
std::size_t longest_windows(std::size_t n_chunks, std::span<const std::uint32_t> spans,
                            Present&& present) {
  std::size_t n = n_chunks;
  // Of each slice the chunks from `known[slice]` up to n are present.
  std::vector<std::size_t> known(spans.size(), n);
  for (std::size_t slice = 0, agreed = 0; n != 0 && agreed < spans.size();
       slice = (slice + 1) % spans.size()) {
    const std::size_t first = n - std::min<std::size_t>(n, spans[slice]);
    std::size_t chunk = std::min(known[slice], n);
    while (chunk > first && present(chunk - 1, slice))
      --chunk;
    known[slice] = chunk;
    if (chunk <= first) {
      ++agreed;
      continue;
    }
    // Every longer hit would need this absent chunk as well.
    n = chunk - 1;
    agreed = 0;
  }
  return n;
}

// Typed pointers into a mapped index. Does not own the mapping, which must outlive it.
class IndexView {
 public:
  IndexView() noexcept = default;
  IndexView(void* base, const IndexLayout& layout) noexcept;

  // Checks the static header of a mapped file of `mapped_bytes` and returns its layout.
  [[nodiscard]] static Status check(const void* base, std::uint64_t mapped_bytes,
                                    IndexLayout* layout, FormatMismatch* mismatch) noexcept;

  IndexHeader& header() const noexcept { return *header_; }
  RowRecord& row(std::uint32_t row) const noexcept { return rows_[row]; }
  HotEntry& hot(std::uint32_t entry) const noexcept { return hot_[entry]; }
  ColdEntry& cold(std::uint32_t entry) const noexcept { return cold_[entry]; }
  std::uint32_t capacity() const noexcept { return capacity_; }
  std::uint64_t bucket_lines() const noexcept { return bucket_lines_; }
  BucketLine& line(std::uint64_t line) const noexcept { return lines_[line]; }
  // The home line of a key with this first word.
  std::uint64_t home_of(std::uint64_t hash) const noexcept {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(hash)) * bucket_lines_) >> 32;
  }
  // Lines after `line` that may hold keys whose home it is; less than kMaxProbeLines.
  std::uint32_t probe_length(std::uint64_t line) const noexcept;

  // Leading chunks whose `n_slices` keys are all READY. `keys` holds n_chunks * n_slices keys of 32
  // bytes, chunk-major. Any thread, any process; never blocks. REQUIRES: n_slices > 0.
  std::size_t peek(const std::uint8_t* keys, std::size_t n_keys,
                   std::size_t n_slices) const noexcept;
  // The most chunks n, at most `n_chunks`, such that for each slice s the last `spans[s]` of these
  // n chunks are READY, or all n if there are fewer. `keys` holds n_chunks * spans.size() keys,
  // chunk-major. Any thread, any process; never blocks.
  std::size_t peek_windows(const std::uint8_t* keys, std::size_t n_chunks,
                           std::span<const std::uint32_t> spans) const noexcept;

  // The entry that is linked under each key, in any state, or kNoEntry; for the writer, under its
  // lock. The cold entry and element `entry` of `beside` (an array of the writer's with
  // `beside_stride` bytes an element) are fetched into the cache as well.
  void find_batch(const std::uint8_t* keys, std::size_t n_keys, std::uint32_t* entries,
                  const void* beside, std::size_t beside_stride) const noexcept;
  std::uint32_t find(const Key& key) const noexcept;
  // find_batch in three steps, between which the caller does other work while memory answers. The
  // first two may be called by any thread without a lock: they fetch the keys' home lines into the
  // cache, then write to `entries` a guess for each key, and fetch its entry.
  void prefetch_lines(const std::uint8_t* keys, std::size_t n_keys) const noexcept;
  void guess_batch(const std::uint8_t* keys, std::size_t n_keys, std::uint32_t* entries,
                   const void* beside, std::size_t beside_stride) const noexcept;
  // For the writer, under its lock: replaces guesses by what find_batch would give.
  void confirm_batch(const std::uint8_t* keys, std::size_t n_keys,
                     std::uint32_t* entries) const noexcept;

  // Writer only, once, after the static fields of a new header were filled in.
  void seal_static_header() noexcept;

  // Writer only. False when all lines in reach are full; then nothing changed.
  bool link(std::uint32_t entry, const Key& key) noexcept;
  void unlink(std::uint32_t entry, const Key& key) noexcept;
  void clear_buckets() noexcept;

  // Writer's side of the seqlock. Between the two calls fields are stored with store_word.
  void begin_change(std::uint32_t entry) noexcept {
    std::uint64_t& word = hot_[entry].word[0];
    store_word(word, load_word(word, std::memory_order_relaxed) | 1, std::memory_order_relaxed);
  }
  void end_change(std::uint32_t entry, EntryState state) noexcept {
    std::uint64_t& word = hot_[entry].word[0];
    const std::uint32_t sequence =
        static_cast<std::uint32_t>(load_word(word, std::memory_order_relaxed));
    store_word(word, pack_head((sequence | 1u) + 1u, state));
  }
  // A change of nothing but the state is one store.
  void set_state(std::uint32_t entry, EntryState state) noexcept {
    std::uint64_t& word = hot_[entry].word[0];
    const std::uint32_t sequence =
        static_cast<std::uint32_t>(load_word(word, std::memory_order_relaxed));
    store_word(word, pack_head((sequence & ~1u) + 2u, state));
  }

  // Fills in a FREE entry that is in no chain, with the next generation and no links; it stays
  // FREE.
  void write_entry(std::uint32_t entry, const Key& key, std::uint64_t offset,
                   std::uint32_t length) noexcept;

  // Sets the length of a RESERVED entry's record.
  void set_length(std::uint32_t entry, std::uint32_t length) noexcept {
    store_word(hot_[entry].word[6], length | std::uint64_t{generation(entry)} << 32);
  }

  static constexpr std::uint64_t pack_head(std::uint32_t sequence, EntryState state) noexcept {
    return sequence | (static_cast<std::uint64_t>(state) << 32);
  }

  // Fields as the writer reads them (no retry needed under its lock).
  std::uint8_t state_byte(std::uint32_t entry) const noexcept {
    return static_cast<std::uint8_t>(load_word(hot_[entry].word[0], std::memory_order_relaxed) >>
                                     32);
  }
  EntryState state(std::uint32_t entry) const noexcept {
    return static_cast<EntryState>(state_byte(entry));
  }
  Key key(std::uint32_t entry) const noexcept {
    Key key;
    for (int i = 0; i < 4; ++i)
      key.word[i] = load_word(hot_[entry].word[1 + i], std::memory_order_relaxed);
    return key;
  }
  std::uint64_t offset(std::uint32_t entry) const noexcept {
    return load_word(hot_[entry].word[5], std::memory_order_relaxed);
  }
  std::uint32_t length(std::uint32_t entry) const noexcept {
    return static_cast<std::uint32_t>(load_word(hot_[entry].word[6], std::memory_order_relaxed));
  }
  std::uint32_t generation(std::uint32_t entry) const noexcept {
    return static_cast<std::uint32_t>(load_word(hot_[entry].word[6], std::memory_order_relaxed) >>
                                      32);
  }
  std::uint32_t parent(std::uint32_t entry) const noexcept {
    return static_cast<std::uint32_t>(load_word(hot_[entry].word[7], std::memory_order_relaxed)) -
           1;
  }
  void set_parent(std::uint32_t entry, std::uint32_t parent) noexcept {
    store_word<std::uint64_t>(hot_[entry].word[7], static_cast<std::uint32_t>(parent + 1));
  }

 private:
  enum class Match : std::uint8_t { kNo, kReady, kNotReady };
  // A reader's comparison of one entry with a key.
  Match match(std::uint32_t entry, const Key& key) const noexcept;
  bool is_ready(const Key& key) const noexcept;
  // First entry in the line whose slot could be the key's, or kNoEntry.
  std::uint32_t candidate(std::uint64_t line, std::uint64_t hash) const noexcept;
  // The same for key i of a batch, in its home line, which prefetch_line() fetches into the cache.
  std::uint32_t guess(const std::uint8_t* keys, std::size_t i) const noexcept;
  void prefetch_line(const std::uint8_t* keys, std::size_t i) const noexcept;
  void set_probe_length(std::uint64_t line, std::uint32_t length) noexcept;

  IndexHeader* header_ = nullptr;
  RowRecord* rows_ = nullptr;
  BucketLine* lines_ = nullptr;
  HotEntry* hot_ = nullptr;
  ColdEntry* cold_ = nullptr;
  std::uint64_t bucket_lines_ = 0;
  std::uint32_t capacity_ = 0;
};

// A mapping of a file, or none. Unmapped on destruction.
class Mapping {
 public:
  Mapping() noexcept = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  // Maps [0, bytes) of `fd` shared. A fork of this process does not inherit it when `dont_fork`.
  [[nodiscard]] static Status map(int fd, std::uint64_t bytes, bool writable, bool dont_fork,
                                  Mapping* out) noexcept;
  // Private memory, zero, taken from the system page by page as it is touched.
  [[nodiscard]] static Status anonymous(std::uint64_t bytes, Mapping* out) noexcept;
  void* address() const noexcept { return address_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  void reset() noexcept;

 private:
  void* address_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// CLOCK_MONOTONIC in nanoseconds.
std::uint64_t monotonic_ns() noexcept;

// A client's read-only mapping of the index. Thread-safe; close only when no call is running.
class IndexReader {
 public:
  // Keeps no descriptor: the mapping keeps the file.
  [[nodiscard]] static Status open(int index_fd, IndexReader* out,
                                   FormatMismatch* mismatch) noexcept;

  // As IndexView::peek, but 0 when the server's heartbeat is older than kHeartbeatLimitNs (as
  // base/patience.h has it when the reader is opened).
  std::size_t peek(const std::uint8_t* keys, std::size_t n_keys,
                   std::size_t n_slices) const noexcept;
  // As IndexView::peek_windows, with the same limit.
  std::size_t peek_windows(const std::uint8_t* keys, std::size_t n_chunks,
                           std::span<const std::uint32_t> spans) const noexcept;
  std::uint64_t epoch() const noexcept;
  // Age of the heartbeat; the largest value when there was none or it lies in the future.
  std::uint64_t heartbeat_age_ns() const noexcept;
  // Whether the server has set a kIndexFlag.
  bool has(std::uint64_t flag) const noexcept;
  std::uint64_t extents_bytes() const noexcept;
  std::span<const std::uint8_t, 16> pool_id() const noexcept;
  bool is_open() const noexcept { return mapping_.address() != nullptr; }
  void close() noexcept { mapping_.reset(); }

 private:
  Mapping mapping_;
  IndexView view_;
  std::uint64_t heartbeat_limit_ns_ = kHeartbeatLimitNs;
};

}  // namespace kvstrata
