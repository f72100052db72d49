// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Reason: why the native code refused or failed something, as a short word. This is the only list
// of these words: adapters report them beside their outcomes (kvstrata/connector.h, where a reason
// is the text itself), the pool in its errors. src/kvstrata/tiers/reasons.py says what the words
// mean for a lookup, and whether they blame the medium.
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
  bool retryable;  // the same request may succeed later; a put with it is kThrottled
};

// In the order of Reason.
inline constexpr ReasonRow kReasons[] = {
    {Reason::kNone, "", false},
    {Reason::kBadItem, "bad_item", false},    // too short for a record
    {Reason::kCapacity, "capacity", true},    // too few records could be evicted in time
    {Reason::kChecksum, "checksum", false},   // the record is removed
    {Reason::kDiskFull, "disk_full", true},   // or less than `min_free_gb` would stay free
    {Reason::kInFlight, "in_flight", true},   // another put of the record has not ended
    {Reason::kInternal, "internal", false},   // the adapter gave no outcome: a bug
    {Reason::kIo, "io", false},               // a system call failed; a note has path and error
    {Reason::kLength, "length", false},       // the record has another length than was asked for
    {Reason::kMismatch, "mismatch", false},   // a sound record of a format that this program lacks
    {Reason::kNoRoom, "no_room", true},       // no segment of the log became free in time
    {Reason::kReadOnly, "read_only", false},  // the log takes no more records
    {Reason::kSessionsFull, "sessions_full", true},  // of the pool's session table
    {Reason::kTooLarge, "too_large", false},         // for a segment
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
