// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Status: the result of every function of ext/core that can fail.
//
// - A Status never allocates. `message` is a string literal and `detail` has the numbers that
//   belong to it; the language binding combines both into one text.
// - No exception crosses the core's boundary. A function that cannot fail returns its value.
// - The message names the field that is wrong and says what to change. By convention, `detail[0]`
//   is the offending value, `detail[1]` the limit that it breaks, and `detail[2]` the index of the
//   item in a batch. Unused details are 0.
// - `reason` is set where an adapter or the pool reports a word for the error (base/reason.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/reason.h"

namespace kvstrata {

// One code per action that a caller can take. The numeric values are part of the binding, which
// maps them to exception classes; a value is never reused.
enum class StatusCode : std::uint16_t {
  kOk = 0,
  kBadArgument = 1,    // the caller passed something impossible: fix the call
  kOutOfRange = 2,     // an index or length leaves the object it refers to: fix the call
  kNotFound = 3,       // the named thing does not exist now
  kExists = 4,         // the named thing exists already
  kNoSpace = 5,        // memory or file space is used up
  kQueueFull = 6,      // a bounded queue is full: try again after reading completions
  kBusy = 7,           // another process or thread uses it
  kClosed = 8,         // the object was closed
  kCancelled = 9,      // cancelled before it began
  kTimedOut = 10,      // the wait ended; the operation continues
  kCorrupt = 11,       // the bytes do not match their checksum
  kStale = 12,         // bytes are sound but belong to something else (key, generation, epoch)
  kIncompatible = 13,  // another format version, layout or identity
  kRefused = 14,       // a rule (quota, limit, ownership) forbids it
  kUnsupported = 15,   // this CPU or operating system cannot do it
  kOsError = 16,       // a system call failed; `detail[0]` is errno
  kInternal = 17,      // an invariant of ours is broken: a bug
};

class [[nodiscard]] Status {
 public:
  constexpr Status() noexcept = default;

  // `message` must have static storage duration.
  constexpr Status(StatusCode code, const char* message, std::int64_t detail0 = 0,
                   std::int64_t detail1 = 0, std::int64_t detail2 = 0) noexcept
      : message_(message), detail_{detail0, detail1, detail2}, code_(code) {}

  constexpr Status(StatusCode code, Reason reason, const char* message, std::int64_t detail0 = 0,
                   std::int64_t detail1 = 0, std::int64_t detail2 = 0) noexcept
      : Status(code, message, detail0, detail1, detail2) {
    reason_ = reason;
  }

  [[nodiscard]] constexpr bool ok() const noexcept { return code_ == StatusCode::kOk; }
  [[nodiscard]] constexpr StatusCode code() const noexcept { return code_; }
  [[nodiscard]] constexpr Reason reason() const noexcept { return reason_; }
  [[nodiscard]] constexpr const char* message() const noexcept { return message_; }
  // REQUIRES: i < 3.
  [[nodiscard]] constexpr std::int64_t detail(int i) const noexcept { return detail_[i]; }

 private:
  const char* message_ = "";
  std::int64_t detail_[3] = {0, 0, 0};
  StatusCode code_ = StatusCode::kOk;
  Reason reason_ = Reason::kNone;
};

// By StatusCode.
inline constexpr const char* kStatusCodeNames[] = {
    "ok",         "bad_argument", "out_of_range", "not_found",   "exists",    "no_space",
    "queue_full", "busy",         "closed",       "cancelled",   "timed_out", "corrupt",
    "stale",      "incompatible", "refused",      "unsupported", "os_error",  "internal"};
static_assert(std::size(kStatusCodeNames) == static_cast<std::size_t>(StatusCode::kInternal) + 1);

// Stable lower-case name of a code, for logs and tests.
constexpr const char* status_code_name(StatusCode code) noexcept {
  return kStatusCodeNames[static_cast<std::size_t>(code)];
}

}  // namespace kvstrata

// Returns early from a function that returns Status when `expr` failed.
#define KVSTRATA_RETURN_IF_ERROR(expr)            \
  do {                                            \
    ::kvstrata::Status kvstrata_status_ = (expr); \
    if (!kvstrata_status_.ok()) [[unlikely]] {    \
      return kvstrata_status_;                    \
    }                                             \
  } while (false)
