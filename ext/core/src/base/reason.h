// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Reason: why the native code refused or failed something, as a short word. This is the only list
// of these words: adapters report them beside their outcomes (kvstrata/connector.h, where a reason
// is the text itself), the pool in its errors. docs/wire-codes.md shows the list, and
// src/kvstrata/tiers/reasons.py says what the words mean for a lookup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

namespace kvstrata {

enum class Reason : std::uint8_t {
  kNone = 0,
  kBadItem,
  kCapacity,
  kChecksum,
  kDiskFull,
  kInFlight,
  kInternal,
  kIo,
  kLength,
  kMismatch,
  kNoRoom,
  kReadOnly,
  kSessionsFull,
  kTooLarge,
};

struct ReasonRow {
  Reason reason;
  const char* word;
  bool retryable;      // the same request may succeed later; a put with it is kThrottled
  bool blames_medium;  // it counts against the health of the adapter's medium
  const char* meaning;
};

// In the order of Reason.
inline constexpr ReasonRow kReasons[] = {
    {Reason::kNone, "", false, false, "Nothing went wrong."},
    {Reason::kBadItem, "bad_item", false, true, "The bytes are too short for a record."},
    {Reason::kCapacity, "capacity", true, true,
     "The records fill the capacity, and not enough of them could be evicted in time."},
    {Reason::kChecksum, "checksum", false, true,
     "The record does not match its checksums; it is removed."},
    {Reason::kDiskFull, "disk_full", true, true,
     "The file system is full, or less than `min_free_gb` would stay free."},
    {Reason::kInFlight, "in_flight", true, true, "Another put of the same record has not ended."},
    {Reason::kInternal, "internal", false, true, "The adapter gave no outcome: a bug."},
    {Reason::kIo, "io", false, true, "A system call failed; the log has the path and the error."},
    {Reason::kLength, "length", false, false,
     "The stored record has another length than the one asked for, or is incomplete."},
    {Reason::kMismatch, "mismatch", false, false,
     "The record is sound, but has a format version that this program cannot read; it stays."},
    {Reason::kNoRoom, "no_room", true, true,
     "The log has no free segment, and none became free in time."},
    {Reason::kReadOnly, "read_only", false, false,
     "A write or a sync failed, or the adapter is closing: the log takes no more records."},
    {Reason::kSessionsFull, "sessions_full", true, false,
     "All rows of the pool's session table are claimed."},
    {Reason::kTooLarge, "too_large", false, true, "The record is longer than a segment can hold."},
};

constexpr const ReasonRow& row_of(Reason reason) noexcept {
  return kReasons[static_cast<std::size_t>(reason)];
}

constexpr const char* word_of(Reason reason) noexcept {
  return row_of(reason).word;
}

// The reason with this word, or nothing for a word that another connector made up.
constexpr std::optional<Reason> reason_of(std::string_view word) noexcept {
  for (const ReasonRow& row : kReasons) {
    if (row.word == word) return row.reason;
  }
  return std::nullopt;
}

static_assert([] {
  std::size_t number = 0;
  for (const ReasonRow& row : kReasons) {
    if (row.reason != static_cast<Reason>(number++)) return false;
  }
  return row_of(Reason::kTooLarge).reason == Reason::kTooLarge &&
         std::size(kReasons) == static_cast<std::size_t>(Reason::kTooLarge) + 1;
}());

}  // namespace kvstrata
