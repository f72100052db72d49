// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The keys of a lookup and their entries. A lookup names a prompt by its chain; its storage keys
// follow from the chain, one for each slice of a chunk. Those of slices with a span, of which a hit
// needs the last chunks only (pool/windows.h), are derived and sought only when they are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvstrata/digest.h"
#include "pool/entries.h"

namespace kvstrata {

// The keys of a prompt, by what they are derived from. All three must outlive the object.
class ChainKeys {
 public:
  // At most `max_keys` are derived.
  ChainKeys(const Digest& root, std::span<const Digest> chain, std::span<const Digest> slices,
            std::span<const std::uint32_t> spans, std::size_t max_keys);

  // Derives the keys of the slices without a span, and meanwhile fetches into the cache where the
  // index has them. False if they are more than `max_keys`; then nothing is derived. Takes no lock.
  bool derive_whole(const IndexView& index, const EntryLocal* local);
  // The keys of the slices without a span, chunk-major, and guesses at their entries.
  std::span<const Digest> whole() const noexcept { return whole_keys_; }
  std::span<const std::uint32_t> guesses() const noexcept { return guesses_; }
  // Which slices have no span.
  std::span<const std::size_t> whole_slices() const noexcept { return whole_slices_; }

  // Writes the keys of the chunks [first, first + n) of one slice to `out`. False if they would be
  // more than `max_keys` together with those that were derived before.
  bool derive(std::size_t slice, std::size_t first, std::size_t n, Digest* out) noexcept;

  std::size_t n_chunks() const noexcept { return chain_.size(); }
  std::size_t n_slices() const noexcept { return bound_.size(); }

 private:
  std::span<const Digest> chain_;
  std::vector<Digest> bound_;  // by slice, see bind_slices()
  std::vector<std::size_t> whole_slices_;
  std::vector<Digest> whole_keys_;
  std::vector<std::uint32_t> guesses_;
  std::size_t keys_left_;
};

// The entries of a lookup's keys. REQUIRES, for everything here: the pool's mutex, and that nothing
// else uses Entries::found.
class Sought {
 public:
  // Of keys that are all given, chunk-major.
  Sought(Entries& entries, const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices);
  // Of keys of which derive_whole() has derived some.
  Sought(Entries& entries, ChainKeys& keys);

  // The entry of a chunk in a slice, kNoEntry if the index has none.
  std::uint32_t at(std::size_t chunk, std::size_t slice) {
    const std::uint32_t entry = found_[chunk * n_slices_ + slice];
    return entry != kNotSought ? entry : seek(chunk, slice);
  }
  std::size_t n_chunks() const noexcept { return n_chunks_; }
  std::size_t n_slices() const noexcept { return n_slices_; }
  // More keys would have to be derived than allowed: what at() returned since then is not known.
  bool exceeded() const noexcept { return exceeded_; }

 private:
  static constexpr std::uint32_t kNotSought = kNoEntry - 1;
  static constexpr std::size_t kPiece = 16;  // chunks of a slice that are sought together

  std::uint32_t seek(std::size_t chunk, std::size_t slice);

  Entries& entries_;
  ChainKeys* const keys_ = nullptr;
  const std::size_t n_chunks_;
  const std::size_t n_slices_;
  std::vector<std::uint32_t>& found_;  // by chunk and slice
  bool exceeded_ = false;
};

}  // namespace kvstrata
