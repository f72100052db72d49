// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The state machines of `fs`: that of a part, executed by FsParts, and that of a server that shares
// a directory, executed by FsSharer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/machine.h"

namespace kvstrata {

// Of a part.
enum class FsPartState : std::uint8_t {
  kWriting,
  kWritten,
  kClaimed,
  kSettled,
};
inline constexpr std::size_t kFsPartStateCount = 4;

enum class FsPartEvent : std::uint8_t {
  kWrote,
  kWriteFailed,
  kClaimed,
  kPublished,
  kNeedless,
  kPublishFailed,
  kCancelled,
};
inline constexpr std::size_t kFsPartEventCount = 7;

// Of a server.
enum class FsSharerRole : std::uint8_t {
  kOutside,
  kHears,
  kOffice,
  kDeposed,
};
inline constexpr std::size_t kFsSharerRoleCount = 4;

enum class FsSharerEvent : std::uint8_t {
  kJoined,
  kTookOffice,
  kDeposed,
  kTurnEnded,
  kLeft,
};
inline constexpr std::size_t kFsSharerEventCount = 5;

namespace fs_states {

// Shorthands for the columns below.
inline constexpr std::uint8_t kNone = 0xFF;
inline constexpr auto kWrtn = static_cast<std::uint8_t>(FsPartState::kWriting);
inline constexpr auto kWrtt = static_cast<std::uint8_t>(FsPartState::kWritten);
inline constexpr auto kClmd = static_cast<std::uint8_t>(FsPartState::kClaimed);
inline constexpr auto kSttl = static_cast<std::uint8_t>(FsPartState::kSettled);
inline constexpr auto kOtsd = static_cast<std::uint8_t>(FsSharerRole::kOutside);
inline constexpr auto kHrs = static_cast<std::uint8_t>(FsSharerRole::kHears);
inline constexpr auto kOffc = static_cast<std::uint8_t>(FsSharerRole::kOffice);
inline constexpr auto kDpsd = static_cast<std::uint8_t>(FsSharerRole::kDeposed);

}  // namespace fs_states

// clang-format off
inline constexpr Machine<FsPartState, kFsPartStateCount, FsPartEvent, kFsPartEventCount> kFsPartMachine{
    "Part of an fs directory",
    {
        {"WRITING", "A thread is writing it."},
        {"WRITTEN", "It is synced under a temporary name."},
        {"CLAIMED", "A thread is publishing it."},
        {"SETTLED", "Its outcome is known and is kept until every batch that asked for it has ended."},
    },
    {
        {"wrote", "Its bytes were written and synced, or its record exists already."},
        {"write_failed", "It could not be written."},
        {"claimed", "A thread takes it, to publish it."},
        {"published", "Its record has its name, and the name is durable."},
        {"needless", "Its record exists already, or its key was deleted."},
        {"publish_failed", "Its record could not be given its name, or the name could not be made durable."},
        {"cancelled", "Its key was deleted: unless its publication has begun, it is not published."},
    },
    {
        // WRITING           WRITTEN           CLAIMED           SETTLED
        { fs_states::kWrtt, fs_states::kNone, fs_states::kNone, fs_states::kNone},  // wrote
        { fs_states::kSttl, fs_states::kNone, fs_states::kNone, fs_states::kNone},  // write_failed
        { fs_states::kNone, fs_states::kClmd, fs_states::kNone, fs_states::kNone},  // claimed
        { fs_states::kNone, fs_states::kNone, fs_states::kSttl, fs_states::kNone},  // published
        { fs_states::kNone, fs_states::kNone, fs_states::kSttl, fs_states::kNone},  // needless
        { fs_states::kNone, fs_states::kNone, fs_states::kSttl, fs_states::kNone},  // publish_failed
        { fs_states::kWrtn, fs_states::kWrtt, fs_states::kClmd, fs_states::kNone},  // cancelled
    },
};

inline constexpr Machine<FsSharerRole, kFsSharerRoleCount, FsSharerEvent, kFsSharerEventCount> kFsSharerMachine{
    "Server that shares an fs directory",
    {
        {"OUTSIDE", "It has not joined, or it has left."},
        {"HEARS", "Another server is the janitor, or no server is yet."},
        {"OFFICE", "It is the janitor."},
        {"DEPOSED", "It was the janitor until it found a newer one; its decisions in this turn do not count."},
    },
    {
        {"joined", "It holds its lock, the others can read its file, and its settings agree with theirs."},
        {"took_office", "It was the first to create the next janitor's file."},
        {"deposed", "Its file is no longer the janitor's file with the highest number."},
        {"turn_ended", "A turn has ended; a server that was deposed in it follows the newer janitor from now on."},
        {"left", "It is closing, and takes no more bytes."},
    },
    {
        // OUTSIDE           HEARS             OFFICE            DEPOSED
        { fs_states::kHrs,  fs_states::kNone, fs_states::kNone, fs_states::kNone},  // joined
        { fs_states::kNone, fs_states::kOffc, fs_states::kNone, fs_states::kNone},  // took_office
        { fs_states::kNone, fs_states::kNone, fs_states::kDpsd, fs_states::kDpsd},  // deposed
        { fs_states::kNone, fs_states::kHrs,  fs_states::kOffc, fs_states::kHrs},  // turn_ended
        { fs_states::kNone, fs_states::kOtsd, fs_states::kOtsd, fs_states::kOtsd},  // left
    },
};

// clang-format on

}  // namespace kvstrata
