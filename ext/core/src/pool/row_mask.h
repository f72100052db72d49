// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Sets of session rows: exact ones (RowMask) and those that a cold entry stores (RowBits).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "pool/index.h"

namespace kvstrata {

// The contents of ColdEntry::rows: several rows share a bit.
struct RowBits {
  std::uint64_t word[kRowBits / 64] = {};
  void set(std::uint32_t row) noexcept { word[row % kRowBits / 64] |= 1ULL << (row % 64); }
  bool test(std::uint32_t row) const noexcept {
    return (word[row % kRowBits / 64] >> (row % 64)) & 1;
  }
  bool any() const noexcept { return (word[0] | word[1]) != 0; }
  RowBits& operator|=(const RowBits& other) noexcept {
    for (std::size_t i = 0; i < std::size(word); ++i)
      word[i] |= other.word[i];
    return *this;
  }
  bool operator==(const RowBits& other) const noexcept = default;
};

struct RowMask {
  std::uint64_t word[kRowCount / 64] = {};
  void set(std::uint32_t row) noexcept { word[row / 64] |= 1ULL << (row % 64); }
  void clear(std::uint32_t row) noexcept { word[row / 64] &= ~(1ULL << (row % 64)); }
  bool test(std::uint32_t row) const noexcept { return (word[row / 64] >> (row % 64)) & 1; }
  bool any() const noexcept {
    for (const std::uint64_t bits : word) {
      if (bits != 0) return true;
    }
    return false;
  }
  RowBits bits() const noexcept {
    RowBits folded;
    for (std::size_t i = 0; i < std::size(word); ++i)
      folded.word[i % std::size(folded.word)] |= word[i];
    return folded;
  }
  // The rows of this mask that `bits` may stand for.
  RowMask among(const RowBits& bits) const noexcept {
    RowMask result;
    for (std::size_t i = 0; i < std::size(word); ++i)
      result.word[i] = word[i] & bits.word[i % std::size(bits.word)];
    return result;
  }
};

}  // namespace kvstrata
