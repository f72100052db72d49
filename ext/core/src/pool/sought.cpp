// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/sought.h"

#include <algorithm>
#include <array>

#include "hash/sha256.h"

namespace kvstrata {

namespace {

const std::uint8_t* bytes_of(const Digest* keys) noexcept {
  return reinterpret_cast<const std::uint8_t*>(keys);
}

}  // namespace

ChainKeys::ChainKeys(const Digest& root, std::span<const Digest> chain,
                     std::span<const Digest> slices, std::span<const std::uint32_t> spans,
                     std::size_t max_keys)
    : chain_(chain), bound_(slices.size()), keys_left_(max_keys) {
  bind_slices(root, slices, bound_.data());
  for (std::size_t slice = 0; slice < spans.size(); ++slice)
    if (spans[slice] == 0) whole_slices_.push_back(slice);
}

bool ChainKeys::derive_whole(const IndexView& index, const EntryLocal* local) {
  const std::size_t n_whole = whole_slices_.size();
  if (n_whole != 0 && chain_.size() > keys_left_ / n_whole) return false;
  keys_left_ -= chain_.size() * n_whole;
  const std::size_t n_keys = chain_.size() * n_whole;
  whole_keys_.resize(n_keys);
  guesses_.resize(n_keys);
  std::vector<Digest> bound;
  for (const std::size_t slice : whole_slices_)
    bound.push_back(bound_[slice]);
  const std::uint8_t* const keys = bytes_of(whole_keys_.data());
  const auto guess = [&](std::size_t first, std::size_t end) {
    index.guess_batch(keys + first * kKeyBytes, end - first, guesses_.data() + first, local,
                      sizeof(EntryLocal));
  };
  // While some keys are hashed, the home lines of the keys before them arrive from memory, and the
  // entries of those before that.
  constexpr std::size_t kGroupChunks = 8;
  std::size_t guessed = 0;
  for (std::size_t chunk = 0; chunk < chain_.size(); chunk += kGroupChunks) {
    const std::size_t n = std::min(kGroupChunks, chain_.size() - chunk);
    const std::size_t first = chunk * n_whole;
    bound_keys(chain_.subspan(chunk, n), bound, whole_keys_.data() + first);
    index.prefetch_lines(keys + first * kKeyBytes, n * n_whole);
    guess(guessed, first);
    guessed = first;
  }
  guess(guessed, n_keys);
  return true;
}

bool ChainKeys::derive(std::size_t slice, std::size_t first, std::size_t n, Digest* out) noexcept {
  if (n > keys_left_) return false;
  keys_left_ -= n;
  bound_keys(chain_.subspan(first, n), std::span(&bound_[slice], 1), out);
  return true;
}

Sought::Sought(Entries& entries, const std::uint8_t* keys, std::size_t n_keys, std::size_t n_slices)
    : entries_(entries), n_chunks_(n_keys / n_slices), n_slices_(n_slices), found_(entries.found) {
  entries.find(keys, n_keys);
}

Sought::Sought(Entries& entries, ChainKeys& keys)
    : entries_(entries),
      keys_(&keys),
      n_chunks_(keys.n_chunks()),
      n_slices_(keys.n_slices()),
      found_(entries.found) {
  const std::span<const Digest> whole = keys.whole();
  const std::span<const std::size_t> slices = keys.whole_slices();
  found_.assign(keys.guesses().begin(), keys.guesses().end());
  entries.index.confirm_batch(bytes_of(whole.data()), whole.size(), found_.data());
  if (slices.size() == n_slices_) return;
  found_.resize(n_chunks_ * n_slices_, kNotSought);
  // From the last chunk to the first, since each entry moves to a higher place.
  for (std::size_t chunk = n_chunks_; chunk-- > 0;) {
    std::uint32_t* const row = found_.data() + chunk * n_slices_;
    const std::uint32_t* const from = found_.data() + chunk * slices.size();
    std::size_t slice = n_slices_;
    for (std::size_t i = slices.size(); i-- > 0;) {
      const std::uint32_t entry = from[i];
      while (--slice > slices[i])
        row[slice] = kNotSought;
      row[slice] = entry;
    }
    while (slice-- > 0)
      row[slice] = kNotSought;
  }
}

std::uint32_t Sought::seek(std::size_t chunk, std::size_t slice) {
  const std::size_t first = chunk / kPiece * kPiece;
  const std::size_t n = std::min(kPiece, n_chunks_ - first);
  std::array<Digest, kPiece> keys;
  if (exceeded_ || !keys_->derive(slice, first, n, keys.data())) {
    exceeded_ = true;
    return kNoEntry;
  }
  std::array<std::uint32_t, kPiece> found;
  entries_.index.find_batch(bytes_of(keys.data()), n, found.data(), entries_.local,
                            sizeof(EntryLocal));
  for (std::size_t i = 0; i < n; ++i)
    found_[(first + i) * n_slices_ + slice] = found[i];
  return found[chunk - first];
}

}  // namespace kvstrata
