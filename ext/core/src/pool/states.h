// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The state machines of a pool: that of an entry, executed by Entries, and that of a session row,
// executed by Rows.
#pragma once

#include <cstdint>

#include "base/machine.h"
#include "pool/index.h"

namespace kvstrata {

// In the order of the table. "In use" means that somebody may still touch the bytes: the owner of a
// hold or a lease, or a process that was attached to an earlier server.
enum class EntryEvent : std::uint8_t {
  kReserve,
  kCommit,
  kAbort,
  kAbortInUse,
  kEvict,
  kDrop,
  kDropInUse,
  kVerify,
  kUnused,
  kAdopt,
  kAdoptInUse,
  kAdoptUnused,
};
inline constexpr std::size_t kEntryEventCount = 12;

enum class RowState : std::uint8_t { kUnclaimed, kCurrent, kOld, kStranded };
inline constexpr std::size_t kRowStateCount = 4;

enum class RowEvent : std::uint8_t { kClaim, kQuiesce, kGone, kStrand, kAdopt, kAdoptUnsound };
inline constexpr std::size_t kRowEventCount = 6;

namespace states {

// Shorthands for the columns below.
inline constexpr std::uint8_t kNone = 0xFF;
inline constexpr auto kFree = static_cast<std::uint8_t>(EntryState::kFree);
inline constexpr auto kResv = static_cast<std::uint8_t>(EntryState::kReserved);
inline constexpr auto kRedy = static_cast<std::uint8_t>(EntryState::kReady);
inline constexpr auto kUnvf = static_cast<std::uint8_t>(EntryState::kUnverified);
inline constexpr auto kQuar = static_cast<std::uint8_t>(EntryState::kQuarantined);
inline constexpr auto kUncl = static_cast<std::uint8_t>(RowState::kUnclaimed);
inline constexpr auto kCurr = static_cast<std::uint8_t>(RowState::kCurrent);
inline constexpr auto kOldd = static_cast<std::uint8_t>(RowState::kOld);
inline constexpr auto kStrd = static_cast<std::uint8_t>(RowState::kStranded);

}  // namespace states

// clang-format off
inline constexpr Machine<EntryState, kEntryStateCount, EntryEvent, kEntryEventCount> kEntryMachine{
    "Entry of the pool",
    {
        {"FREE", "Unused."},
        {"RESERVED", "One row may write the extent, and nobody can see it."},
        {"READY", "Visible."},
        {"UNVERIFIED", "Adopted from an earlier server; its checksums were not verified yet."},
        {"QUARANTINED", "Out of the index, but its bytes are in use."},
    },
    {
        {"reserve", "A session, or the server for a load, gets the entry to write it."},
        {"commit", "The writer has finished, and the record is the promised one."},
        {"abort", "The writer gave up, is gone, or wrote another record."},
        {"abort_in_use", "The same while the bytes are in use."},
        {"evict", "Its room is wanted, its tenant is over quota, or the pool is over its watermark."},
        {"drop", "It was cleared, removed, or found corrupt."},
        {"drop_in_use", "The same while the bytes are in use."},
        {"verify", "Its checksums were found right."},
        {"unused", "The last hold, lease or earlier process that could touch the bytes has ended."},
        {"adopt", "A new server finds the entry, its key and its extent sound."},
        {"adopt_in_use", "A new server finds that the entry cannot be served and that its bytes are in use."},
        {"adopt_unused", "A new server finds that the entry cannot be served and that nobody uses its bytes."},
    },
    {
        //   FREE           RESERVED       READY          UNVERIFIED     QUARANTINED
        {states::kResv, states::kNone, states::kNone, states::kNone, states::kNone},  // reserve
        {states::kNone, states::kRedy, states::kNone, states::kNone, states::kNone},  // commit
        {states::kNone, states::kFree, states::kNone, states::kNone, states::kNone},  // abort
        {states::kNone, states::kQuar, states::kNone, states::kNone, states::kNone},  // abort_in_use
        {states::kNone, states::kNone, states::kFree, states::kFree, states::kNone},  // evict
        {states::kNone, states::kNone, states::kFree, states::kFree, states::kNone},  // drop
        {states::kNone, states::kNone, states::kQuar, states::kQuar, states::kNone},  // drop_in_use
        {states::kNone, states::kNone, states::kNone, states::kRedy, states::kNone},  // verify
        {states::kNone, states::kNone, states::kNone, states::kNone, states::kFree},  // unused
        {states::kNone, states::kNone, states::kUnvf, states::kUnvf, states::kNone},  // adopt
        {states::kNone, states::kQuar, states::kQuar, states::kQuar, states::kQuar},  // adopt_in_use
        {states::kFree, states::kFree, states::kFree, states::kFree, states::kFree},  // adopt_unused
    },
};

// Row 0, the server's own, has no state.
inline constexpr Machine<RowState, kRowStateCount, RowEvent, kRowEventCount> kRowMachine{
    "Row of the session table",
    {
        {"UNCLAIMED", "No process has the row."},
        {"CURRENT", "Its process is attached, and touches nothing of earlier servers."},
        {"OLD", "Its process was attached to an earlier server and may still touch the extents that it knew then."},
        {"STRANDED", "Its process is gone, but a device may still write on its behalf."},
    },
    {
        {"claim", "A process attaches: a new session, or one that has the row already."},
        {"quiesce", "The process says that its copies of earlier epochs have ended."},
        {"gone", "The process is dead, and no device writes on its behalf."},
        {"strand", "The process is dead, and extents stay quarantined because its device may still write to them."},
        {"adopt", "A new server takes over the pool."},
        {"adopt_unsound", "A new server finds that the row is damaged, or that an earlier row has the same session."},
    },
    {
        //   UNCLAIMED      CURRENT        OLD            STRANDED
        {states::kCurr, states::kCurr, states::kOldd, states::kStrd},  // claim
        {states::kNone, states::kCurr, states::kCurr, states::kCurr},  // quiesce
        {states::kNone, states::kUncl, states::kUncl, states::kUncl},  // gone
        {states::kNone, states::kNone, states::kStrd, states::kStrd},  // strand
        {states::kUncl, states::kOldd, states::kOldd, states::kOldd},  // adopt
        {states::kUncl, states::kUncl, states::kUncl, states::kUncl},  // adopt_unsound
    },
};
// clang-format on

}  // namespace kvstrata
