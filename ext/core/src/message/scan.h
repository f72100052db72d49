// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Inspects a MessagePack message before it is decoded: finds its first fields, and checks that it
// stays within the limits of our messages. Allocates nothing, and reads at most `elements` + 1
// headers, however long the message is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstrata {

// The limits of a message. `depth`: containers around one value, at most kMaxScanDepth.
struct ScanLimits {
  std::uint32_t depth;
  std::uint32_t elements;      // all values, keys of maps included
  std::uint32_t text_bytes;    // one string
  std::uint32_t binary_bytes;  // one byte string or extension
};
inline constexpr std::uint32_t kMaxScanDepth = 64;

enum class ScanFault : std::uint8_t {
  kNone = 0,
  kTooDeep = 1,
  kTooMany = 2,
  kLongText = 3,
  kLongBinary = 4,
  kBroken = 5,  // ends within a value, has the unused byte 0xC1, or bytes after its value
};

// The first three values of a message that is an array, as far as they were reached: a string, 16
// bytes, and a number below 2^63. A value of another kind counts as absent.
struct MessageHead {
  const std::uint8_t* op = nullptr;  // into the message; null if absent
  std::uint32_t op_bytes = 0;
  const std::uint8_t* session = nullptr;  // into the message; null if absent
  std::uint64_t seq = 0;                  // 0 if absent
  ScanFault fault = ScanFault::kNone;     // the first fault; the bytes behind it were not read
};

inline constexpr std::size_t kSessionBytes = 16;

// A frame may begin with a proof: the header of a byte string, 0xC4 and its length, and a secret.
inline constexpr std::size_t kSecretBytes = 32;
inline constexpr std::size_t kProofBytes = 2 + kSecretBytes;

// REQUIRES: `message` has `bytes` readable bytes, and limits.depth <= kMaxScanDepth.
MessageHead scan_message(const std::uint8_t* message, std::size_t bytes,
                         const ScanLimits& limits) noexcept;

}  // namespace kvstrata
