// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "splice/chunks.h"

#include <algorithm>
#include <cstring>

namespace kvstrata {

namespace {

constexpr std::uint32_t kMaxDigits = 15;

int hex_value(std::uint8_t byte) noexcept {
  if (byte >= '0' && byte <= '9') {
    return byte - '0';
  }
  const std::uint8_t lower = byte | 0x20;
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// What a line may hold besides its end (RFC 9110, 5.5: a field's bytes, and tabs).
bool in_line(std::uint8_t byte) noexcept {
  return byte == '\t' || (byte >= ' ' && byte != 0x7f);
}

}  // namespace

void ChunkReader::next(std::uint8_t byte) noexcept {
  const int digit = hex_value(byte);
  State after = State::kBroken;
  switch (state_) {
    case State::kSize:
      left_ = digits_ = line_bytes_ = 0;
      [[fallthrough]];
    case State::kDigits:
      if (digit >= 0 && digits_ < kMaxDigits) {
        left_ = left_ << 4 | static_cast<std::uint64_t>(digit);
        ++digits_;
        after = State::kDigits;
      } else if (digits_ > 0 && byte == ';') {
        after = State::kExtension;
      } else if (digits_ > 0 && byte == '\r') {
        after = State::kSizeEnd;
      }
      break;
    case State::kExtension:
      if (byte == '\r') {
        after = State::kSizeEnd;
      } else if (in_line(byte) && ++line_bytes_ < kMaxLineBytes) {
        after = State::kExtension;
      }
      break;
    case State::kSizeEnd:
      line_bytes_ = 0;
      if (byte == '\n') {
        after = left_ > 0 ? State::kBody : State::kTrailer;
      }
      break;
    case State::kBodyCr:
      after = byte == '\r' ? State::kBodyLf : State::kBroken;
      break;
    case State::kBodyLf:
      after = byte == '\n' ? State::kSize : State::kBroken;
      break;
    case State::kTrailer:
    case State::kTrailerIn:
      if (byte == '\r') {
        after = state_ == State::kTrailer ? State::kLastLf : State::kTrailerEnd;
      } else if (in_line(byte) && ++line_bytes_ < kMaxTrailerBytes) {
        after = State::kTrailerIn;
      }
      break;
    case State::kTrailerEnd:
      line_bytes_ += 2;
      after = byte == '\n' ? State::kTrailer : State::kBroken;
      break;
    case State::kLastLf:
      after = byte == '\n' ? State::kDone : State::kBroken;
      break;
    case State::kBody:
    case State::kDone:
    case State::kBroken:
      break;
  }
  state_ = after;
}

std::size_t ChunkReader::decode(std::uint8_t* bytes, std::size_t length,
                                std::size_t* used) noexcept {
  std::size_t at = 0;
  std::size_t kept = 0;
  while (at < length && !done() && !broken()) {
    if (state_ != State::kBody) {
      next(bytes[at++]);
      continue;
    }
    const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(left_, length - at));
    std::memmove(bytes + kept, bytes + at, take);
    kept += take;
    at += take;
    left_ -= take;
    if (left_ == 0) {
      state_ = State::kBodyCr;
    }
  }
  *used = at;
  return kept;
}

}  // namespace kvstrata
