// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The state machines of a disk log: that of a segment, executed by Segments, and that of the log's
// mode, executed by Appender.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/machine.h"

namespace kvstrata::disk {

// Of a segment's number.
enum class SegmentState : std::uint8_t {
  kAbsent,
  kFree,
  kActive,
  kFull,
  kListed,
  kRetiring,
  kDrained,
};
inline constexpr std::size_t kSegmentStateCount = 7;

enum class SegmentEvent : std::uint8_t {
  kCreated,
  kChosen,
  kFilled,
  kTableWritten,
  kRetire,
  kPinsGone,
  kRenewed,
  kFailed,
  kDropped,
};
inline constexpr std::size_t kSegmentEventCount = 9;

// Of the log.
enum class LogMode : std::uint8_t {
  kOpening,
  kOpen,
  kStarved,
  kReadOnly,
  kStopping,
  kStoppingReadOnly,
};
inline constexpr std::size_t kLogModeCount = 6;

enum class LogEvent : std::uint8_t {
  kOpened,
  kNoRoom,
  kRoom,
  kWriteFailed,
  kClose,
};
inline constexpr std::size_t kLogEventCount = 5;

namespace states {

// Shorthands for the columns below.
inline constexpr std::uint8_t kNone = 0xFF;
inline constexpr auto kAbsn = static_cast<std::uint8_t>(SegmentState::kAbsent);
inline constexpr auto kFree = static_cast<std::uint8_t>(SegmentState::kFree);
inline constexpr auto kActv = static_cast<std::uint8_t>(SegmentState::kActive);
inline constexpr auto kFull = static_cast<std::uint8_t>(SegmentState::kFull);
inline constexpr auto kLstd = static_cast<std::uint8_t>(SegmentState::kListed);
inline constexpr auto kRtrn = static_cast<std::uint8_t>(SegmentState::kRetiring);
inline constexpr auto kDrnd = static_cast<std::uint8_t>(SegmentState::kDrained);
inline constexpr auto kOpnn = static_cast<std::uint8_t>(LogMode::kOpening);
inline constexpr auto kOpen = static_cast<std::uint8_t>(LogMode::kOpen);
inline constexpr auto kStrv = static_cast<std::uint8_t>(LogMode::kStarved);
inline constexpr auto kRdOn = static_cast<std::uint8_t>(LogMode::kReadOnly);
inline constexpr auto kStpp = static_cast<std::uint8_t>(LogMode::kStopping);
inline constexpr auto kStpx = static_cast<std::uint8_t>(LogMode::kStoppingReadOnly);

}  // namespace states

// clang-format off
inline constexpr Machine<SegmentState, kSegmentStateCount, SegmentEvent, kSegmentEventCount> kSegmentMachine{
    "Segment of a disk log",
    {
        {"ABSENT", "No file has this number."},
        {"FREE", "In the list of free segments: no frame in it counts."},
        {"ACTIVE", "Frames are appended to it."},
        {"FULL", "In the list of full segments, and its table is not in the file."},
        {"LISTED", "In the list of full segments, and its table is in the file."},
        {"RETIRING", "The oldest in the list of full segments: its records are leaving the index, or have left it."},
        {"DRAINED", "In no list: no record of it is in the index, and no load reads it."},
    },
    {
        {"created", "Its file was made or found."},
        {"chosen", "It takes the next frames."},
        {"filled", "The next frame does not fit."},
        {"table_written", "Its table is in the file."},
        {"retire", "The records to keep were written again elsewhere; the others leave the index."},
        {"pins_gone", "The last load from it has ended."},
        {"renewed", "The header of its next generation is on the medium."},
        {"failed", "It could be neither renewed nor dropped."},
        {"dropped", "Its file is to be removed."},
    },
    {
        // ABSENT         FREE           ACTIVE         FULL           LISTED         RETIRING       DRAINED
        { states::kFree, states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kNone},  // created
        { states::kNone, states::kActv, states::kNone, states::kNone, states::kNone, states::kNone, states::kNone},  // chosen
        { states::kNone, states::kNone, states::kFull, states::kNone, states::kNone, states::kNone, states::kNone},  // filled
        { states::kNone, states::kNone, states::kNone, states::kLstd, states::kNone, states::kRtrn, states::kNone},  // table_written
        { states::kNone, states::kDrnd, states::kNone, states::kRtrn, states::kRtrn, states::kRtrn, states::kNone},  // retire
        { states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kDrnd, states::kNone},  // pins_gone
        { states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kFree},  // renewed
        { states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kRtrn},  // failed
        { states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kNone, states::kAbsn},  // dropped
    },
};

inline constexpr Machine<LogMode, kLogModeCount, LogEvent, kLogEventCount> kLogMachine{
    "Mode of a disk log",
    {
        {"OPENING", "The folder is being read."},
        {"OPEN", "Frames are taken."},
        {"STARVED", "Frames are taken, but no segment could be made ready; the next put tries again."},
        {"READ_ONLY", "A write or a sync failed: the records in the index can be loaded, and nothing is written."},
        {"STOPPING", "The log is being closed."},
        {"STOPPING_READ_ONLY", "The log is being closed, and a write or a sync failed."},
    },
    {
        {"opened", "The folder was read, and the log is below its capacity."},
        {"no_room", "The log's thread could not make a segment ready."},
        {"room", "The log's thread made a segment ready, or a put or a remove asks for room."},
        {"write_failed", "A write or a sync failed, so it is unknown which writes since the sync before are on the medium."},
        {"close", "Its owner closes it."},
    },
    {
        // OPENING             OPEN                STARVED             READ_ONLY           STOPPING            STOPPING_READ_ONLY
        { states::kOpen,      states::kNone,      states::kNone,      states::kRdOn,      states::kNone,      states::kNone},  // opened
        { states::kNone,      states::kStrv,      states::kStrv,      states::kRdOn,      states::kStpp,      states::kStpx},  // no_room
        { states::kNone,      states::kOpen,      states::kOpen,      states::kRdOn,      states::kStpp,      states::kStpx},  // room
        { states::kRdOn,      states::kRdOn,      states::kRdOn,      states::kRdOn,      states::kStpx,      states::kStpx},  // write_failed
        { states::kStpp,      states::kStpp,      states::kStpp,      states::kStpx,      states::kStpp,      states::kStpx},  // close
    },
};

// clang-format on

}  // namespace kvstrata::disk
