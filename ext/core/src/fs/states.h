// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The state machine of a part of `fs`, executed by FsParts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/machine.h"

namespace kvstrata {

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

namespace fs_states {

// Shorthands for the columns below.
inline constexpr std::uint8_t kNone = 0xFF;
inline constexpr auto kWrtn = static_cast<std::uint8_t>(FsPartState::kWriting);
inline constexpr auto kWrtt = static_cast<std::uint8_t>(FsPartState::kWritten);
inline constexpr auto kClmd = static_cast<std::uint8_t>(FsPartState::kClaimed);
inline constexpr auto kSttl = static_cast<std::uint8_t>(FsPartState::kSettled);

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

// clang-format on

}  // namespace kvstrata
