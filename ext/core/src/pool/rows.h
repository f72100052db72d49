// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The session table, one row for each attached process (row 0 is the server), and the entries that
// a process may touch: the rows recorded in each entry, and the bytes that each row has reserved.
//
// Keeps: the rows in a cold entry include every row that may touch its bytes, from before that
// process can learn their place. An entry that rows of an earlier epoch may touch is held back
// until each of them is gone or quiesced; no clock ends that.
//
// A part of Pool. REQUIRES, for everything here: the pool's mutex.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "pool/entries.h"
#include "pool/index.h"

namespace kvstrata {

// Sets of session rows: exact ones (RowMask) and those that a cold entry stores (RowBits).

// The contents of ColdEntry::rows: several rows share a bit.
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

// Row 0, the server's own, has no state.
enum class RowState : std::uint8_t {
  kUnclaimed,  // no process has the row
  kCurrent,    // its process is attached, and touches no extent of earlier servers
  kOld,        // it was attached to an earlier server, and may touch its extents of that time
  kStranded,   // its process is gone, but a device may still write on its behalf
};

struct RowInfo {
  std::uint32_t row;
  std::array<std::uint8_t, 16> session;
  std::array<std::uint8_t, 16> group;
  std::uint64_t pid;
  bool old;
  bool registers_memory;
};

struct Rows {
  static constexpr std::uint64_t kNoOwner = 0xFFFF;  // of ColdEntry::owner

  // The entries must outlive the object.
  Rows(Entries& entries, std::uint64_t epoch) noexcept : entries(entries), epoch(epoch) {}

  bool is_claimed(std::uint32_t row) const noexcept {
    return row < kRowCount && load_word(entries.index.row(row).claimed) == 1;
  }
  // kNotFound unless the row is claimed and not the server's own.
  [[nodiscard]] Status check(std::uint32_t row) const noexcept;
  // The row that the session has, otherwise an unclaimed one. kNoSpace when there is none.
  [[nodiscard]] Status claim(const std::uint8_t* session, const std::uint8_t* group,
                             std::uint64_t pid, bool registers_memory, std::uint32_t* row) noexcept;
  std::vector<RowInfo> list() const;
  RowState state(std::uint32_t row) const noexcept;
  // With adopt() the only way in which a row's state changes. REQUIRES: row != 0; the row is
  // claimed and forget() was called, unless an UNCLAIMED one becomes CURRENT; an UNCLAIMED one has
  // no lease and no reservation any more; only an OLD or STRANDED one becomes STRANDED.
  void change(std::uint32_t row, RowState to) noexcept;
  // Takes over the row of an earlier server: OLD if it was claimed. A row that is not sound
  // (damaged, or of a session that an earlier row has) becomes UNCLAIMED.
  void adopt(std::uint32_t row, bool sound) noexcept;
  // Claimed rows, without row 0.
  std::uint32_t count() const noexcept;

  // Entries of earlier epochs no longer wait for this row; with `keep_quarantine`, quarantined ones
  // still do. Fills `settled` with the entries that wait for no row any more; the caller must
  // settle them (Departures::settle). Returns the bytes of the entries that still wait for this
  // row. REQUIRES: `settled` is empty.
  std::uint64_t forget(std::uint32_t row, bool keep_quarantine,
                       std::vector<std::uint32_t>* settled);
  // Whether a process of an earlier epoch may touch the entry.
  bool is_old(std::uint32_t entry) const noexcept { return old_rows.contains(entry); }

  // The rows recorded in an entry, and those among them that are of earlier epochs.
  RowBits rows_of(std::uint32_t entry) const noexcept {
    const ColdEntry& cold = entries.index.cold(entry);
    return RowBits{{load_word(cold.rows[0]), load_word(cold.rows[1])}};
  }
  void set_rows(std::uint32_t entry, const RowBits& bits) noexcept {
    ColdEntry& cold = entries.index.cold(entry);
    store_word(cold.rows[0], bits.word[0]);
    store_word(cold.rows[1], bits.word[1]);
  }
  RowBits old_rows_of(std::uint32_t entry) const noexcept {
    const auto found = old_rows.find(entry);
    return found == old_rows.end() ? RowBits{} : found->second.bits();
  }

  void release_owner(std::uint32_t entry) noexcept;

  Entries& entries;
  const std::uint64_t epoch;                            // of this server
  std::unordered_map<std::uint32_t, RowMask> old_rows;  // by entry: rows of earlier epochs
  std::uint64_t bytes[kRowCount] = {};                  // reserved + quarantined, by owner
  RowMask stranded;  // rows whose dead process has a device that may still write
};

}  // namespace kvstrata
