// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// HTTP/1.1's chunked coding (RFC 9112, 7.1), decoded in place.
//
//   size ─▶ [extension] ─▶ CR LF ─▶ body ─▶ CR LF ─▶ size …            a size of 0 ─▶ trailers ─▶
//   done
//
// Strict: a size is 1 to 15 hexadecimal digits, every line ends with CR LF, and lines and trailers
// are bounded. Extensions and trailers are passed over. After `done` and `broken` nothing is read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstrata {

class ChunkReader {
 public:
  // Bytes of one size line with its extension, and of all trailers.
  static constexpr std::size_t kMaxLineBytes = 4096;
  static constexpr std::size_t kMaxTrailerBytes = 65536;

  // Moves the body's bytes among `bytes` to the front, and returns their number. `used`: how many
  // bytes were read, which are fewer than `length` only if the body has ended, or is broken.
  std::size_t decode(std::uint8_t* bytes, std::size_t length, std::size_t* used) noexcept;

  [[nodiscard]] bool done() const noexcept { return state_ == State::kDone; }
  [[nodiscard]] bool broken() const noexcept { return state_ == State::kBroken; }

 private:
  enum class State : std::uint8_t {
    kSize,       // at the first digit of a size
    kDigits,     // within a size
    kExtension,  // after its semicolon
    kSizeEnd,    // after the CR of its line
    kBody,
    kBodyCr,
    kBodyLf,
    kTrailer,     // at the beginning of a trailer's line
    kTrailerIn,   // within one
    kTrailerEnd,  // after its CR
    kLastLf,      // after the CR of the empty line that ends the trailers
    kDone,
    kBroken,
  };

  void next(std::uint8_t byte) noexcept;

  State state_ = State::kSize;
  std::uint64_t left_ = 0;  // bytes of the chunk that are still to come
  std::uint32_t digits_ = 0;
  std::uint32_t line_bytes_ = 0;
};

}  // namespace kvstrata
